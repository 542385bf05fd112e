// What stands where: the dock, the tooltip, the keys and the wheel, and what was seen to be wrong with them.
import { join } from "node:path";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import type { Target } from "../src/draw/target.ts";
import { click, drawn, hover, read, settled, until } from "./page.ts";
import { Session } from "./session.ts";

const folder = inject("folder");
const address = inject("studio");
const ZBV = `file://${join(folder, "zbv.html")}`;
const session = new Session();

async function show(at = ZBV, options = {}): Promise<Page> {
  const page = await session.open(at, options);
  await drawn(page);
  return page;
}

const LARGE = { viewport: { width: 1440, height: 900 } };

test("at 1440 by 900 the selection and the numbers are in sight without scrolling", async () => {
  const page = await show(ZBV, LARGE);
  await click(page, { what: "action", panel: 0, index: 30 });
  await page.getByTestId("details").getByText("Unblocks").waitFor();
  for (const part of [page.getByTestId("details"), page.getByTestId("figures"), page.getByTestId("timeline")]) {
    const box = (await part.boundingBox())!;
    expect(box.y).toBeGreaterThanOrEqual(0);
    expect(box.y + box.height).toBeLessThanOrEqual(900);
    expect(box.x + box.width).toBeLessThanOrEqual(1440);
  }
});

/** Where the target's arrows run, as boxes of the page. */
function footprint(page: Page, target: Target): Promise<{ x: number; y: number; width: number; height: number }[]> {
  return page.evaluate(`window.penstockPage.footprint(${JSON.stringify(target)})`) as Promise<{ x: number; y: number; width: number; height: number }[]>;
}

test("the tooltip covers none of the arrows that it explains", async () => {
  const page = await show(`${ZBV}#latency=0.3`, LARGE);
  for (const index of [0, 20, 47, 60, 95, 110, 150, 191]) {
    const target: Target = { what: "action", panel: 0, index };
    await hover(page, target);
    await settled(page, `document.querySelector("[data-testid=tooltip] strong") !== null`);
    const note = (await page.getByTestId("tooltip").boundingBox())!;
    for (const box of await footprint(page, target)) {
      const apart = note.x >= box.x + box.width || note.x + note.width <= box.x || note.y >= box.y + box.height || note.y + note.height <= box.y;
      expect(apart, `action ${index}`).toBe(true);
    }
    expect(note.y).toBeGreaterThanOrEqual(50);
    expect(note.y + note.height).toBeLessThanOrEqual(900);
  }
});

test("the plain wheel scrolls, W and S zoom, A and D move, f frames the selection, ? shows all keys", async () => {
  const page = await show(`${ZBV}#`, { viewport: { width: 1440, height: 420 } });
  const whole = await read(page, (handle) => handle.span);
  const width = (span: { from: number; to: number }): number => span.to - span.from;
  await hover(page, { what: "action", panel: 0, index: 30 });
  await page.mouse.wheel(0, 300);
  await settled(page, 'document.querySelector(".scroller").scrollTop > 0 || window.scrollY > 0');
  expect(await read(page, (handle) => handle.span)).toEqual(whole);
  await page.getByTestId("timeline").focus();
  await page.keyboard.press("w");
  const near = await read(page, (handle) => handle.span);
  expect(width(near)).toBeCloseTo(width(whole) / 1.5, 6);
  await page.keyboard.press("d");
  expect((await read(page, (handle) => handle.span)).from).toBeGreaterThan(near.from);
  await page.keyboard.press("a");
  await page.keyboard.press("s");
  expect(width(await read(page, (handle) => handle.span))).toBeCloseTo(width(whole), 6);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("f");
  await until(page, (handle) => handle.span.to - handle.span.from < 10);
  await page.keyboard.press("?");
  await page.getByTestId("help").getByText("frame the selection").waitFor();
  await page.keyboard.press("Escape");
  await settled(page, '!document.querySelector("[data-testid=help]").open');
});

test("an invalid number stays, is marked and says what it must be; sliders take typed values", async () => {
  const page = await show(`${address}#s=zbv&p=4&m=8`);
  const ranks = page.getByRole("textbox", { name: "Ranks" });
  await ranks.fill("2.5");
  await ranks.press("Enter");
  await page.getByRole("alert").getByText("Ranks must be a whole number of at least 1").waitFor();
  expect(await ranks.inputValue()).toBe("2.5");
  await ranks.fill("5");
  await ranks.press("Enter");
  await page.getByText("zbv, 5 ranks, 8 microbatches").first().waitFor();
  expect(await page.getByRole("alert").count()).toBe(0);
  const latency = page.getByLabel("Latency, typed");
  await latency.fill("0.0001456");
  await latency.press("Enter");
  await until(page, (handle) => handle.state.adjust.latency === 0.0001456);
  expect(await latency.inputValue()).toBe("0.0001456");
  await latency.fill("soon");
  await latency.press("Enter");
  await page.getByRole("alert").getByText("Latency: write a number").waitFor();
  await page.getByLabel("F, typed").fill("2.5");
  await page.getByLabel("F, typed").press("Enter");
  await until(page, (handle) => handle.state.adjust.f === 2.5);
});

test.each([1440, 1024, 390])("at %i pixels the export menu is on screen, whole", async (width) => {
  const page = await show(`file://${join(folder, "three.html")}`, { viewport: { width, height: 844 } });
  await page.getByRole("button", { name: "Export" }).click();
  const menu = page.getByRole("menu", { name: "Export" });
  const box = (await menu.boundingBox())!;
  expect(box.x).toBeGreaterThanOrEqual(0);
  expect(box.x + box.width).toBeLessThanOrEqual(width);
  expect(box.y + box.height).toBeLessThanOrEqual(844);
  expect(await menu.evaluate((list) => list.scrollWidth <= list.clientWidth)).toBe(true);
});

test("the first picture has a name or a number on every action", async () => {
  const page = await session.open(address, LARGE);
  await drawn(page);
  expect(await read(page, (handle) => handle.actions)).toBe(4 * 8 * 2 * 3);
  expect(await read(page, (handle) => handle.labels)).toEqual(["microbatches"]);
  await page.getByTestId("timeline").focus();
  for (let k = 0; k < 3; k++) await page.keyboard.press("+");
  await until(page, (handle) => handle.labels[0] === "names");
});

test("the plan's button is in sight however long the form is", async () => {
  for (const viewport of [{ width: 1440, height: 900 }, { width: 1024, height: 768 }]) {
    const page = await session.open(`${address}#tab=plan`, { viewport });
    const box = (await page.getByRole("button", { name: "Plan", exact: true }).boundingBox())!;
    expect(box.y + box.height).toBeLessThanOrEqual(viewport.height);
  }
});
