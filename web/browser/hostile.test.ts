// Names and files are data: a name that is markup is shown as text in every place that shows one, and never runs.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import { addressed, drawn, hover, settled } from "./page.ts";
import { Session, studio } from "./session.ts";

const folder = inject("folder");
const address = studio();
const session = new Session();
const HOSTILE = `<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"'\`\${1}&lt;`;

/** Nothing of the name has become an element, and nothing of it has run. */
async function harmless(page: Page): Promise<void> {
  expect(await page.evaluate(() => (window as unknown as { hacked?: number }).hacked)).toBeUndefined();
  expect(await page.evaluate(() => document.querySelectorAll("img, body script:not([id]):not([type=module]), [onerror]").length)).toBe(0);
}

/** The document of an exported page with hostile text wherever a text is. */
function hostileDocument(): Record<string, unknown> {
  const page = readFileSync(join(folder, "zbv.html"), "utf8");
  const [, json] = /<script type="application\/json" id="penstock-documents">([\s\S]*?)<\/script>/.exec(page)!;
  const [view] = JSON.parse(json) as Record<string, unknown>[];
  return {
    ...view,
    title: HOSTILE,
    source: { kind: "file", name: HOSTILE },
    table: { ...(view.table as object), name: HOSTILE, placement: HOSTILE },
    units: { time: HOSTILE, size: HOSTILE },
    findings: [{ rule: HOSTILE, severity: HOSTILE, rank: 0, step: 1, action: HOSTILE, message: HOSTILE, remedy: HOSTILE, cycle: [[0, 1, 1, 2], [1, 2, 0, 3]] }],
    num_findings: 1,
  };
}

async function opened(content: string, name = "hostile.json"): Promise<Page> {
  const page = await session.open(`file://${join(folder, "zbv.html")}`);
  await drawn(page);
  await page.getByTestId("file").setInputFiles({ name, mimeType: "application/json", buffer: Buffer.from(content) });
  return page;
}

test("a document's title, source, units, table and findings", async () => {
  const page = await opened(JSON.stringify(hostileDocument()));
  await page.getByTestId("findings").waitFor();
  expect(await page.locator("header .document").innerText()).toBe(HOSTILE);
  expect(await page.getByTestId("findings").innerText()).toContain(HOSTILE);
  expect(await page.getByTestId("tile-Makespan").innerText()).toContain(HOSTILE);
  expect(await page.title()).toContain(HOSTILE);
  await hover(page, { what: "action", panel: 0, index: 3 });
  await page.getByTestId("tooltip").waitFor();
  await page.getByTestId("findings").locator("button.finding").click();
  expect(await page.getByTestId("details").innerText()).toContain(HOSTILE);
  await page.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByTestId("changes").waitFor();
  await harmless(page);
  await page.getByRole("button", { name: "Export" }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name: /^SVG/ }).click()]);
  expect(download.suggestedFilename()).toMatch(/^[a-z0-9.-]+\.svg$/);
  const path = join(folder, "hostile.svg");
  await download.saveAs(path);
  const svg = readFileSync(path, "utf8");
  expect(svg).not.toMatch(/<(img|script)/);
  expect(await page.evaluate((text) => new DOMParser().parseFromString(text, "image/svg+xml").querySelectorAll("parsererror, img, script").length, svg)).toBe(0);
});

test("two documents that are compared, and the choice between them", async () => {
  const page = readFileSync(join(folder, "three.html"), "utf8");
  const [, json] = /<script type="application\/json" id="penstock-documents">([\s\S]*?)<\/script>/.exec(page)!;
  const views = (JSON.parse(json) as Record<string, unknown>[]).map((view) => ({ ...view, title: HOSTILE }));
  const path = join(folder, "hostile.html");
  writeFileSync(path, page.replace(json, () => JSON.stringify(views).replace(/</g, "\\u003c")));
  const shown = await session.open(`file://${path}`);
  await drawn(shown);
  expect(await shown.locator(".numbers").innerText()).toContain(HOSTILE);
  expect(await shown.getByTestId("compare").innerText()).toContain(HOSTILE);
  await shown.getByRole("button", { name: "Export" }).click();
  expect(await shown.locator(".menu-choice").innerText()).toContain(HOSTILE);
  await harmless(shown);
});

test("changes in an address, and a recorded run", async () => {
  const page = await session.open(`file://${join(folder, "zbv.html")}#e=${encodeURIComponent(HOSTILE)}`);
  await drawn(page);
  await page.getByTestId("notice").getByText("is not a change").waitFor();
  await harmless(page);
  const run = JSON.parse(readFileSync(join(folder, "recorded.json"), "utf8")) as Record<string, unknown>;
  const content = JSON.stringify({ ...run, source: HOSTILE });
  await page.getByTestId("file-recorded").setInputFiles({ name: `${HOSTILE.replace(/\//g, "")}.json`, mimeType: "application/json", buffer: Buffer.from(content) });
  await page.getByTestId("differences").waitFor();
  expect(await page.locator(".numbers").last().innerText()).toContain(HOSTILE);
  await harmless(page);
  await page.getByTestId("file-recorded").setInputFiles({ name: "other.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify({ type: "timeline", table: { rows: [[HOSTILE]] }, start: [1], end: [HOSTILE] })) });
  await page.getByTestId("notice").getByText("must be a list of times").waitFor();
  await harmless(page);
});

test("the server's answers about files, by name and by content", async () => {
  const page = await session.open(address);
  await drawn(page);
  const name = `${HOSTILE.replace(/\//g, "")}.csv`;
  const upload = (content: string, as = name): Promise<void> => page.getByTestId("file").setInputFiles({ name: as, mimeType: "text/csv", buffer: Buffer.from(content) });
  await upload(`${HOSTILE.replace(/[",]/g, "")},0F0\n`);
  await page.getByTestId("notice").getByText("onerror=").waitFor();
  await harmless(page);
  await upload("0F0,0F1,0B0,0B1\n,1F0,1B0,1B0\n");
  await page.getByTestId("findings").waitFor();
  await addressed(page, "file=");
  await harmless(page);
  await page.reload();
  await page.getByTestId("findings").waitFor();
  await harmless(page);
  await upload(JSON.stringify({ format: "penstock", version: 1, type: HOSTILE }), "type.json");
  await page.getByTestId("notice").getByText("onerror=").waitFor();
  await harmless(page);
});

test("a plan's model and its candidates", async () => {
  const page = await session.open(`${address}#tab=plan&plan.ranks=${encodeURIComponent("<img src=x>")}`);
  await page.getByRole("radio", { name: "profile" }).click();
  const layer = { name: HOSTILE, f: 1, i: 1, w: 1, activation: 1, parameters: 1 };
  await page.getByLabel(/A profile as JSON/).fill(JSON.stringify({ layers: Array.from({ length: 4 }, () => layer), time_unit: "s" }));
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByRole("alert").getByText("ranks must be a whole number").waitFor();
  await harmless(page);
  for (const [label, value] of [["Ranks", "2"], ["Microbatches", "2"], ["Memory per rank", "0.5"], ["Seconds to search", "1"]]) await page.getByLabel(label).fill(value);
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByRole("alert").getByText("no plan fits").waitFor();
  await harmless(page);
  await page.getByLabel("Memory per rank").fill("100");
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await settled(page, 'document.querySelector("[data-testid=best]") !== null');
  await harmless(page);
});
