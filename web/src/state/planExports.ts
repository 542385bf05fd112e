import type { Candidate } from "./api.ts";
import { save } from "./exports.ts";
import type { PlanState } from "./plan.ts";
import type { Studio } from "./studio.ts";

export const PLAN_COMMAND = "penstock train train.py --schedule plan.json";

interface PlanExport {
  name: string;
  says: string;
  run: () => unknown;
}

/** What the Plan tab shows, as files: the plan itself, its candidates and their picture. */
export function planExports(plan: PlanState, studio: Studio): PlanExport[] {
  const always: PlanExport[] = [
    { name: "CSV", says: "every candidate", run: () => save({ name: "candidates.csv", type: "text/csv", content: candidatesCsv(plan.candidates.value) }) },
    { name: "SVG", says: "time against memory", run: () => save({ name: "candidates.svg", type: "image/svg+xml", content: plotSvg() }) },
  ];
  if (!plan.isSaved.value) return always;
  return [
    { name: "Plan", says: "plan.json, to train with", run: () => savePlan(plan) },
    ...always,
    { name: "Command", says: "train with plan.json", run: () => studio.copy(PLAN_COMMAND, "The command is copied; save plan.json beside it") },
  ];
}

export async function savePlan(plan: PlanState): Promise<void> {
  save({ name: "plan.json", type: "application/json", content: await plan.file() });
}

const COLUMNS = ["index", "name", "placement", "chunks", "microbatch", "microbatches", "slices", "recompute", "verdict", "reason", "fits", "makespan", "bubble", "memory", "memory_rank"] as const;

/** One row per candidate; text that a table program would take for a formula is kept as text. */
export function candidatesCsv(candidates: Candidate[]): string {
  const cell = (value: unknown): string => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  };
  return [COLUMNS.join(","), ...candidates.map((candidate) => COLUMNS.map((name) => cell(candidate[name])).join(","))].map((line) => `${line}\r\n`).join("");
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "paint-order", "font-size", "font-weight", "font-family"];

/** The plot of the page as a file of its own, with the styles that it has on screen. */
function plotSvg(): string {
  const drawn = document.querySelector<SVGSVGElement>("[data-testid=tradeoff]");
  if (!drawn) throw new Error("There is no picture of the candidates yet.");
  const copy = drawn.cloneNode(true) as SVGSVGElement;
  const originals = drawn.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((element, k) => {
    const style = getComputedStyle(originals[k]);
    for (const name of STYLES) element.setAttribute(name, style.getPropertyValue(name));
    for (const name of ["tabindex", "role", "data-testid", "class"]) element.removeAttribute(name);
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("style", `background:${getComputedStyle(document.querySelector(".found")!).backgroundColor}`);
  return `${new XMLSerializer().serializeToString(copy)}\n`;
}
