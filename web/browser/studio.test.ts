import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { expect, inject, test } from "vitest";
import { addressed, cut, drawn, read, settled, texts, tile, untilTile } from "./page.ts";
import { expected } from "./penstock.ts";
import { Session, studio } from "./session.ts";

const folder = inject("folder");
const wanted = expected(folder);
const address = studio();
const session = new Session();

async function show(hash = "", options = {}): Promise<Page> {
  const page = await session.open(address + hash, options);
  await drawn(page);
  return page;
}

async function showPlan(options = {}): Promise<Page> {
  const page = await session.open(`${address}#tab=plan`, options);
  await page.getByRole("button", { name: "Plan", exact: true }).waitFor();
  return page;
}

test("a schedule is chosen, changed and kept in the address", async () => {
  const page = await show();
  await page.getByLabel("Name").selectOption("gpipe");
  await page.getByText("gpipe, 4 ranks, 8 microbatches").first().waitFor();
  await page.getByRole("textbox", { name: "Ranks" }).fill("5");
  await page.getByRole("textbox", { name: "Ranks" }).press("Enter");
  await page.getByText("gpipe, 5 ranks, 8 microbatches").first().waitFor();
  await page.getByRole("textbox", { name: "Microbatches" }).fill("6");
  await page.getByRole("textbox", { name: "Microbatches" }).press("Enter");
  await untilTile(page, "Makespan", (6 + 5 - 1) * 3);
  await addressed(page, "s=gpipe", "p=5", "m=6");
  await page.reload();
  await untilTile(page, "Makespan", (6 + 5 - 1) * 3);
});

test("chunks and the form of the program are chosen", async () => {
  const page = await show("#s=interleaved-1f1b&p=4&m=8");
  await page.getByRole("textbox", { name: "Chunks per rank" }).fill("4");
  await page.getByRole("textbox", { name: "Chunks per rank" }).press("Enter");
  await untilTile(page, "Makespan", wanted.chunked.makespan);
  await page.getByLabel("As a").selectOption("sharded");
  await page.locator(".legend").getByText("collectives").waitFor();
  await untilTile(page, "Makespan", wanted.sharded.makespan);
});

test("the tabs change the page", async () => {
  const page = await show();
  for (let k = 0; k < 2; k++) {
    await page.getByRole("tab", { name: "Plan" }).click();
    await page.getByRole("button", { name: "Plan", exact: true }).waitFor();
    await page.getByRole("tab", { name: "Timeline" }).click();
    await page.getByTestId("timeline").waitFor();
  }
});

test("arrow keys go from tab to tab", async () => {
  const page = await show();
  await page.getByRole("tab", { name: "Timeline" }).focus();
  await page.keyboard.press("ArrowRight");
  await page.getByRole("tab", { name: "Plan", selected: true }).waitFor();
  expect(await page.evaluate(() => document.activeElement?.textContent)).toBe("Plan");
  await page.keyboard.press("ArrowRight");
  await page.getByRole("tab", { name: "Timeline", selected: true }).waitFor();
  await page.keyboard.press("End");
  await page.getByRole("tab", { name: "Plan", selected: true }).waitFor();
});

test("two schedules stand on one axis with a table of differences", async () => {
  const page = await show("#s=zbv&p=4&m=8");
  await page.getByTestId("compare").selectOption("1f1b");
  const table = page.getByTestId("figures");
  await page.locator(".numbers").getByText("1f1b, 4 ranks").first().waitFor();
  const ratio = wanted["1f1b"].makespan / wanted.half.makespan; // of the same work
  const cells = await texts(table.getByRole("row", { name: /^makespan/ }).getByRole("cell"));
  expect(Number(cells[1]) / Number(cells[0])).toBeCloseTo(ratio, 3);
  expect(Number(cells[2].replace(/[+%]/g, ""))).toBeCloseTo(100 * (ratio - 1), 0);
  await addressed(page, "vs=1f1b");
  await page.getByRole("button", { name: "Stop" }).click();
  await page.getByRole("heading", { name: "Numbers" }).waitFor();
});

test("an order that depends on costs is asked from the server", async () => {
  const page = await show("#s=zb-auto&p=4&m=8");
  await Promise.all([
    page.waitForResponse((response) => response.url().endsWith("/api/view") && (response.request().postData() ?? "").includes('"i":2')),
    page.getByRole("slider", { name: "I", exact: true }).fill("2"),
  ]);
  await page.getByText("the studio makes it anew").waitFor();
  await untilTile(page, "Makespan", wanted.auto.makespan);
});

test("a link with costs that cannot be drawn says so and shows the given ones", async () => {
  const page = await show("#s=zbv&p=4&m=8&f=1e300&i=1e308");
  await page.getByTestId("notice").getByText("f is 1e+300").waitFor();
  await untilTile(page, "Makespan", wanted.zbv.makespan);
});

test("a refusal of the server is shown in its words", async () => {
  const page = await show("#s=zbv&p=4&m=8");
  await page.getByRole("textbox", { name: "Microbatches" }).fill("900000");
  await page.getByRole("textbox", { name: "Microbatches" }).press("Enter");
  await page.getByTestId("notice").getByText("more than the studio takes").waitFor();
  expect(await tile(page, "Messages")).toBe(wanted.zbv.messages);
});

test("a bad CSV shows the verifier's findings at their places", async () => {
  const page = await show();
  await page.getByTestId("file").setInputFiles(join(folder, "bad.csv"));
  const findings = page.getByTestId("findings");
  await findings.waitFor();
  const said = await texts(findings.getByRole("listitem"));
  expect(said.length).toBe(wanted.findings.length);
  wanted.findings.forEach(({ rule, rank, step, message }, k) => {
    for (const part of [rule, `rank ${rank}, step ${step}`, message]) expect(said[k]).toContain(part);
  });
  await findings.locator("button.finding").first().click();
  await page.getByTestId("details").getByText(wanted.findings[0].message).waitFor();
  expect(await page.getByTestId("tile-Makespan").locator(".value").innerText()).toBe("–");
  await addressed(page, "file=bad.csv");
  await page.reload();
  await page.getByTestId("findings").waitFor();
});

test("a dropped file is opened, and what is no schedule is refused", async () => {
  const page = await show();
  const drop = async (name: string, content: string): Promise<void> => {
    const data = await page.evaluateHandle(([file, text]) => {
      const made = new DataTransfer();
      made.items.add(new File([text], file));
      return made;
    }, [name, content]);
    await page.dispatchEvent("body", "dragover", { dataTransfer: data });
    await page.dispatchEvent("body", "drop", { dataTransfer: data });
  };
  await drop("own.csv", "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n");
  await page.getByText("own, 2 ranks, 2 microbatches").first().waitFor();
  await drop("garbage.csv", readFileSync(join(folder, "garbage.csv"), "utf8"));
  await page.getByTestId("notice").getByText("garbage.csv").waitFor();
  expect(await page.title()).toContain("own, 2 ranks");
});

test("a measured run stands beside its prediction", async () => {
  const page = await show();
  await page.getByTestId("file").setInputFiles(join(folder, "measured.json"));
  const table = page.getByTestId("figures");
  await table.locator("thead").getByText("predicted").waitFor();
  const cells = await texts(table.getByRole("row", { name: /^makespan/ }).getByRole("cell"));
  const number = (text: string): number => Number(text.replace(/[^0-9.]/g, ""));
  expect(number(cells[1]) / number(cells[0])).toBeCloseTo(1.25, 2);
  await page.getByTestId("lateness").getByText("They part at").waitFor();
  await page.getByTestId("lateness").getByRole("button").first().click();
  await page.getByTestId("details").getByText(/, measured$/).waitFor();
  expect(await page.getByTestId("differences").getByRole("listitem").count()).toBe(10);
});

test("a measured run and its prediction fit a narrow page", async () => {
  const page = await show("", { viewport: { width: 390, height: 844 } });
  await page.getByTestId("file").setInputFiles(join(folder, "measured.json"));
  await page.getByTestId("lateness").waitFor();
  expect(await cut(page)).toEqual([]);
});

const SHORT = { layers: 8, ranks: 2, microbatches: 4, seconds: 1 };
/** Takes longer than a slow machine needs to click. */
const LONG = { layers: 64, ranks: 16, microbatches: 1024, seconds: 600 };

async function plan(page: Page, asked: typeof SHORT): Promise<void> {
  await page.getByRole("radio", { name: "profile" }).click();
  const layer = { f: 1, i: 1, w: 1, activation: 1, count: asked.layers };
  await page.getByLabel(/A profile as JSON/).fill(JSON.stringify({ layers: [layer], latency: 0.1 }));
  await page.getByLabel("Ranks").fill(String(asked.ranks));
  await page.getByLabel("Microbatches").fill(String(asked.microbatches));
  await page.getByLabel("Memory per rank").fill("30");
  await page.getByLabel("Seconds to search").fill(String(asked.seconds));
  await page.getByRole("button", { name: "Plan", exact: true }).click();
}

test("a plan that is being made can be cancelled", async () => {
  const page = await showPlan();
  await plan(page, LONG);
  await page.getByRole("button", { name: "Cancel" }).click();
  await page.getByTestId("plan-status").getByText(/^cancelled, /).waitFor();
});

test("a page that is left ends the plan that it asked for", async () => {
  const page = await showPlan();
  await plan(page, LONG);
  await page.getByTestId("candidate").first().waitFor();
  await page.reload();
  await plan(page, SHORT);
  await page.getByTestId("plan-status").getByText(/^done, /).waitFor();
});

test("a plan's candidates appear and can be opened", async () => {
  const page = await showPlan();
  await plan(page, SHORT);
  await page.getByTestId("plan-status").getByText(/^done, /).waitFor();
  expect(await page.getByTestId("candidate").count()).toBeGreaterThan(3);
  await page.setViewportSize({ width: 390, height: 844 });
  await settled(page, "document.documentElement.scrollWidth <= 390"); // the plot follows its card
  await page.setViewportSize({ width: 1280, height: 860 });
  await page.getByTestId("candidate").first().press("Enter");
  await page.getByTestId("timeline").waitFor();
  await drawn(page);
  expect(await page.title()).toContain("candidate 0");
  expect(await read(page, (handle) => handle.state.tab)).toBe("timeline");
});

const CLUSTER = `latency = 1.0
node_latency = 0.1
card = "node"

[[devices]]
name = "fast"
node = "a"
memory = 60

[[devices]]
name = "slow"
speed = 0.5
node = "b"
memory = 30
count = 2
`;

test("a plan is made for a cluster that was pasted, is opened with its devices, and its cluster is carried over", async () => {
  const page = await showPlan();
  await page.getByRole("radio", { name: "profile" }).click();
  await page.getByLabel(/A profile as JSON/).fill(JSON.stringify({ layers: [{ f: 1, i: 1, w: 1, activation: 1, output: 1, count: 12 }] }));
  await page.getByLabel("Microbatches").fill("4");
  await page.getByLabel("Seconds to search").fill("1");
  await page.getByLabel(/Devices and links/).fill(CLUSTER.replace("speed = 0.5", "speed = 0"));
  await page.getByTestId("cluster-says").getByText("device 1: speed must be more than 0").waitFor();
  await page.getByLabel(/Devices and links/).fill(CLUSTER);
  await page.getByTestId("cluster-says").getByText("3 devices (1 fast, 2 slow) in 2 nodes").waitFor();
  await settled(page, 'document.querySelector("input[name=ranks]").disabled && document.querySelector("input[name=ranks]").value === "3"');
  await settled(page, 'document.querySelector("input[name=limit]").value === ""');
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByTestId("best").getByText("The planner chose").waitFor();
  const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Save plan.json" }).click()]);
  const saved = readFileSync(await download.path(), "utf8");
  expect((JSON.parse(saved) as { cluster: { devices: unknown[] } }).cluster.devices.length).toBe(3);
  await page.getByRole("button", { name: "Open it", exact: true }).click();
  await drawn(page);
  expect((await texts(page.getByTestId("devices").locator("tbody tr"))).join().match(/slow/g)?.length).toBe(2);
  const links = await texts(page.getByTestId("links").locator("tbody th")); // whichever rank the planner puts into the other node
  expect(links.some((text) => /^\d → \d slow$/.test(text)) && links.some((text) => /^\d → \d$/.test(text))).toBe(true);
  await addressed(page, "plan.cluster=");
  await page.reload(); // the address has the cluster
  await page.getByRole("tab", { name: "Plan" }).click();
  await page.getByTestId("cluster-says").getByText("3 devices").waitFor();
  await page.getByRole("button", { name: "Remove it" }).click();
  await settled(page, '!document.querySelector("input[name=ranks]").disabled && document.querySelector("input[name=limit]").value !== ""');
  await page.locator('input[aria-label="Cluster file"]').setInputFiles({ name: "c.json", mimeType: "application/json", buffer: Buffer.from('{"devices": [{}, {}]}') });
  await page.getByTestId("cluster-says").getByText("2 devices (2 of speed 1)").waitFor();
});

test("mistakes in what is to be planned are named", async () => {
  const page = await showPlan();
  await page.getByLabel("Ranks").fill("none");
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByRole("alert").getByText("ranks must be a whole number").waitFor();
  await page.getByLabel("Ranks").fill("4000");
  await page.getByRole("button", { name: "Plan", exact: true }).click();
  await page.getByRole("alert").getByText("too few for 4000 ranks").waitFor();
  await addressed(page, "plan.ranks=4000");
  await page.reload();
  await settled(page, 'document.querySelector("input[name=ranks]")?.value === "4000"');
});

test("at 390 pixels a candidate is a card, with all figures and what opens it in sight", async () => {
  const page = await session.open(`${address}#tab=plan`, { viewport: { width: 390, height: 844 } });
  await plan(page, SHORT);
  await page.getByTestId("plan-status").getByText(/^done, /).waitFor();
  const row = page.getByTestId("candidates").locator("tbody tr").first();
  for (const cell of await row.locator("th, td").all()) {
    const box = (await cell.boundingBox())!;
    expect(box.x).toBeGreaterThanOrEqual(0);
    expect(box.x + box.width).toBeLessThanOrEqual(390);
  }
  expect(await row.locator("td[data-name]").count()).toBe(6);
  await page.getByRole("button", { name: "Keys" }).click();
  await page.getByTestId("help").getByText("frame the selection").waitFor();
});

test.each([1280, 390])("at %i pixels the plan fits the page", async (width) => {
  const page = await showPlan({ viewport: { width, height: 844 } });
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(width);
});
