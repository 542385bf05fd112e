import { afterEach, expect, test, vi } from "vitest";
import { requestOf, startPlan } from "../src/parts/PlanForm.tsx";
import { plotted, sizeTicks } from "../src/parts/Tradeoff.tsx";
import { sortCandidates } from "../src/parts/PlanPart.tsx";
import { paretoFront, PlanState, reasonIn, remediesIn, SHAPE, transformerOf, USUAL, withLatest } from "../src/state/plan.ts";
import { candidatesCsv } from "../src/state/planExports.ts";
import type { Candidate } from "../src/state/api.ts";

const WANTED = USUAL;

function candidate(index: number, makespan: number | null, memory: number | null, fits: boolean): Candidate {
  return { index, place: index, name: `c${index}`, makespan, memory, fits };
}

test("a shape is told in the units of the planner", () => {
  const said = transformerOf({ ...SHAPE, tflops: "400", latency: "10", kv_heads: "8", microbatch: "1, 2,4" });
  expect(said).toMatchObject({ layers: 32, hidden: 4096, kv_heads: 8, flops: 4e14, microbatch: [1, 2, 4], gated: true });
  expect(said.latency).toBeCloseTo(1e-5, 12);
  expect(transformerOf({ ...SHAPE, kv_heads: "", ffn: " ", bandwidth: "" })).not.toHaveProperty("kv_heads");
});

test("the request has what was typed in", () => {
  expect(requestOf(WANTED)).toMatchObject({ request: { ranks: 8, microbatches: 32, memory_limit: "80GiB", seconds: 10 }, limit: 80 * 2 ** 30 });
  expect(requestOf({ ...WANTED, limit: "8" })).toMatchObject({ request: { memory_limit: 8 }, limit: 8 });
  expect(requestOf({ ...WANTED, limit: "" }).request).not.toHaveProperty("memory_limit");
  expect(requestOf({ ...WANTED, model: "profile", profile: '{"layers": []}' }).request).toMatchObject({ profile: { layers: [] } });
});

test.each([
  [{ ranks: "0" }, "ranks must be a whole number"],
  [{ microbatches: "x" }, "microbatches must be a whole number"],
  [{ limit: "much" }, "much is not a size"],
  [{ seconds: "-1" }, "seconds to search"],
  [{ model: "profile" as const, profile: "{" }, "the profile is not JSON"],
  [{ shape: { ...SHAPE, layers: "1.5" } }, "layers must be a whole number"],
  [{ shape: { ...SHAPE, tflops: "" } }, "TFLOP/s must be a number above 0"],
])("a mistake is named (%#)", (change, said) => expect(() => requestOf({ ...WANTED, ...change })).toThrow(said));

test("the best fits and is the fastest of those", () => {
  const plan = new PlanState();
  expect(plan.best.value).toBeNull();
  plan.candidates.value = [candidate(0, 5, 1, true), candidate(1, 3, 9, false), candidate(2, 4, 2, true), candidate(3, null, null, false)];
  expect(plan.best.value?.index).toBe(2);
  expect(plotted(plan.candidates.value, plan.best.value).map((each) => each.index)).toEqual([0, 1, 2]);
});

test("what is far slower than the fastest that fits is not plotted, and the planner's choice always is", () => {
  const tight = [candidate(0, 10, 90, false), candidate(1, 25, 18, true), candidate(2, 45, 10, true), candidate(3, 51, 9, true), candidate(4, 60, 5, true)];
  expect(plotted(tight, tight[1]).map((each) => each.index)).toEqual([0, 1, 2]);
  expect(plotted(tight, tight[4]).map((each) => each.index)).toEqual([0, 1, 2, 4]);
  const none = tight.map((each) => ({ ...each, fits: false }));
  expect(plotted(none, null).map((each) => each.index)).toEqual([0]);
  expect(plotted([candidate(0, null, null, false)], null)).toEqual([]);
});

test("a better version takes the place of the one before", () => {
  const first = [candidate(0, 5, 1, true), candidate(1, 6, 2, true)];
  const later = [{ ...candidate(2, 4, 1, true), place: 0 }, candidate(3, 9, 9, false), { ...candidate(4, 3, 1, true), place: 0 }];
  expect(withLatest(first, later).map((each) => each.index)).toEqual([4, 1, 3]);
});

test.each([
  [25, 105, 700],
  [25, 105, 300],
  [3, 40, 700],
])("sizes from %i to %i GiB on %i pixels are round in their unit, inside, and not crowded", (low, high, width) => {
  const gib = 2 ** 30;
  const ticks = sizeTicks(low * gib, high * gib, "B", width).map((tick) => tick / gib);
  expect(ticks.length).toBeGreaterThan(1);
  expect(ticks.length).toBeLessThanOrEqual(width / 66 + 1);
  for (const tick of ticks) {
    expect(Number.isInteger(tick)).toBe(true);
    expect(tick).toBeGreaterThanOrEqual(low);
    expect(tick).toBeLessThanOrEqual(high);
  }
});

afterEach(() => vi.unstubAllGlobals());

/** A server that answers when it is told to, and what it was asked. */
function server(): { asked: string[]; answer: (body: unknown, ok?: boolean) => void } {
  const asked: string[] = [];
  let answer: (body: unknown, ok?: boolean) => void = () => undefined;
  vi.stubGlobal("fetch", (address: string, options: RequestInit) => {
    asked.push(`${options.method} ${address}`);
    if (options.method === "DELETE") return Promise.resolve({ ok: true });
    return new Promise((done) => (answer = (body, ok = true) => done({ ok, status: ok ? 200 : 429, json: () => Promise.resolve(body), text: () => Promise.resolve(JSON.stringify(body)) })));
  });
  vi.stubGlobal("EventSource", class { addEventListener(): void {} close(): void {} });
  return { asked, answer: (body, ok) => answer(body, ok) };
}

const UNITS = { time: "", size: "" };

test("a plan is cancelled also before the server has named it", async () => {
  const { asked, answer } = server();
  const plan = new PlanState();
  plan.job.value = "an earlier one";
  const started = plan.start({}, null, UNITS);
  const cancelled = plan.cancel();
  expect(plan.cancelling.value).toBe(true);
  answer({ job: "seven", limits: null });
  await Promise.all([started, cancelled]);
  expect(asked).toEqual(["POST /api/plan", "DELETE /api/plan/seven"]);
});

test("a plan that is refused has nothing to cancel, and the refusal is said", async () => {
  const { asked, answer } = server();
  const plan = new PlanState();
  const started = plan.start({}, null, UNITS);
  const cancelled = plan.cancel();
  answer({ error: "a plan is being made" }, false);
  await Promise.all([started, cancelled]);
  expect(asked).toEqual(["POST /api/plan"]);
  expect(plan.status.value).toBe("failed");
  expect(plan.error.value).toContain("a plan is being made");
});

test("the planner's choice is the best once it has chosen", () => {
  const plan = new PlanState();
  plan.candidates.value = [candidate(0, 5, 1, true), candidate(1, 4, 2, true)];
  plan.result.value = { best: 0, cancelled: false };
  expect(plan.best.value?.index).toBe(0);
  plan.result.value = { best: null, cancelled: false, name: "searched", makespan: 3, memory: 1 };
  expect(plan.best.value).toBeNull();
  plan.result.value = { best: 1, cancelled: true };
  expect(plan.best.value?.index).toBe(1);
});

const REFUSED = `no plan fits: 12 candidates on 4 ranks with a memory limit of 8GiB each
  nearest is zbv (v, 8 microbatches of 2): rank 0 holds 20GiB, 12GiB over its limit of 8GiB
what would fit (each tried):
  recompute=True: 1f1b (linear, 8 microbatches of 2, 4 of 4 stages recomputed), 7GiB of 8GiB on rank 0
  microbatches of 1, 16 of them (scaled from the profile): 1f1b (linear, 16 microbatches of 1), 7GiB of 8GiB on rank 0
  6 ranks: 1f1b (linear, 8 microbatches of 2), 7GiB of 8GiB on rank 0
  a memory limit of 18.46GiB: gpipe (linear, 8 microbatches of 2)`;

test("what would fit are changes to the form", () => {
  const made = remediesIn(REFUSED).map(({ change }) => change(WANTED));
  expect(made.length).toBe(4);
  expect(made[0].recompute).toBe(true);
  expect([made[1].microbatches, made[1].shape.microbatch]).toEqual(["16", "1"]);
  expect(made[2].ranks).toBe("6");
  expect(made[3].limit).toBe("18.46GiB");
  expect(remediesIn(REFUSED).map(({ text }) => text)).toEqual(["Plan with recompute", "Plan with 16 microbatches of 1", "Plan with 6 ranks", "Plan with 18.46GiB per rank"]);
  expect(remediesIn(REFUSED)[3].why).toBe("gpipe (linear, 8 microbatches of 2)");
  expect(reasonIn(REFUSED).split("\n").length).toBe(2);
  const ended = "the plan took too long: what would fit is not known, a memory limit of 3 may";
  expect(remediesIn(ended)).toEqual([]);
  expect(reasonIn(ended)).toBe(ended);
});

test("the line of the limit is where candidates are judged, below what was asked for", async () => {
  const { answer } = server();
  const plan = new PlanState();
  const started = plan.start({}, 80, UNITS);
  expect(plan.limit.value).toBe(80);
  answer({ job: "seven", limits: [76, 76] });
  await started;
  expect([plan.asked.value, plan.limit.value]).toEqual([80, 76]);
});

const CLUSTER = "[[devices]]\ncount = 2\nmemory = 3";
const INFO = { ranks: 2, summary: "2 devices (2 of speed 1)", has_memory: true };

test("a cluster gives the ranks, the links and the memory, unless a limit was typed", async () => {
  const { answer } = server();
  const plan = new PlanState();
  const taken = plan.takeCluster(CLUSTER, "c.toml");
  expect(plan.cluster.value).toEqual({ text: CLUSTER, info: null, problem: null });
  answer(INFO);
  await taken;
  expect(plan.cluster.value?.info).toEqual(INFO);
  const { request, limit } = requestOf({ ...plan.wanted.value, ranks: "none" });
  expect([request.cluster, limit]).toEqual([CLUSTER, null]);
  for (const name of ["ranks", "memory_limit"]) expect(request).not.toHaveProperty(name);
  for (const name of ["latency", "bandwidth"]) expect(request.transformer).not.toHaveProperty(name);
  await plan.takeCluster("");
  expect([plan.cluster.value, plan.wanted.value]).toEqual([null, USUAL]);
  plan.wanted.value = { ...USUAL, limit: "7" };
  const again = plan.takeCluster(CLUSTER);
  answer(INFO);
  await again;
  expect(requestOf(plan.wanted.value).request.memory_limit).toBe(7);
});

test("a cluster that cannot be read is not planned for, and only the answer to the last text counts", async () => {
  const { asked, answer } = server();
  const plan = new PlanState();
  plan.wanted.value = { ...USUAL, cluster: "x" };
  const started = startPlan(plan);
  answer({ error: "the cluster: not a TOML file" }, false);
  expect(await started).toContain("cannot be read");
  expect(plan.cluster.value?.problem).toBe("the cluster: not a TOML file");
  expect([asked, plan.status.value]).toEqual([["POST /api/cluster"], "idle"]);
  const old = plan.takeCluster("old");
  const answerOld = answer;
  plan.wanted.value = { ...plan.wanted.value, cluster: "new" };
  answerOld(INFO);
  await old;
  expect(plan.cluster.value?.info).toBeNull();
  expect(plan.wanted.value.limit).toBe(USUAL.limit);
});

test("limits that differ from device to device have no line in the plot", async () => {
  const { answer } = server();
  const plan = new PlanState();
  const started = plan.start({}, null, UNITS);
  answer({ job: "seven", limits: [76, 38] });
  await started;
  expect(plan.limit.value).toBeNull();
});

test("the front has what no other beats in both", () => {
  const all = [candidate(0, 5, 1, true), candidate(1, 3, 9, false), candidate(2, 4, 2, true), candidate(3, 4, 3, true), candidate(4, 6, 1, true), candidate(5, null, null, false)];
  expect(paretoFront(all).map((each) => each.index)).toEqual([1, 2, 0]);
});

test("candidates are sorted by a column, up and down", () => {
  const all = [{ ...candidate(0, 5, 1, true), name: "b" }, { ...candidate(1, 3, 9, false), name: "c" }, { ...candidate(2, 4, 2, true), name: "a" }];
  const sorted = (column: string | null, down = false): number[] => sortCandidates(all, column, down).map((each) => each.index);
  expect(sorted(null)).toEqual([2, 0, 1]);
  expect(sorted("time")).toEqual([1, 2, 0]);
  expect(sorted("memory", true)).toEqual([1, 2, 0]);
  expect(sorted("schedule")).toEqual([2, 0, 1]);
});

test("the table of candidates is CSV that no program runs", () => {
  const csv = candidatesCsv([{ ...candidate(0, 5, 1, true), name: '=cmd|"x",1' }, { ...candidate(1, null, null, false), reason: "two\nlines" }]);
  const lines = csv.split("\r\n");
  expect(lines[0].split(",").slice(0, 3)).toEqual(["index", "name", "placement"]);
  expect(lines[1]).toContain(`"'=cmd|""x"",1"`);
  expect(csv).toContain('"two\nlines"');
});
