import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Download, Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import { chunkFill } from "../src/draw/colours.ts";
import { addressed, click, colourful, cut, drawn, hover, read, settled, texts, tile, until, untilTile, where } from "./page.ts";
import { expected, run } from "./penstock.ts";
import { Session } from "./session.ts";

const folder = inject("folder");
const wanted = expected(folder);
const ZBV = `file://${join(folder, "zbv.html")}`;
const session = new Session();

async function show(address = ZBV, options = {}): Promise<Page> {
  const page = await session.open(address, options);
  await drawn(page);
  return page;
}

test("the exported page shows the library's figures and asks nobody for anything", async () => {
  const page = await show();
  const { makespan, bubble, peak, messages } = wanted.zbv;
  expect(await tile(page, "Makespan")).toBeCloseTo(makespan, 3);
  expect(await tile(page, "Bubble")).toBeCloseTo(bubble, 3);
  expect(await tile(page, "Peak memory")).toBeCloseTo(peak, 3);
  expect(await tile(page, "Messages")).toBe(messages);
  expect(await page.title()).toContain("zbv, 4 ranks, 8 microbatches");
  expect(await page.getByRole("row", { name: /^makespan/ }).innerText()).toContain(String(makespan));
  expect(await colourful(page)).toBeGreaterThan(20_000);
  expect(session.requests).toEqual([ZBV]);
});

test("Ctrl and the wheel zoom at the cursor, the plain wheel does not, drag moves, and Fit shows everything", async () => {
  const page = await show();
  const target = { what: "action", panel: 0, index: 70 } as const;
  const before = await where(page, target);
  const whole = await read(page, (handle) => handle.span);
  await page.mouse.move(before.x, before.y);
  await page.mouse.wheel(0, -400);
  await page.keyboard.down("Control");
  await page.mouse.wheel(0, -400);
  await page.keyboard.up("Control");
  await until(page, (handle) => handle.span.to - handle.span.from < 40);
  expect(await read(page, (handle) => handle.span.to - handle.span.from)).toBeGreaterThan(20);
  const zoomed = await read(page, (handle) => handle.span);
  expect(Math.abs((await where(page, target)).x - before.x)).toBeLessThan(1);
  await page.mouse.down();
  await page.mouse.move(before.x - 120, before.y, { steps: 4 });
  await page.mouse.up();
  expect(Math.abs((await where(page, target)).x - before.x + 120)).toBeLessThan(1);
  const moved = await read(page, (handle) => handle.span);
  expect(moved.to - moved.from).toBeCloseTo(zoomed.to - zoomed.from, 6);
  await page.getByRole("button", { name: "Fit" }).click();
  expect(await read(page, (handle) => handle.span)).toEqual(whole);
  expect(await read(page, (handle) => handle.state.selected)).toBeNull();
});

test("an action, a message, an idle time and memory say what they are", async () => {
  const page = await show(`${ZBV}#latency=0.5`);
  const tooltip = page.getByTestId("tooltip");
  await hover(page, { what: "action", panel: 0, index: 0 });
  await tooltip.getByText("0F0", { exact: true }).waitFor();
  expect(await tooltip.innerText()).toMatch(/forward[\s\S]*start\s*0[\s\S]*end\s*1/);
  await hover(page, { what: "message", panel: 0, index: 0 });
  await tooltip.getByText("message of 0F0").waitFor();
  expect(await tooltip.innerText()).toMatch(/activations from rank 0 to rank 1[\s\S]*leaves\s*1[\s\S]*arrives\s*1\.5/);
  await hover(page, { what: "gap", panel: 0, rank: 3, time: 1 });
  await tooltip.getByText("the pipeline fills").waitFor();
  await hover(page, { what: "memory", panel: 0, rank: 0, time: 0.5 });
  await tooltip.getByText("rank 0 holds 1").waitFor();
});

test("a click selects, shows what is needed and unblocked, and leads there", async () => {
  const page = await show();
  await click(page, { what: "action", panel: 0, index: 48 });
  const details = page.getByTestId("details");
  await details.getByText("1F0", { exact: true }).waitFor();
  expect(await details.locator(".needs").innerText()).toContain("0F0");
  expect(await details.locator(".unblocks").innerText()).toMatch(/1I0[\s\S]*2F0|2F0[\s\S]*1I0/);
  await details.getByRole("button", { name: "2F0" }).click();
  await until(page, (handle) => handle.state.selected?.rank === 2);
  expect(await page.getByTestId("announced").innerText()).toContain("2F0, forward");
});

test("everything works from the keyboard", async () => {
  const page = await show();
  await page.getByTestId("timeline").focus();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  await until(page, (handle) => handle.state.selected?.step === 1);
  await page.keyboard.press("ArrowDown");
  await until(page, (handle) => handle.state.selected?.rank === 1);
  const before = await read(page, (handle) => handle.span);
  await page.keyboard.press("+");
  const after = await read(page, (handle) => handle.span);
  expect(after.to - after.from).toBeCloseTo((before.to - before.from) / 1.5, 6);
  await page.keyboard.press("0");
  await page.keyboard.press("c");
  await until(page, (handle) => handle.state.path);
  await page.keyboard.press("Escape");
  await until(page, (handle) => handle.state.selected === null);
  await page.keyboard.press("Shift+Tab");
  expect(await page.evaluate(() => document.activeElement?.textContent)).toBe("Fit");
});

test("sliders time the schedule again as the library does", async () => {
  const page = await show();
  await page.getByRole("slider", { name: "F", exact: true }).fill("1.5");
  await page.getByRole("slider", { name: "Latency" }).fill("0.25");
  await untilTile(page, "Makespan", wanted.moved.makespan);
  await page.getByLabel("Skew stage").selectOption("3");
  await page.getByRole("slider", { name: "by" }).fill("2");
  await untilTile(page, "Makespan", wanted.skewed.makespan);
  await page.getByRole("button", { name: "Back to the given costs" }).click();
  await untilTile(page, "Makespan", wanted.zbv.makespan);
});

test("the address holds what is seen", async () => {
  const page = await show();
  await page.getByRole("radio", { name: "microbatch" }).click();
  await page.getByRole("button", { name: "Critical path" }).click();
  await page.getByRole("slider", { name: "W", exact: true }).fill("0.5");
  await page.getByRole("button", { name: "Zoom in" }).click();
  await click(page, { what: "action", panel: 0, index: 70 });
  await addressed(page, "sel=", "w=0.5", "z=");
  const state = await read(page, (handle) => handle.state);
  const span = await read(page, (handle) => handle.span);
  const address = page.url();
  const again = await show(address);
  await until(again, (handle) => handle.state.selected !== null);
  expect({ ...(await read(again, (handle) => handle.state)), span: null }).toEqual({ ...state, span: null });
  expect((await read(again, (handle) => handle.span)).from).toBeCloseTo(span.from, 2);
});

test("a memory limit is drawn and said where it is exceeded", async () => {
  const page = await show();
  await page.getByLabel("Memory limit").fill("7.5");
  await page.getByLabel("Memory limit").press("Enter");
  await page.getByTestId("tile-Peak memory").getByText("over the limit of 7.5").waitFor();
  await page.getByLabel("Memory limit").fill("junk");
  await page.getByLabel("Memory limit").press("Enter");
  await page.getByTestId("notice").getByText("junk is not a size").waitFor();
});

test("what needs the server is switched off and says so", async () => {
  const page = await show();
  expect(await page.getByLabel("Name").isDisabled()).toBe(true);
  expect(await page.getByRole("textbox", { name: "Ranks" }).isDisabled()).toBe(true);
  expect(await page.getByRole("tab", { name: "Plan" }).count()).toBe(0);
  await page.getByText("To choose another schedule or to plan, run").waitFor();
});

test("several schedules in one file are compared two at a time", async () => {
  const page = await show(`file://${join(folder, "three.html")}`);
  const table = page.getByTestId("figures");
  const card = page.locator(".numbers");
  expect(await card.innerText()).toMatch(/above[\s\S]*zbv, 4 ranks[\s\S]*below[\s\S]*1f1b, 4 ranks/);
  expect(await table.locator("thead").innerText()).toContain("difference");
  await page.getByTestId("compare").selectOption("2");
  await card.getByText("gpipe, 4 ranks").first().waitFor();
  await addressed(page, "d=0,2");
  await page.getByTestId("compare").selectOption("-1");
  await page.getByRole("heading", { name: "Numbers" }).waitFor();
});

async function exported(page: Page, name: string): Promise<{ path: string; download: Download }> {
  await page.getByRole("button", { name: "Export" }).click();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("menuitem", { name: new RegExp(`^${name}`) }).click()]);
  const path = join(folder, download.suggestedFilename());
  await download.saveAs(path);
  return { path, download };
}

test("pictures are exported", async () => {
  const page = await show();
  const png = readFileSync((await exported(page, "PNG")).path);
  expect(png.subarray(1, 4).toString()).toBe("PNG");
  expect(png.readUInt32BE(16)).toBeGreaterThan(1500);
  const svg = readFileSync((await exported(page, "SVG")).path, "utf8");
  expect(svg.split(`fill="${chunkFill("F", 0, 2)}"`).length - 1).toBe(4 * 8);
  expect(await page.evaluate((text) => new DOMParser().parseFromString(text, "image/svg+xml").querySelector("parsererror") === null, svg)).toBe(true);
});

test("what is exported as text is read by Penstock", async () => {
  const page = await show();
  await page.getByRole("slider", { name: "F", exact: true }).fill("1.5");
  const timeline = (await exported(page, "JSON")).path;
  const csv = (await exported(page, "CSV")).path;
  expect(JSON.parse(run("reread.py", timeline, csv))).toEqual({ timeline: true, order: true });
  const trace = JSON.parse(readFileSync((await exported(page, "Trace")).path, "utf8")) as { traceEvents: { ph: string }[] };
  expect(trace.traceEvents.filter((event) => event.ph === "X").length).toBeGreaterThanOrEqual(4 * 8 * 2 * 3);
});

test.each([
  [1280, 860, "light"],
  [1280, 860, "dark"],
  [390, 844, "light"],
  [390, 844, "dark"],
] as const)("%i by %i pixels, %s: nothing sticks out and the picture is there", async (width, height, colorScheme) => {
  const page = await show(ZBV, { viewport: { width, height }, colorScheme });
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(width);
  expect(await page.evaluate(() => document.documentElement.dataset.theme)).toBe(colorScheme);
  expect(await colourful(page)).toBeGreaterThan(8_000);
  const unnamed = await page.evaluate(() =>
    [...document.querySelectorAll<HTMLElement>("button, select, input, canvas[tabindex]")]
      .filter((each) => !each.matches("[aria-hidden]"))
      .filter((each) => !(each.innerText?.trim() || each.getAttribute("aria-label") || (each as HTMLInputElement).labels?.[0]?.innerText.trim()))
      .map((each) => each.outerHTML),
  );
  expect(unnamed).toEqual([]);
});

test.each([1280, 1000, 390])("at %i pixels all that is compared is on screen", async (width) => {
  const page = await show(`file://${join(folder, "three.html")}`, { viewport: { width, height: 844 } });
  expect(await cut(page)).toEqual([]);
  const heads = page.getByTestId("figures").locator("thead th");
  for (const head of await heads.all()) {
    const box = (await head.boundingBox())!;
    expect(box.x).toBeGreaterThanOrEqual(0);
    expect(box.x + box.width).toBeLessThanOrEqual(width);
  }
  expect((await texts(heads)).slice(-1)).toEqual(["difference"]);
  if (width === 390) expect(await texts(heads)).toEqual(["figure", "above", "below", "difference"]);
});

test("the reader can choose the theme", async () => {
  const page = await show();
  await page.getByRole("button", { name: "Dark colours" }).click();
  await settled(page, 'document.documentElement.dataset.theme === "dark"');
});

test("a hundred thousand actions can be zoomed and pointed at", async () => {
  const page = await show(`file://${join(folder, "large.html")}`);
  expect(await read(page, (handle) => handle.actions)).toBeGreaterThanOrEqual(100_000);
  const pictures = await read(page, (handle) => handle.drawn.count);
  await page.getByTestId("timeline").focus();
  for (let k = 0; k < 8; k++) await page.keyboard.press("+");
  await settled(page, `window.penstockPage.drawn.count > ${pictures}`);
  const span = await read(page, (handle) => handle.span);
  await hover(page, { what: "gap", panel: 0, rank: 0, time: (span.from + span.to) / 2 });
  await page.getByTestId("tooltip").waitFor();
});
