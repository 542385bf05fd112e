// What stands where: the dock, the tooltip, the keys and the wheel, and what was seen to be wrong with them.
import { join } from "node:path";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import type { Target } from "../src/draw/target.ts";
import { click, cut, drawn, hover, read, settled, until } from "./page.ts";
import { Session, studio } from "./session.ts";

const folder = inject("folder");
const address = studio();
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

test("W, A, S and D move the chart under the pointer wherever the focus is, but not where something is typed", async () => {
  const page = await show(ZBV, LARGE);
  const whole = await read(page, (handle) => handle.span);
  await page.getByRole("button", { name: "Share" }).focus();
  await page.keyboard.press("w");
  expect(await read(page, (handle) => handle.span)).toEqual(whole);
  await hover(page, { what: "action", panel: 0, index: 30 });
  await page.keyboard.press("w");
  const near = await read(page, (handle) => handle.span);
  expect(near.to - near.from).toBeCloseTo((whole.to - whole.from) / 1.5, 6);
  await page.keyboard.press("d");
  expect((await read(page, (handle) => handle.span)).from).toBeGreaterThan(near.from);
  await page.getByLabel("Latency, typed").focus();
  await hover(page, { what: "action", panel: 0, index: 30 });
  await page.keyboard.press("s");
  expect((await read(page, (handle) => handle.span)).to - (await read(page, (handle) => handle.span)).from).toBeCloseTo(near.to - near.from, 6);
  await page.getByTestId("timeline").focus();
  await page.keyboard.press("w");
  const once = await read(page, (handle) => handle.span);
  expect(once.to - once.from).toBeCloseTo((near.to - near.from) / 1.5, 6);
});

/** Lists whose chosen text has no room. */
function clipped(page: Page): Promise<string[]> {
  return page.evaluate(() => {
    const pen = document.createElement("canvas").getContext("2d")!;
    return [...document.querySelectorAll("select")].flatMap((list) => {
      const style = getComputedStyle(list);
      pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      const text = list.selectedOptions[0]?.text ?? "";
      const room = list.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16; // the arrow
      return pen.measureText(text).width > room ? [`${text}: ${Math.round(pen.measureText(text).width)} pixels in ${Math.round(room)}`] : [];
    });
  });
}

test.each([1440, 1024, 390])("at %i pixels no list clips what is chosen", async (width) => {
  const viewport = { width, height: 900 };
  const served = await show(`${address}#s=grouped-interleaved&p=4&m=8&as=sharded&vs=interleaved-1f1b`, { viewport });
  expect(await clipped(served)).toEqual([]);
  const three = await show(`file://${join(folder, "three.html")}`, { viewport });
  expect(await clipped(three)).toEqual([]);
});

test("no key touches what it means, at any width", async () => {
  for (const width of [1440, 390]) {
    const page = await show(ZBV, { viewport: { width, height: 900 } });
    await page.getByRole("button", { name: "Keys" }).click();
    await page.getByTestId("help").waitFor();
    const apart = await page.evaluate(() =>
      [...document.querySelectorAll(".help dl div")].map((row) => row.querySelector("dd")!.getBoundingClientRect().left - Math.max(...[...row.querySelectorAll("kbd")].map((key) => key.getBoundingClientRect().right))),
    );
    expect(Math.min(...apart)).toBeGreaterThan(6);
  }
});

test("at 390 pixels actions have numbers, and figures do not wrap", async () => {
  const viewport = { width: 390, height: 844 };
  const page = await show(ZBV, { viewport });
  expect(await read(page, (handle) => handle.labels)).toEqual(["microbatches"]);
  const lines = await page.evaluate(() => [...document.querySelectorAll(".tile .value")].map((value) => Math.round(value.getBoundingClientRect().height / parseFloat(getComputedStyle(value).lineHeight))));
  expect(new Set(lines)).toEqual(new Set([1]));
  expect(await cut(page)).toEqual([]);
});

test("messages that would be dust have no lanes until they can be read", async () => {
  const page = await show(`${ZBV}#latency=0.3`, LARGE);
  expect(await read(page, (handle) => handle.lanes)).toEqual([false]);
  await page.locator(".legend").getByText("messages are short: zoom in to see them").waitFor();
  await hover(page, { what: "action", panel: 0, index: 30 });
  await page.keyboard.press("w");
  await page.keyboard.press("w");
  await until(page, (handle) => handle.lanes[0]);
  await page.locator(".legend").getByText("gradients").waitFor();
});

test("the legend has the shades that there are", async () => {
  const page = await show(`${address}#s=zbv&p=4&m=8&vs=1f1b`, LARGE);
  const shades = (text: string): Promise<number> => page.locator(".legend li", { hasText: text }).locator("i").count();
  expect(await shades("F forward")).toBe(2);
  expect(await shades("B full backward")).toBe(1);
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
