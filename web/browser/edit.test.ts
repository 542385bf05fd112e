import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import type { Target } from "../src/draw/target.ts";
import { addressed, click, cut, drawn, read, settled, texts, tile, until, where } from "./page.ts";
import { python, run } from "./penstock.ts";
import { Session, studio } from "./session.ts";

const folder = inject("folder");
const address = studio();
const ZBV = `file://${join(folder, "zbv.html")}`;
const session = new Session();

async function show(at: string, options = {}): Promise<Page> {
  const page = await session.open(at, options);
  await drawn(page);
  return page;
}

const action = (index: number): Target => ({ what: "action", panel: 0, index });

/** Takes an action and carries it to another; lets it go unless the drag is to be looked at. */
async function drag(page: Page, from: number, to: number, drop = true): Promise<void> {
  await page.getByTestId("timeline").scrollIntoViewIfNeeded();
  const [one, other] = [await where(page, action(from)), await where(page, action(to))];
  await page.mouse.move(one.x, one.y);
  await page.mouse.down();
  await page.mouse.move(other.x + Math.sign(other.x - one.x) * 2, other.y, { steps: 8 });
  if (drop) await page.mouse.up();
}

async function edit(page: Page): Promise<void> {
  await page.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByTestId("changes").waitFor();
}

async function saved(page: Page, name: string): Promise<string> {
  await page.getByRole("button", { name: "Export" }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name: new RegExp(`^${name}`) }).click()]);
  const path = join(folder, download.suggestedFilename());
  await download.saveAs(path);
  return path;
}

interface Proved {
  actions: number;
  makespan: number;
  ranks: number[];
  rows: string[][];
}

const proved = (path: string): Proved => JSON.parse(run("proved.py", path)) as Proved;

test("without a server, an action is dragged, timed as the library does, undone, and kept in the address", async () => {
  const page = await show(ZBV);
  const before = await tile(page, "Makespan");
  await edit(page);
  await drag(page, 5, 9);
  await page.getByTestId("changes").getByText(/^Move \S+ on rank 0 from step 5 to step 9$/).waitFor();
  await page.getByTestId("verdict").getByText(/^Checked/).waitFor();
  const order = proved(await saved(page, "Schedule"));
  expect(await tile(page, "Makespan")).toBeCloseTo(order.makespan, 3);
  expect(order.makespan).toBeGreaterThan(before);
  expect(proved(await saved(page, "CSV")).rows).toEqual(order.rows);
  await addressed(page, "e=m0.5.9");
  const again = await show(page.url());
  await again.getByTestId("changes").getByText(/^Move/).waitFor();
  expect(await tile(again, "Makespan")).toBeCloseTo(order.makespan, 3);
  await again.getByRole("button", { name: "Undo", exact: true }).click();
  await until(again, (handle) => handle.state.edits === "");
  await again.keyboard.press("Control+Shift+Z");
  await until(again, (handle) => handle.state.edits === "m0.5.9");
  await again.getByRole("button", { name: "Undo all" }).click();
  expect(await tile(again, "Makespan")).toBeCloseTo(before, 3);
  expect(session.requests.filter((request) => !request.startsWith("blob:")).map((request) => request.split("#")[0])).toEqual([ZBV]);
});

test("what a drag would break is drawn while the action is in the hand", async () => {
  const page = await show(ZBV);
  await edit(page);
  const before = await tile(page, "Makespan");
  await drag(page, 10, 4, false);
  await until(page, (handle) => handle.broken > 0);
  expect(await tile(page, "Makespan")).toBe(before);
  await page.keyboard.press("Escape");
  await page.getByTestId("timeline").press("Escape");
  await page.mouse.up();
  await until(page, (handle) => handle.broken === 0);
});

test("a schedule is broken, its cycle shown, and the remedy applied and proved by the verifier", async () => {
  const page = await show(`${address}#s=zbv&p=4&m=8`);
  await edit(page);
  await drag(page, 10, 4);
  const findings = page.getByTestId("findings");
  await findings.getByText("ranks wait for each other in a cycle").waitFor();
  const waits = await texts(findings.locator(".waits > span"));
  expect(waits.length).toBeGreaterThanOrEqual(2);
  waits.forEach((text, k) => expect(text).toMatch(new RegExp(`^${k + 1}\\s+rank \\d+ waits in step \\d+`)));
  await page.getByTestId("verdict").getByText(/^Hangs/).waitFor();
  await findings.locator("button.finding").first().click();
  await until(page, (handle) => handle.waits.length >= 2);
  const shown = await read(page, (handle) => handle.waits);
  waits.forEach((text, k) => {
    const [, rank, step, name] = /rank (\d+) waits in step (\d+) \((\S+)\)/.exec(text)!;
    expect(shown[k]).toMatchObject({ rank: Number(rank), step: Number(step), action: name });
  });
  await findings.getByRole("button", { name: "Apply" }).first().click();
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  await page.locator(".proof pre").first().getByText("proved:").waitFor();
  const order = proved(await saved(page, "Schedule"));
  expect(await tile(page, "Makespan")).toBeCloseTo(order.makespan, 3);
});

test("a file that hangs is opened, and repaired as a whole", async () => {
  const page = await show(address);
  await page.getByTestId("file").setInputFiles(join(folder, "bad.csv"));
  await page.getByTestId("findings").waitFor();
  await page.getByRole("button", { name: "Repair all" }).click();
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  expect(await page.getByTestId("findings").count()).toBe(0);
  const order = proved(await saved(page, "Schedule"));
  expect(order.actions).toBe(8);
});

test("everything is changed from the keyboard and with the tools", async () => {
  const page = await show(`${address}#s=1f1b&p=4&m=8`);
  await page.getByTestId("timeline").focus();
  await page.keyboard.press("e");
  await page.getByTestId("changes").waitFor();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("]");
  await until(page, (handle) => handle.state.edits === "m0.0.1" && handle.state.selected?.step === 1);
  await page.keyboard.press("[");
  await page.keyboard.press("i");
  await until(page, (handle) => handle.state.edits === "m0.0.1_m0.1.0_i0.0");
  await page.keyboard.press("Delete");
  await until(page, (handle) => handle.state.edits.endsWith("_d0.0"));
  await page.getByRole("button", { name: "Undo all" }).click();
  await page.getByRole("button", { name: "Split every B" }).click();
  await until(page, (handle) => handle.state.edits === "sx.x");
  await page.getByTestId("timeline").focus();
  await page.keyboard.press("End");
  await click(page, action(10));
  await page.getByTestId("details").getByRole("button", { name: "Merge I and W" }).click();
  await until(page, (handle) => /^sx\.x_j0\.\d$/.test(handle.state.edits));
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  const order = proved(await saved(page, "Schedule"));
  expect(order.actions).toBe(4 * 8 * 3 - 1);
  expect(await tile(page, "Makespan")).toBeCloseTo(order.makespan, 3);
});

test("a stage moves to another rank, and the schedule is still proved", async () => {
  const page = await show(`${address}#s=zbv&p=4&m=6`);
  await edit(page);
  await click(page, action(2));
  await page.getByTestId("details").getByLabel("Rank of stage 0").selectOption("3");
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  const order = proved(await saved(page, "Schedule"));
  expect(order.ranks).toEqual([3, 1, 2, 3, 3, 2, 1, 0]);
  expect(await tile(page, "Makespan")).toBeCloseTo(order.makespan, 3);
});

test("a view is saved with its changes and opened again without a server", async () => {
  const page = await show(ZBV);
  await edit(page);
  await drag(page, 5, 9);
  await addressed(page, "e=m0.5.9");
  const path = await saved(page, "View");
  const makespan = await tile(page, "Makespan");
  const other = await show(`file://${join(folder, "three.html")}`);
  await other.getByTestId("file").setInputFiles(path);
  await until(other, (handle) => handle.state.edits === "m0.5.9");
  expect(await tile(other, "Makespan")).toBeCloseTo(makespan, 3);
});

test("another schedule takes the place of a changed one, and the changes are one step back", async () => {
  const page = await show(`${address}#s=1f1b&p=4&m=8`);
  await edit(page);
  await drag(page, 0, 1);
  await addressed(page, "e=m0.0.1");
  await page.getByLabel("Name").selectOption("gpipe");
  await page.getByText("gpipe, 4 ranks, 8 microbatches").first().waitFor();
  await addressed(page, "s=gpipe");
  expect(await read(page, (handle) => handle.state.edits)).toBe("");
  await page.goBack();
  await page.getByText("1f1b, 4 ranks, 8 microbatches, edited").first().waitFor();
  await until(page, (handle) => handle.state.edits === "m0.0.1");
});

test("a plan is made, saved from the page, and trained with", async () => {
  const page = await session.open(`${address}#tab=plan`);
  await page.getByRole("radio", { name: "profile" }).click();
  const layer = { f: 1, i: 1, w: 1, activation: 1, count: 8 };
  await page.getByLabel(/A profile as JSON/).fill(JSON.stringify({ layers: [layer], latency: 0.1, time_unit: "s" }));
  await page.getByLabel("Ranks").fill("2");
  await page.getByLabel("Microbatches").fill("4");
  await page.getByLabel("Memory per rank").fill("30");
  await page.getByLabel("Seconds to search").fill("1");
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByTestId("best").getByText("The planner chose").waitFor();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Save plan.json" }).click()]);
  const path = join(folder, download.suggestedFilename());
  expect(download.suggestedFilename()).toBe("plan.json");
  await download.saveAs(path);
  const chosen = (JSON.parse(readFileSync(path, "utf8")) as { name: string; objective: number });
  expect(await page.getByTestId("best").innerText()).toContain(chosen.name);
  const script = fileURLToPath(new URL("train_tiny.py", import.meta.url));
  const said = execFileSync(python(), ["-m", "penstock", "train", script, "--schedule", path, "--steps", "2", "--device", "cpu", "--check", "--json"], { encoding: "utf8" });
  expect(JSON.parse(said)).toMatchObject({ schedule: expect.any(String) as string });
});

test("when nothing fits, no candidate reads yes, and what would fit is a button that plans it", async () => {
  const page = await session.open(`${address}#tab=plan`);
  await page.getByRole("radio", { name: "profile" }).click();
  const layer = { f: 1, i: 1, w: 1, activation: 1, parameters: 1, count: 8 };
  await page.getByLabel(/A profile as JSON/).fill(JSON.stringify({ layers: [layer], latency: 0.1 }));
  await page.getByLabel("Ranks").fill("2");
  await page.getByLabel("Microbatches").fill("4");
  await page.getByLabel("Memory per rank").fill("4.5");
  await page.getByLabel("Seconds to search").fill("1");
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByRole("alert").getByText("no plan fits").waitFor();
  const rows = page.getByTestId("candidates").locator("tbody tr");
  if (await rows.count()) expect(await texts(rows.locator("td:nth-child(7)"))).not.toContain("yes");
  expect(await page.getByTestId("best").count()).toBe(0);
  const limit = page.getByRole("list", { name: "What would fit" }).getByRole("button", { name: /^Plan with [\d.]+ per rank$/ });
  const wanted = /[\d.]+/.exec(await limit.innerText())![0];
  await limit.click();
  await settled(page, `document.querySelector("input[name=limit]").value === "${wanted}"`);
  await page.getByTestId("best").getByText("The planner chose").waitFor();
});

test("when the parameters alone do not fit, there is no empty plot, and each button plans something that fits", async () => {
  const profile = JSON.stringify({ layers: [{ f: 1, i: 1, w: 1, activation: 0.1, parameters: 2, count: 8 }], latency: 0.1 });
  const refuse = async (): Promise<Page> => {
    const page = await session.open(`${address}#tab=plan`);
    await page.getByRole("radio", { name: "profile" }).click();
    await page.getByLabel(/A profile as JSON/).fill(profile);
    for (const [label, value] of [["Ranks", "4"], ["Microbatches", "8"], ["Memory per rank", "3"], ["Seconds to search", "1"]]) await page.getByLabel(label).fill(value);
    await page.getByRole("button", { name: "Plan", exact: true }).click();
    await page.getByRole("alert").getByText("no plan fits").waitFor();
    return page;
  };
  const first = await refuse();
  expect(await first.getByTestId("tradeoff").count()).toBe(0);
  const buttons = first.getByRole("list", { name: "What would fit" }).getByRole("button");
  const words = await texts(buttons);
  expect(words).toEqual([expect.stringMatching(/^Plan with \d+ ranks$/), expect.stringMatching(/^Plan with [\d.]+ per rank$/)]);
  for (const text of words) {
    const page = await refuse();
    await page.getByRole("button", { name: text }).click();
    await page.getByTestId("best").getByText("The planner chose").waitFor();
  }
});

test("the plan that was chosen is plotted and in the table, each candidate once, and the limit is the one that is used", async () => {
  const page = await session.open(`${address}#tab=plan`);
  for (const [label, value] of [["Ranks", "4"], ["Microbatches", "8"], ["Memory per rank", "36GiB"], ["Layers", "8"], ["Seconds to search", "1"]]) await page.getByLabel(label, { exact: true }).fill(value);
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByTestId("best").getByText("The planner chose").waitFor();
  expect(await page.locator(".mark.best").count()).toBe(1);
  expect(await page.locator("tr.chosen").count()).toBe(1);
  expect(await page.getByTestId("tradeoff").locator(".limit-text").innerHTML()).toBe("limit 34.2 GiB, 5% kept free");
  const names = await texts(page.getByTestId("candidates").locator("tbody th"));
  const named = names.map((name) => name.replace(" ◆", "")).filter((name) => name !== "searched");
  expect(new Set(named).size).toBe(named.length);
  for (const row of await page.getByTestId("candidates").locator("tbody tr").all()) {
    const [memory, fits] = [parseFloat(await row.locator("[data-name=memory]").innerText()), await row.locator("[data-name=fits]").innerText()];
    expect(fits, await row.innerText()).toBe(memory <= 34.2 ? "yes" : "no");
  }
});

test("a candidate opens beside the current schedule, the table is sorted, and what is seen is exported", async () => {
  const page = await show(`${address}#s=1f1b&p=2&m=4`);
  await page.getByRole("tab", { name: "Plan" }).click();
  await page.getByRole("radio", { name: "profile" }).click();
  await page.getByLabel(/A profile as JSON/).fill('{"layers": [{"f": 1, "i": 1, "w": 1, "activation": 1, "count": 8}], "latency": 0.1}');
  for (const [label, value] of [["Ranks", "2"], ["Microbatches", "4"], ["Memory per rank", "30"], ["Seconds to search", "1"]]) await page.getByLabel(label).fill(value);
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByTestId("best").getByText("The planner chose").waitFor();
  await page.getByTestId("front").waitFor({ state: "attached" });
  const memory = page.getByRole("columnheader", { name: "memory" });
  await memory.getByRole("button").click();
  expect(await memory.getAttribute("aria-sort")).toBe("ascending");
  const held = (await texts(page.getByTestId("candidates").locator("tbody tr td:nth-child(6)"))).map(Number);
  expect(held).toEqual([...held].sort((one, other) => one - other));
  expect(await page.getByRole("columnheader", { name: "placement" }).count()).toBe(1);
  const csv = readFileSync(await saved(page, "CSV"), "utf8");
  expect(csv.split("\r\n")[0]).toMatch(/^index,name,placement/);
  expect(readFileSync(await saved(page, "SVG"), "utf8")).toMatch(/^<svg[\s\S]*peak memory of the fullest rank/);
  await page.getByRole("button", { name: /beside the current schedule$/ }).first().click();
  await page.getByTestId("timeline").waitFor();
  await drawn(page);
  expect(await page.locator(".numbers").innerText()).toMatch(/above: 1f1b, 2 ranks[\s\S]*below: \S+, candidate/);
});

test("an order hangs: the figures keep their places, and Repair all moves the action back and is proved", async () => {
  const page = await show(`${address}#s=1f1b&p=8&m=16`, { viewport: { width: 1440, height: 900 } });
  const top = async (): Promise<number> => (await page.locator(".frame").boundingBox())!.y;
  const before = await top();
  await edit(page);
  await drag(page, 3, 12);
  await page.getByTestId("verdict").getByText("Hangs: one finding").waitFor();
  expect(await top()).toBe(before);
  expect(await page.getByTestId("tile-Makespan").locator(".value").innerText()).toBe("–");
  await page.getByRole("button", { name: "Repair all" }).click();
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  expect(await read(page, (handle) => handle.state.edits)).toBe("m0.3.12_m0.12.7");
  expect(await tile(page, "Makespan")).toBeCloseTo(proved(await saved(page, "Schedule")).makespan, 3);
  const proof = page.locator(".proof pre").first();
  expect(await proof.evaluate((text) => text.scrollWidth <= text.clientWidth)).toBe(true);
});

test("a stage that cannot move stays where it is, and so does the choice of its rank", async () => {
  const page = await show(`${address}#s=1f1b&p=4&m=8`);
  await edit(page);
  await click(page, action(0));
  const ranks = page.getByTestId("details").getByLabel("Rank of stage 0");
  await ranks.selectOption("3");
  await page.getByTestId("notice").getByText("rank 0 would have nothing to do").waitFor();
  expect(await ranks.inputValue()).toBe("0");
  expect(await read(page, (handle) => handle.state.edits)).toBe("");
});

test("traces of a profiler, one per rank, are laid over a schedule without a server; one alone says what is missing", async () => {
  const page = await show(ZBV);
  const files = [2, 0, 3, 1].map((rank) => join(folder, `trace_${rank}.json`));
  await page.getByTestId("file-recorded").setInputFiles(files.slice(0, 1));
  await page.getByTestId("notice").getByText("lay the traces of all ranks over the schedule together").waitFor();
  await page.getByTestId("file-recorded").setInputFiles(files);
  const said = await texts(page.getByTestId("differences").getByRole("listitem"));
  expect(said[0]).toMatch(/^2F3 on rank 2 \+2: takes 3, predicted 1$/);
  await page.getByTestId("file").setInputFiles(files[0]);
  await page.getByTestId("notice").getByText("drop the trace on its chart, or one trace per rank").waitFor();
});

test("a recorded run is dropped onto the chart and stands beside the prediction, also without a server", async () => {
  const page = await show(ZBV);
  const run = readFileSync(join(folder, "recorded.json"), "utf8");
  const data = await page.evaluateHandle((text) => {
    const made = new DataTransfer();
    made.items.add(new File([text], "recorded.json"));
    return made;
  }, run);
  await page.dispatchEvent("[data-testid=timeline]", "drop", { dataTransfer: data });
  const differences = page.getByTestId("differences");
  await differences.waitFor();
  const said = await texts(differences.getByRole("listitem"));
  expect(said[0]).toMatch(/^2F3 on rank 2 \+2: takes 3, predicted 1$/);
  await page.locator(".legend").getByText("longer").waitFor();
  await differences.getByRole("button").first().click();
  await page.getByTestId("details").getByText(/, measured$/).waitFor();
  const cards = await texts(page.locator(".dock > .numbers h2"));
  expect(cards).toEqual(["Predicted against measured", "Differences"]);
  expect(await page.getByTestId("lateness").locator("h3").first().innerText()).toMatch(/largest differences$/);
  expect(await cut(page)).toEqual([]);
  await page.getByRole("button", { name: "Play" }).click();
  await until(page, (handle) => handle.moment !== null && handle.moment > 0);
  await page.getByRole("button", { name: "Pause" }).click();
});
