import { afterEach, expect, test, vi } from "vitest";
import { requestOf } from "../src/parts/PlanForm.tsx";
import { plotted, sizeTicks } from "../src/parts/Tradeoff.tsx";
import { PlanState, SHAPE, transformerOf } from "../src/state/plan.ts";
import type { Candidate } from "../src/state/api.ts";

const WANTED = { model: "transformer" as const, shape: SHAPE, profile: "", ranks: "8", microbatches: "32", limit: "80GiB", seconds: "10" };

function candidate(index: number, makespan: number | null, memory: number | null, fits: boolean): Candidate {
  return { index, name: `c${index}`, makespan, memory, fits };
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
  expect(plotted(plan.candidates.value).map((each) => each.index)).toEqual([0, 1, 2]);
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
  answer({ job: "seven" });
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
