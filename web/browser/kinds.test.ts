// Slices of sequences, copies to host memory, waits, and a vocabulary on all ranks: what is shown of them, and what can be done with them.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import type { Target } from "../src/draw/target.ts";
import { addressed, click, drawn, hover, read, tile, until, untilTile } from "./page.ts";
import { expected, run } from "./penstock.ts";
import { Session, studio } from "./session.ts";

const folder = inject("folder");
const address = studio();
const session = new Session();
const SLICES = `file://${join(folder, "slices.html")}`;
const OFFLOAD = `file://${join(folder, "offload.html")}`;

async function show(at: string): Promise<Page> {
  const page = await session.open(at, { viewport: { width: 1440, height: 900 } });
  await drawn(page);
  return page;
}

async function saved(page: Page, name: string): Promise<string> {
  await page.getByRole("button", { name: "Export" }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name: new RegExp(`^${name}`) }).click()]);
  const path = join(folder, `${name}-${download.suggestedFilename()}`);
  await download.saveAs(path);
  return path;
}

interface Proved {
  microbatches: number;
  slices: number;
  rows: string[][];
}

const proved = (path: string): Proved => JSON.parse(run("proved.py", path)) as Proved;

test("a schedule of slices is named and exported with them", async () => {
  const page = await show(SLICES);
  expect(await page.locator(".document").innerText()).toBe("seq1f1b, 2 ranks, 2 microbatches of 4 slices");
  expect(await page.getByRole("textbox", { name: "Microbatches" }).inputValue()).toBe("2");
  expect(await page.getByRole("textbox", { name: "Slices" }).inputValue()).toBe("4");
  await click(page, { what: "action", panel: 0, index: 1 });
  expect(await page.getByTestId("details").innerText()).toMatch(/0F0\.1[\s\S]*microbatch\s*0\s*slice\s*1/);
  const order = proved(await saved(page, "Schedule"));
  expect(order).toMatchObject({ microbatches: 2, slices: 4 });
  expect(order.rows[0].slice(0, 5)).toEqual(["0F0.0", "0F0.1", "0F0.2", "0F0.3", "0F1.0"]);
  expect(proved(await saved(page, "CSV"))).toEqual(order);
  expect(JSON.parse(readFileSync(await saved(page, "JSON"), "utf8"))).toMatchObject({ table: { microbatches: 2, slices: 4 } });
  const view = await saved(page, "View");
  await page.getByTestId("file").setInputFiles(view);
  await page.getByTestId("timeline").waitFor();
  await drawn(page);
  expect(proved(await saved(page, "Schedule"))).toEqual(order);
});

test("slices out of order are not proved: the page says what the verifier says", async () => {
  const first = await show(`${address}#s=seq1f1b&p=2&m=2&o.slices=4`);
  const row = (await read(first, (handle) => handle.nodes)).filter((name) => name.startsWith("1"));
  const page = await show(`${address}#s=seq1f1b&p=2&m=2&o.slices=4&e=m1.${row.indexOf("1F1.1")}.${row.indexOf("1F1.0")}`);
  const findings = page.getByTestId("findings");
  await findings.waitFor();
  await page.getByTestId("verdict").getByText(/^Not proved|^Hangs/).waitFor();
  const message = await findings.locator(".message").first().innerText();
  expect(message).toBe(`1F1.1 needs 1F1.0, which rank 1 runs only in step ${row.indexOf("1F1.0") + 1}.`);
  await page.waitForTimeout(800); // the verifier's answer takes the place of the page's
  expect(await findings.locator(".message").first().innerText()).toBe(message);
  await page.getByRole("button", { name: "Apply" }).first().click();
  await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
  expect(proved(await saved(page, "Schedule")).slices).toBe(4);
});

test("copies to the host are timed as the library does, and can be pointed at; such a program is not edited", async () => {
  const page = await show(OFFLOAD);
  const wanted = expected(folder).offload;
  expect(await tile(page, "Makespan")).toBeCloseTo(wanted.makespan, 2);
  expect(await tile(page, "Peak memory")).toBe(wanted.peak);
  const entries = await read(page, (handle) => handle.nodes);
  const offload: Target = { what: "collective", panel: 0, index: entries.indexOf("0OFFLOAD1") };
  await hover(page, offload);
  await page.getByTestId("tooltip").getByText("0OFFLOAD1").waitFor();
  expect(await page.getByTestId("tooltip").innerText()).toMatch(/copy of an activation to host memory[\s\S]*needed by/);
  await click(page, offload);
  await page.getByTestId("details").getByText("Unblocks").waitFor();
  expect(await page.getByTestId("details").innerText()).toMatch(/0F1 on this rank[\s\S]*0RELOAD1/);
  await page.locator(".legend").getByText("copies to the host").waitFor();
  expect(await page.getByTestId("figures").innerText()).toMatch(/peak host memory\s*4/);
  expect(await page.getByTestId("figures").innerText()).toMatch(/waiting for communication/);
  await page.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByTestId("notice").getByText("cannot be changed: it moves activations to host memory").waitFor();
  await page.getByRole("button", { name: "Export" }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name: /^Schedule/ }).click()]);
  const path = join(folder, "offloaded.json");
  await download.saveAs(path);
  expect(proved(path).rows[0]).toContain("0RELOAD0");
});

test("a vocabulary on all ranks is timed as the library does, under other costs too; it can be pointed at, and is not edited", async () => {
  const page = await show(address);
  await page.getByTestId("file").setInputFiles(join(folder, "spread.json"));
  await page.locator(".legend").getByText("collectives of all ranks").waitFor();
  const { spread, slower } = expected(folder);
  await untilTile(page, "Makespan", spread.makespan);
  expect(await tile(page, "Peak memory")).toBe(spread.peak);
  await page.locator(".legend").getByText("S share of the vocabulary").waitFor();
  const join0: Target = { what: "collective", panel: 0, index: (await read(page, (handle) => handle.nodes)).indexOf("3COMBINE0") };
  await hover(page, join0);
  await page.getByTestId("tooltip").getByText("3COMBINE0").waitFor();
  expect(await page.getByTestId("tooltip").innerText()).toMatch(/joined last by\s*rank \d[\s\S]*needed by\s*3T0/);
  await page.getByLabel("Combine, typed").fill("1.5");
  await page.getByLabel("Combine, typed").press("Enter");
  await untilTile(page, "Makespan", slower.makespan);
  await addressed(page, "combine=1.5");
  await page.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByTestId("notice").getByText("cannot be changed: its vocabulary is spread over the ranks").waitFor();
  expect(proved(await saved(page, "Schedule")).rows[1]).toContain("3BROADCAST0");
});

test("a named schedule is lowered with copies to the host, and a link leads there again", async () => {
  const page = await show(`${address}#s=1f1b&p=4&m=8&as=program`);
  await page.getByLabel("Offload, %").fill("100+50+0+0");
  await page.getByLabel("Offload, %").press("Enter");
  await page.locator(".legend").getByText("copies back").waitFor();
  await until(page, (handle) => handle.state.first?.offload === "100+50+0+0");
  await page.getByLabel("Offload, %").fill("lots");
  await page.getByLabel("Offload, %").press("Enter");
  await page.getByTestId("notice").getByText("percentage").waitFor();
});

test("waits for sends are marks with their causes", async () => {
  const page = await show(address);
  await page.getByTestId("file").setInputFiles(join(folder, "waits.json"));
  await page.locator(".legend").getByText("waits for sends and reductions").waitFor();
  await page.getByLabel("Latency, typed").fill("0.7");
  await page.getByLabel("Latency, typed").press("Enter");
  await until(page, (handle) => handle.state.adjust.latency === 0.7);
  const wait = (await read(page, (handle) => handle.nodes)).indexOf("1WAIT_SEND_B7");
  await hover(page, { what: "wait", panel: 0, index: wait });
  await page.getByTestId("tooltip").getByText("1WAIT_SEND_B7").waitFor();
  expect(await page.getByTestId("tooltip").innerText()).toMatch(/wait until a gradient is sent[\s\S]*waits\s*0.7[\s\S]*taken by\s*0RECV_B7 on rank 0/);
});
