// Takes docs/studio.png: 1F1B above ZB-V on four ranks in the live studio, nothing selected, because a selection dims the rest. `make pictures` runs it.
// PENSTOCK_PYTHON is the interpreter that has Penstock, CHROMIUM the browser.
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const ROOT = new URL("../../", import.meta.url);
const PICTURE = fileURLToPath(new URL("docs/studio.png", ROOT));
const SIZE = { width: 1440, height: 900 };
const SOURCES = ["1f1b", "zbv", "-p", "4", "-m", "8", "--costs", "f=1,i=1,w=1,latency=0.1"];
const LIMIT = 60_000;

const require = createRequire(new URL("web/package.json", ROOT));
const { chromium } = require("playwright-core");

async function findBrowser() {
  const installed = process.env.CHROMIUM ?? "/usr/bin/chromium";
  return existsSync(installed) ? installed : (await import(require.resolve("@sparticuz/chromium"))).default.executablePath();
}

/** Starts the studio; resolves to its address. */
function serve() {
  const own = fileURLToPath(new URL(".venv/bin/python", ROOT));
  const python = process.env.PENSTOCK_PYTHON ?? (existsSync(own) ? own : "python3");
  const server = spawn(python, ["-m", "penstock", "studio", ...SOURCES, "--port", "0", "--no-open"], { cwd: fileURLToPath(ROOT) });
  const address = new Promise((resolve, reject) => {
    let said = "";
    server.stderr.on("data", (data) => {
      said += data;
      const found = /https?:\/\/\S+/.exec(said);
      if (found) resolve(found[0]);
    });
    server.on("exit", (code) => reject(new Error(`the studio ended with ${code}: ${said}`)));
  });
  return { server, address };
}

async function waitFor(page, expression) {
  const end = Date.now() + LIMIT;
  while (!(await page.evaluate(expression))) {
    if (Date.now() > end) throw new Error(`never came true: ${expression}`);
    await page.waitForTimeout(50);
  }
}

const { server, address } = serve();
try {
  const browser = await chromium.launch({ executablePath: await findBrowser(), args: ["--no-sandbox", "--disable-gpu"] });
  const page = await browser.newPage({ viewport: SIZE, deviceScaleFactor: 2, colorScheme: "light" });
  await page.goto(await address);
  await waitFor(page, "Boolean(window.penstockPage) && window.penstockPage.drawn.count > 0 && window.penstockPage.actions > 0");
  await page.waitForTimeout(500);
  await page.screenshot({ path: PICTURE });
  await browser.close();
  console.log(`docs/studio.png is the studio as it is now, ${2 * SIZE.width} x ${2 * SIZE.height}`);
} finally {
  server.removeAllListeners("exit");
  server.kill("SIGINT");
}
