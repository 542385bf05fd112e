// Takes the pictures of the studio in docs/, from the live studio in its light colours: all of them, or those that are named as arguments, as
// `node docs/maker/studio.mjs studio-cycle`. `make pictures` runs it. PENSTOCK_PYTHON is the interpreter that has Penstock, CHROMIUM the browser.
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const ROOT = new URL("../../", import.meta.url);
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

const isDrawn = (page) => waitFor(page, "Boolean(window.penstockPage) && window.penstockPage.drawn.count > 0 && window.penstockPage.actions > 0");

/** The pictures by their names: where in the studio, how many pixels of the picture for one of the page, and what is done before it is taken. */
const PICTURES = {
  /** 1F1B above ZB-V, nothing selected, because a selection dims the rest. */
  studio: { hash: "", density: 2, prepare: isDrawn },
  /** Every B was split, one W moved, and the order is proved. */
  "studio-edit": {
    hash: "#s=1f1b&p=4&m=8&e=sx.x_m0.5.13_m1.4.8",
    density: 1.5,
    prepare: async (page) => {
      await isDrawn(page);
      await page.getByRole("button", { name: "Edit", exact: true }).click();
      await page.getByTestId("verdict").getByText("Proved by the verifier").waitFor();
      const { x, y } = await page.evaluate("window.penstockPage.where({ what: 'action', panel: 0, index: 13 })");
      await page.mouse.click(x, y);
      await page.mouse.move(0, 0);
    },
  },
  /** A forward was moved too far back: two ranks wait for each other. */
  "studio-cycle": {
    hash: "#s=1f1b&p=4&m=8&e=m0.3.6",
    density: 1.5,
    prepare: async (page) => {
      await isDrawn(page);
      await page.locator("button.finding").first().click();
      await page.mouse.move(0, 0);
    },
  },
  /** Candidates of a plan with a limit that most are over. */
  "studio-plan": {
    hash: "#tab=plan",
    density: 1.5,
    prepare: async (page) => {
      for (const [name, value] of Object.entries({ ranks: "8", microbatches: "16", limit: "30GiB", seconds: "2" })) await page.locator(`input[name=${name}]`).fill(value);
      await page.getByRole("button", { name: "Plan", exact: true }).click();
      await page.getByTestId("best").getByText("The planner chose").waitFor({ timeout: 2 * LIMIT });
    },
  },
};

const wanted = process.argv.slice(2);
const unknown = wanted.find((name) => !(name in PICTURES));
if (unknown) throw new Error(`there is no picture ${unknown}: the pictures are ${Object.keys(PICTURES).join(", ")}`);
const { server, address } = serve();
try {
  const browser = await chromium.launch({ executablePath: await findBrowser(), args: ["--no-sandbox", "--disable-gpu"] });
  for (const [name, { hash, density, prepare }] of Object.entries(PICTURES)) {
    if (wanted.length && !wanted.includes(name)) continue;
    const page = await browser.newPage({ viewport: SIZE, deviceScaleFactor: density, colorScheme: "light" });
    page.setDefaultTimeout(LIMIT);
    await page.goto((await address) + hash);
    await prepare(page);
    await page.waitForTimeout(500);
    await page.screenshot({ path: fileURLToPath(new URL(`docs/${name}.png`, ROOT)) });
    await page.close();
    console.log(`docs/${name}.png is the studio as it is now, ${density * SIZE.width} x ${density * SIZE.height}`);
  }
  await browser.close();
} finally {
  server.removeAllListeners("exit");
  server.kill("SIGINT");
}
