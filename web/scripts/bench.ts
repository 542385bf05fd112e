// Measures the page in a real browser: the first picture, frames while an action is dragged and while the axis is zoomed, and retiming.
// Prints one JSON object: for each case its values in milliseconds. Arguments: pages that `penstock export` has written.
import { basename } from "node:path";
import { pathToFileURL } from "node:url";
import type { Page } from "playwright-core";
import { launch } from "../browser/page.ts";

const FRAMES = 90;
const OPENINGS = 5;

type Values = Record<string, number[]>;


async function opened(page: Page, address: string): Promise<number> {
  await page.goto("about:blank");
  await page.goto(address);
  while (!(await page.evaluate("window.penstockPage?.drawn.first ?? 0"))) await page.waitForTimeout(10);
  return (await page.evaluate("window.penstockPage.drawn.first")) as number;
}

/** The milliseconds between frames while events are sent to the timeline, one per frame. */
async function frames(page: Page, kind: "drag" | "zoom", at: { x: number; y: number }): Promise<number[]> {
  return page.evaluate(
    async ({ kind, at, count }) => {
      const canvas = document.querySelector<HTMLElement>("[data-testid=timeline]")!;
      const next = (): Promise<number> => new Promise((done) => requestAnimationFrame(done));
      const found: number[] = [];
      await next();
      let before = await next();
      for (let k = 0; k < count; k++) {
        if (kind === "drag") {
          const x = at.x + 60 * Math.sin((k / count) * 2 * Math.PI);
          canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: at.y, bubbles: true, pointerType: "mouse" }));
        } else canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: k < count / 2 ? -60 : 60, clientX: at.x, clientY: at.y, ctrlKey: true, bubbles: true, cancelable: true }));
        const now = await next();
        found.push(now - before);
        before = now;
      }
      return found;
    },
    { kind, at, count: FRAMES },
  );
}

/** From a slider's move to the picture that shows it. */
async function retimes(page: Page): Promise<number[]> {
  return page.evaluate(async (count) => {
    const slider = document.querySelector<HTMLInputElement>("input[type=range]")!;
    const page = (window as unknown as { penstockPage: { drawn: { count: number } } }).penstockPage;
    const found: number[] = [];
    for (let k = 0; k < count; k++) {
      const drawn = page.drawn.count;
      await new Promise((done) => requestAnimationFrame(done));
      const begun = performance.now();
      slider.value = String(1 + (k % 7) / 10);
      slider.dispatchEvent(new Event("input", { bubbles: true }));
      const handled = performance.now() - begun;
      while (page.drawn.count === drawn) await new Promise((done) => requestAnimationFrame(done));
      const { took } = page.drawn as unknown as { took: number };
      found.push(handled + took);
    }
    return found;
  }, 20);
}

const browser = await launch();
const made: Record<string, Values> = {};
for (const path of process.argv.slice(2)) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 } });
  const page = await context.newPage();
  const address = pathToFileURL(path).href;
  const values: Values = { first: [] };
  for (let k = 0; k < OPENINGS; k++) values.first.push(await opened(page, address));
  values.retime = await retimes(page);
  const middle = await page.getByTestId("timeline").boundingBox();
  values.zoom = await frames(page, "zoom", { x: middle!.x + middle!.width / 2, y: middle!.y + 60 });
  await page.getByRole("button", { name: "Fit" }).click();
  await page.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByTestId("changes").waitFor();
  const place = await page.evaluate("(() => { const page = window.penstockPage; return page.where({ what: 'action', panel: 0, index: Math.floor(page.actions / 50) }); })()") as { x: number; y: number };
  await page.mouse.move(place.x, place.y);
  await page.mouse.down();
  values.drag = await frames(page, "drag", place);
  await page.mouse.move(place.x + 60, place.y);
  await page.mouse.up();
  if ((await page.evaluate("window.penstockPage.state.edits")) === "") throw new Error(`nothing was dragged in ${path}`);
  made[basename(path)] = values;
  await context.close();
}
await browser.close();
process.stdout.write(`${JSON.stringify(made)}\n`);
