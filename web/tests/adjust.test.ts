import { expect, test } from "vitest";
import { fullCosts, numbersOf, timeView, type Costs, type View } from "../src/core/index.ts";
import { adjusted, excess, isUniform, isUnchanged, meanOf, shared, stageFactors, UNCHANGED } from "../src/state/adjust.ts";
import { sameModel } from "../src/state/loader.ts";
import { gpipe } from "./pipeline.ts";

function makespan(view: View, costs: Costs): number {
  return numbersOf(view, timeView(view, costs), costs).makespan;
}

test("without a change the costs are the view's own", () => {
  const view = gpipe({ ranks: 3, microbatches: 4, costs: { f: [1, 2, 3], latency: 0.5 } });
  expect(adjusted(view, UNCHANGED)).toEqual(view.costs);
  expect(isUnchanged(UNCHANGED)).toBe(true);
});

test.each([
  [2, 1, 1],
  [0.5, 3, 0.25],
  [0, 0, 1],
])("GPipe takes (m + p - 1)(F + I + W) with sliders at %f, %f, %f", (f, i, w) => {
  const view = gpipe({ ranks: 4, microbatches: 6, costs: { f: 1.5, i: 2, w: 0.5 } });
  expect(makespan(view, adjusted(view, { ...UNCHANGED, f, i, w }))).toBeCloseTo((6 + 4 - 1) * (1.5 * f + 2 * i + 0.5 * w), 9);
});

test("each message adds the latency on the way down and up", () => {
  const view = gpipe({ ranks: 4, microbatches: 6, costs: { latency: 0.25 } });
  const costs = adjusted(view, { ...UNCHANGED, latency: 0.75 });
  expect(costs.latency).toBe(0.75);
  expect(makespan(view, costs)).toBeCloseTo(9 * 3 + 2 * 3 * 0.75, 9);
});

test("a stage that is skewed sets the pace", () => {
  const view = gpipe({ ranks: 4, microbatches: 50, costs: {} });
  // The slow rank computes without a pause once it has begun: m times its own work, and the others' once each way.
  expect(makespan(view, adjusted(view, { ...UNCHANGED, skew: { 2: 2 } }))).toBeCloseTo(50 * 3 * 2 + 3 * 3, 9);
});

test("a skew reaches lists, and leaves the other stages alone", () => {
  const view = gpipe({ ranks: 3, microbatches: 2, costs: { f: [1, [2, 3], 4], b: 5 } });
  const costs = adjusted(view, { ...UNCHANGED, f: 2, b: 3, skew: { 1: 0.5 } });
  expect(costs.f).toEqual([2, [2, 3], 8]);
  expect(costs.b).toEqual([15, 7.5, 15]);
});

test("a model cut otherwise has the same work in the mean", () => {
  const skew = { 0: 3, 5: 0.5, 7: 2 };
  const eight = stageFactors(skew, 8, 8)!;
  expect(eight).toEqual([3, 1, 1, 1, 1, 0.5, 1, 2]);
  for (const stages of [1, 2, 4, 5, 16, 3]) {
    const factors = stageFactors(skew, 8, stages)!;
    expect(factors.length).toBe(stages);
    expect(factors.reduce((sum, each) => sum + each, 0) / stages).toBeCloseTo(10.5 / 8, 12);
  }
  expect(stageFactors(skew, 8, 16)!.slice(0, 4)).toEqual([3, 3, 1, 1]);
  expect(stageFactors({}, 8, 8)).toBeNull();
});

test("two schedules of one model: work is divided among the stages of a rank, messages stay as large", () => {
  const first = gpipe({ ranks: 4, microbatches: 4, costs: { f: 2, i: 3, activation: 8, output: 5, latency: 1 } });
  const second = { ...gpipe({ ranks: 8, microbatches: 4 }), ranks: 4 };
  expect(sameModel(first, second)).toMatchObject({ f: 1, i: 1.5, w: 0.5, activation: 4, output: 5, latency: 1 });
  expect(sameModel(first, gpipe({ ranks: 4, microbatches: 4 }))).toBe(first.costs);
  const uneven = gpipe({ ranks: 4, microbatches: 4, costs: { f: [1, 2, 3, 4] } });
  expect(sameModel(uneven, second)).toBe(second.costs);
  expect([isUniform(first.costs), isUniform(uneven.costs)]).toEqual([true, false]);
  expect(shared(fullCosts({ f: [1, 2] }), 0.5).f).toEqual([1, 2]);
});

test("the middle of a cost", () => {
  expect([meanOf(3), meanOf([1, 3]), meanOf([1, [2, 4]])]).toEqual([3, 2, 2]);
});

test("a cost of a spread vocabulary is set where it is one number, and multiplied where it is one per stage", () => {
  const view = gpipe({ ranks: 2, microbatches: 2, costs: { s: [1, 3], t: 0, logits: 2 } });
  expect(adjusted(view, { ...UNCHANGED, s: 2, t: 0.5, skew: { 0: 4 } })).toMatchObject({ s: [2, 6], t: 0.5, broadcast: 0, logits: 2 });
  expect(isUnchanged({ ...UNCHANGED, combine: 0 })).toBe(false);
  expect(excess({ ...UNCHANGED, logits: 1e30 })).toContain("logits is 1e+30");
  expect(isUniform(view.costs)).toBe(false);
});
