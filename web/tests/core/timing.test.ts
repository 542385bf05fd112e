import { expect, test } from "vitest";
import * as core from "../../src/core/index.ts";
import { RankHeap } from "../../src/core/heap.ts";
import { pairwiseSum } from "../../src/core/sums.ts";
import { two } from "./two.ts";

const view = core.readDocument(two());
const costs = core.fullCosts({ f: 2, i: 1, w: 3, latency: 0.5, output: 8, bandwidth: 16, activation: 3, optimizer: [1, 0] });
// 0F0 from 0 to 2, its message takes 0.5 + 8 / 16 = 1; 1F0 from 3 to 5, 1B0 to 9, the gradient takes 1; 0B0 from 10 to 14.
const timing = core.timeView(view, costs);

test("times follow by hand", () => {
  expect([...timing.start]).toEqual([0, 10, 3, 5]);
  expect([...timing.end]).toEqual([2, 14, 5, 9]);
  expect([...timing.depart, ...timing.arrive]).toEqual([2, 9, 3, 10]);
});

test.each(["pair", "duplex", "rank"] as const)("with nothing to share, links of a %s time the same", (contention) => {
  const shared = core.timeView(view, { ...costs, contention });
  expect([shared.start, shared.end, shared.arrive]).toEqual([timing.start, timing.end, timing.arrive]);
});

test("figures follow by hand", () => {
  const numbers = core.numbersOf(view, timing, costs);
  expect(numbers).toMatchObject({ makespan: 15, bubble: (30 - 13) / 30, spanBubble: (15 - 7) / 15, messages: 2, bytes: 16, busy: [7, 6] });
  expect(numbers.peaks).toEqual([3 + 8, 3 + 8]);
  expect(numbers.idle).toEqual({ fill: 3, waiting: 7, communication: 1, memory: 0, drain: 6, overhead: 0, slot: 0 });
});

test("idle times say why", () => {
  expect(core.gapsOf(view, timing, 0).map((gap) => [gap.start, gap.end, core.gapText(gap)])).toEqual([
    [2, 9, "waits for 1B0 on rank 1"],
    [9, 10, "waits for the message of 1B0 from rank 1"],
  ]);
  expect(core.gapsOf(view, timing, 1).map((gap) => [gap.start, gap.end, core.gapText(gap)])).toEqual([
    [0, 3, "the pipeline fills"],
    [9, 15, "the pipeline drains"],
  ]);
});

test("the critical path has no pause", () => {
  const path = core.criticalPath(view, timing, view.costs);
  expect(path.map((step) => step.action ?? step.what)).toEqual(["0F0", "0F0", "1F0", "1B0", "1B0", "0B0", "optimizer"]);
  path.slice(1).forEach((step, k) => expect(step.start).toBe(path[k].end));
});

test("needs and what they unblock point at each other", () => {
  expect(core.needsOf(view, 1)).toEqual([
    { node: 0, message: -1 },
    { node: 3, message: 1 },
  ]);
  expect(core.unblocksOf(view, 0)).toEqual([
    { node: 1, message: -1 },
    { node: 2, message: 0 },
  ]);
});

test("memory rises with F and falls with B", () => {
  const [first] = core.memoryOf(view, timing, costs).ranks;
  expect([...first.times]).toEqual([0, 10, 14, 14]);
  expect([...first.held.activations]).toEqual([3, 3, 0, 0]);
  expect([first.peak, first.peakTime]).toEqual([11, 10]);
});

test("the grid leaves out what is idle", () => {
  expect(core.toCsv(view)).toBe("0F0,,,0B0\r\n,1F0,1B0\r\n");
});

test("an order that never ends is told", () => {
  // 0F0 waits for the gradient that 1B0 makes of it.
  const graph = { ...(two().graph as object), need_at: [0, 1, 1, 2, 2] };
  expect(() => core.timeView(core.readDocument(two({ graph })), costs)).toThrow("rank 0 never gets to its end");
});

test("costs of the wrong length are refused", () => {
  expect(() => core.timeView(view, { ...costs, f: [1, 2, 3] })).toThrow("f has 3 values for 2 stages");
  expect(() => core.timeView(view, { ...costs, w: [[1, 2], 1] })).toThrow("w[0] has 2 values for 1 microbatches");
});

test("ranks come by time, then by number", () => {
  const now = Float64Array.from({ length: 60 }, (_, k) => (k * 37) % 11);
  const heap = new RankHeap(now);
  now.forEach((_, rank) => heap.push(rank));
  const popped = Array.from(now, () => heap.pop());
  expect(popped).toEqual([...popped].sort((one, other) => now[one] - now[other] || one - other));
});

test("every number is added once", () => {
  for (const count of [1, 7, 8, 9, 127, 128, 129, 1000, 4099]) {
    expect(pairwiseSum(Array.from({ length: count }, (_, k) => k))).toBe((count * (count - 1)) / 2);
  }
});
