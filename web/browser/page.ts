import { existsSync } from "node:fs";
import { chromium, type Browser, type BrowserContextOptions, type Locator, type Page } from "playwright-core";
import type { Handle } from "../src/parts/handle.ts";
import type { Target } from "../src/draw/target.ts";

/** Generous: the machine may be busy. */
const LIMIT = 60_000;
const INSTALLED = "/usr/bin/chromium";

/** Debian's browser, or else the one of the npm package, which the first call unpacks into the folder for temporary files. */
export async function findBrowser(): Promise<string> {
  return existsSync(INSTALLED) ? INSTALLED : (await import("@sparticuz/chromium")).default.executablePath();
}

/** The arguments of the npm package are not used: they run the browser in one process, which does not outlive a page. */
export async function launch(): Promise<Browser> {
  return chromium.launch({ executablePath: await findBrowser(), args: ["--no-sandbox", "--disable-gpu"] });
}

/** A page with everything on it that should not happen. */
export interface Watched {
  page: Page;
  /** Requests to elsewhere, errors, and what the page's own policy refused. */
  faults: string[];
  requests: string[];
}

export async function open(browser: Browser, address: string, options: BrowserContextOptions = {}): Promise<Watched> {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, acceptDownloads: true, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(LIMIT);
  const watched: Watched = { page, faults: [], requests: [] };
  const origin = address.startsWith("file:") ? "file:" : new URL(address).origin;
  page.on("request", (request) => {
    watched.requests.push(request.url());
    if (!request.url().startsWith(origin) && !/^(data|blob):/.test(request.url())) watched.faults.push(`request to ${request.url()}`);
  });
  page.on("pageerror", (error) => watched.faults.push(`error: ${error.message}`));
  page.on("console", (message) => {
    // A refusal of the server is shown to the reader; the browser logs its status besides.
    if (message.type() === "error" && !message.text().includes("Failed to load resource")) watched.faults.push(`console: ${message.text()}`);
  });
  await page.goto(address);
  return watched;
}

type Read<Value> = (handle: Handle) => Value;

/** Reads from the page's handle. */
export function read<Value>(page: Page, body: Read<Value>): Promise<Value> {
  return page.evaluate(`(${body.toString()})(window.penstockPage)`) as Promise<Value>;
}

/** Waits until something on the handle is so. */
export async function until(page: Page, body: Read<boolean>): Promise<void> {
  await settled(page, `Boolean(window.penstockPage) && (${body.toString()})(window.penstockPage)`);
}

/** Waits until an expression is true; the page's policy forbids waits that evaluate text inside of it. */
export async function settled(page: Page, expression: string): Promise<void> {
  const end = Date.now() + LIMIT;
  while (!(await page.evaluate(expression))) {
    if (Date.now() > end) throw new Error(`never came true: ${expression}`);
    await page.waitForTimeout(40);
  }
}

/** The texts of every element found, once the first of them is on the page. */
export async function texts(found: Locator): Promise<string[]> {
  await found.first().waitFor();
  return found.allInnerTexts();
}

/** Waits for words in the address. */
export async function addressed(page: Page, ...words: string[]): Promise<void> {
  await settled(page, `${JSON.stringify(words)}.every((word) => location.hash.includes(word))`);
}

/** Waits until there is a picture. */
export async function drawn(page: Page): Promise<void> {
  await until(page, (handle) => handle.drawn.count > 0 && handle.actions > 0);
}

export function where(page: Page, target: Target): Promise<{ x: number; y: number }> {
  return page.evaluate(`window.penstockPage.where(${JSON.stringify(target)})`) as Promise<{ x: number; y: number }>;
}

/** Moves to the middle of something on the canvas, and brings it into the window first. */
export async function hover(page: Page, target: Target): Promise<void> {
  await page.getByTestId("timeline").scrollIntoViewIfNeeded();
  const { x, y } = await where(page, target);
  await page.mouse.move(x, y);
}

export async function click(page: Page, target: Target): Promise<void> {
  await hover(page, target);
  const { x, y } = await where(page, target);
  await page.mouse.click(x, y);
}

/** The number in a tile. */
export async function tile(page: Page, name: string): Promise<number> {
  const text = await page.getByTestId(`tile-${name}`).locator(".value").innerText();
  return Number(text.replace(/[,%]/g, "")) / (text.includes("%") ? 100 : 1);
}

export async function untilTile(page: Page, name: string, value: number): Promise<void> {
  const read = `(() => { const text = document.querySelector('[data-testid="tile-${name}"] .value')?.textContent ?? ""; return Math.abs(Number(text.replace(/,/g, "")) - ${value}) < ${1e-3 * Math.max(1, value)}; })()`;
  await settled(page, read);
}

/** How many pixels of the timeline have some colour, not just grey. */
export function colourful(page: Page): Promise<number> {
  return page.evaluate(() => {
    const canvas = document.querySelector<HTMLCanvasElement>(".sticky canvas")!;
    const { data } = canvas.getContext("2d")!.getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let k = 0; k < data.length; k += 4) if (Math.max(data[k], data[k + 1], data[k + 2]) - Math.min(data[k], data[k + 1], data[k + 2]) > 60) count++;
    return count;
  });
}

/** What does not show without being scrolled sideways: tables and tiles that are wider than their place. */
export function cut(page: Page): Promise<string[]> {
  return page.evaluate(() =>
    [...document.querySelectorAll<HTMLElement>(".tiles, .tile, .wide")]
      .filter((each) => each.scrollWidth > each.clientWidth)
      .map((each) => `${each.className}: ${each.scrollWidth} pixels in ${each.clientWidth}`),
  );
}
