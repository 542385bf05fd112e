import { fullCosts, type Costs } from "../core/index.ts";
import type { ColourBy } from "../draw/fills.ts";
import { SPREAD, UNCHANGED, type Adjust } from "./adjust.ts";

export type Option = string | number | boolean;

/** A schedule by name, as the controls give it. */
export interface Choice {
  schedule: string;
  ranks: number;
  microbatches: number;
  /** Null leaves it to the schedule. */
  chunks: number | null;
  options: Record<string, Option>;
  form: Form;
  /** The share of each rank's activations that is moved to host memory, in percent, as `50` or `100+50+0`; empty for none. */
  offload: string;
}

/** As it is, lowered to a program, or lowered with sharded parameters. */
export type Form = "schedule" | "program" | "sharded";
export const FORMS: Form[] = ["schedule", "program", "sharded"];

/** The one that is compared; it has the first one's ranks and microbatches. */
export type Other = Omit<Choice, "ranks" | "microbatches" | "form" | "offload">;

/** The place of an action: its panel, its rank, and its number in the rank's row. */
export interface Spot {
  panel: number;
  rank: number;
  step: number;
}

/** A file's text in the address, packed. */
export interface Packed {
  name: string;
  content: string;
}

/** All that a link holds. */
export interface LinkState {
  tab: "timeline" | "plan";
  first: Choice | null;
  second: Other | null;
  file: Packed | null;
  /** Which of the page's own documents stand above and below, -1 for none; null for the first two. */
  given: [number, number] | null;
  /** What the schedules are timed with before the sliders move, where that is not the usual. */
  costs: Partial<Costs>;
  limit: number | null;
  adjust: Adjust;
  colourBy: ColourBy;
  messages: boolean;
  memory: boolean;
  path: boolean;
  /** Shares of the whole axis. */
  span: [number, number] | null;
  selected: Spot | null;
  /** Changes to the first schedule, as text. */
  edits: string;
}

export const PLAIN: LinkState = {
  tab: "timeline",
  first: null,
  second: null,
  file: null,
  given: null,
  costs: {},
  limit: null,
  adjust: UNCHANGED,
  colourBy: "kind",
  messages: true,
  memory: true,
  path: false,
  span: null,
  selected: null,
  edits: "",
};

/** The part of an address after the #; what is as usual is left out. */
export function encodeLink(state: LinkState): string {
  const said = new URLSearchParams();
  if (state.tab !== "timeline") said.set("tab", state.tab);
  if (state.first) {
    said.set("p", String(state.first.ranks));
    said.set("m", String(state.first.microbatches));
    setChoice(said, state.first, "s", "c", "o.");
    if (state.first.form !== "schedule") said.set("as", state.first.form);
    if (state.first.offload) said.set("offload", state.first.offload);
    if (Object.keys(state.costs).length) said.set("costs", JSON.stringify(state.costs));
  }
  if (state.second) setChoice(said, state.second, "vs", "vc", "vo.");
  if (state.file) [["file", state.file.name], ["data", state.file.content]].forEach(([name, value]) => said.set(name, value));
  if (state.given) said.set("d", state.given.join(","));
  if (state.limit !== null) said.set("limit", short(state.limit));
  setAdjust(said, state.adjust);
  if (state.colourBy !== "kind") said.set("by", state.colourBy);
  const hidden = (["messages", "memory"] as const).filter((name) => !state[name]);
  if (hidden.length) said.set("hide", hidden.join(","));
  if (state.path) said.set("path", "1");
  if (state.span) said.set("z", state.span.map((share) => share.toFixed(5)).join(","));
  if (state.selected) said.set("sel", [state.selected.panel, state.selected.rank, state.selected.step].join("."));
  if (state.edits) said.set("e", state.edits);
  return said.toString().replace(/%2C/g, ",").replace(/%3A/g, ":");
}

/** The reverse; whatever cannot be read is as usual, for a link may be old or cut off. */
export function decodeLink(hash: string): LinkState {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const hidden = (said.get("hide") ?? "").split(",");
  const [name, content] = [said.get("file"), said.get("data")];
  return {
    tab: said.get("tab") === "plan" ? "plan" : "timeline",
    first: firstChoice(said),
    second: otherChoice(said, "vs", "vc", "vo."),
    file: name && content ? { name, content } : null,
    given: readPair(said.get("d")),
    costs: readCosts(said.get("costs")),
    limit: number(said.get("limit"), 0),
    adjust: readAdjust(said),
    colourBy: said.get("by") === "microbatch" ? "microbatch" : "kind",
    messages: !hidden.includes("messages"),
    memory: !hidden.includes("memory"),
    path: said.get("path") === "1",
    span: readSpan(said.get("z")),
    selected: readSpot(said.get("sel")),
    edits: said.get("e") ?? "",
  };
}

function setChoice(said: URLSearchParams, choice: Other, name: string, chunks: string, option: string): void {
  said.set(name, choice.schedule);
  if (choice.chunks !== null) said.set(chunks, String(choice.chunks));
  for (const [key, value] of Object.entries(choice.options)) said.set(option + key, JSON.stringify(value));
}

function firstChoice(said: URLSearchParams): Choice | null {
  const other = otherChoice(said, "s", "c", "o.");
  const [ranks, microbatches] = [number(said.get("p"), 1), number(said.get("m"), 1)];
  if (!other || ranks === null || microbatches === null) return null;
  const form = FORMS.find((each) => each === said.get("as")) ?? "schedule";
  const offload = /^\d{1,3}(\+\d{1,3})*$/.test(said.get("offload") ?? "") ? said.get("offload")! : "";
  return { ...other, ranks: Math.floor(ranks), microbatches: Math.floor(microbatches), form, offload };
}

function otherChoice(said: URLSearchParams, name: string, chunks: string, option: string): Other | null {
  const schedule = said.get(name);
  if (!schedule) return null;
  const options: Record<string, Option> = {};
  for (const [key, value] of said) if (key.startsWith(option)) options[key.slice(option.length)] = readOption(value);
  const count = number(said.get(chunks), 1);
  return { schedule, chunks: count === null ? null : Math.floor(count), options };
}

function readOption(text: string): Option {
  try {
    const value: unknown = JSON.parse(text);
    return typeof value === "number" || typeof value === "boolean" ? value : String(value);
  } catch {
    return text;
  }
}

const PLAINLY = ["latency", ...SPREAD] as const;
/** What adjustments are called in an address, in which `s` is the schedule. */
const NAMES: Record<(typeof PLAINLY)[number], string> = { latency: "latency", s: "cost.s", t: "cost.t", broadcast: "broadcast", combine: "combine", logits: "logits" };

function setAdjust(said: URLSearchParams, adjust: Adjust): void {
  for (const name of ["f", "i", "w", "b"] as const) if (adjust[name] !== 1) said.set(name, short(adjust[name]));
  for (const name of PLAINLY) if (adjust[name] !== null) said.set(NAMES[name], short(adjust[name]));
  const skew = Object.entries(adjust.skew).filter(([, factor]) => factor !== 1);
  if (skew.length) said.set("skew", skew.map(([stage, factor]) => `${stage}:${short(factor)}`).join(","));
}

function readAdjust(said: URLSearchParams): Adjust {
  const factor = (name: string): number => number(said.get(name), 0) ?? 1;
  const plain = Object.fromEntries(PLAINLY.map((name) => [name, number(said.get(NAMES[name]), 0)])) as Pick<Adjust, (typeof PLAINLY)[number]>;
  const skew: Record<number, number> = {};
  for (const part of (said.get("skew") ?? "").split(",")) {
    const [stage, by] = part.split(":").map((text) => number(text || null, 0));
    if (stage !== null && by !== null && by !== undefined && Number.isInteger(stage)) skew[stage] = by;
  }
  return { f: factor("f"), i: factor("i"), w: factor("w"), b: factor("b"), skew, ...plain };
}

/** Costs that the page understands; the server checks the rest. */
function readCosts(text: string | null): Partial<Costs> {
  try {
    const data = JSON.parse(text ?? "{}") as Partial<Costs>;
    fullCosts(data);
    return data;
  } catch {
    return {};
  }
}

function readPair(text: string | null): [number, number] | null {
  const match = /^(\d{1,6}),(-1|\d{1,6})$/.exec(text ?? "");
  return match ? [Number(match[1]), Number(match[2])] : null;
}

function readSpan(text: string | null): [number, number] | null {
  const [from, to] = (text ?? "").split(",").map((part) => number(part || null, 0));
  return from !== null && to !== null && from !== undefined && to !== undefined && from < to && to <= 1.001 ? [from, to] : null;
}

function readSpot(text: string | null): Spot | null {
  const parts = (text ?? "").split(".").map(Number);
  if (text === null || parts.length !== 3 || !parts.every((part) => Number.isInteger(part) && part >= 0)) return null;
  return { panel: parts[0], rank: parts[1], step: parts[2] };
}

function number(text: string | null, least: number): number | null {
  const value = text === null || text.trim() === "" ? NaN : Number(text);
  return Number.isFinite(value) && value >= least ? value : null;
}

function short(value: number): string {
  return String(Number(value.toPrecision(6)));
}
