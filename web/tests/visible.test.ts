import { describe, expect, test } from "vitest";
import type { Scale } from "../src/draw/span.ts";
import { boxAt, firstEndingAfter, lastAt, stepsOn, visit, type Lane } from "../src/draw/visible.ts";
import { random } from "./pipeline.ts";

function laneOf(seed: number, count: number, longest: number): Lane {
  const next = random(seed);
  const start = new Float64Array(count);
  const end = new Float64Array(count);
  let clock = 0;
  for (let k = 0; k < count; k++) {
    start[k] = clock += next() < 0.3 ? next() * longest : 0;
    end[k] = clock += next() < 0.1 ? 0 : next() * longest;
  }
  return { order: Int32Array.from({ length: count }, (_, k) => k), start, end };
}

interface Seen {
  boxes: { index: number; x: number; width: number }[];
  small: number[];
  columns: { x: number; filled: number; of: number[] }[];
}

function seen(lane: Lane, scale: Scale): Seen {
  const found: Seen = { boxes: [], small: [], columns: [] };
  let waiting: number[] = [];
  visit(lane, scale, {
    box: (index, x, width) => found.boxes.push({ index, x, width }),
    small: (index) => (waiting.push(index), found.small.push(index)),
    column: (x, filled) => (found.columns.push({ x, filled, of: waiting }), (waiting = [])),
  });
  expect(waiting).toEqual([]);
  return found;
}

describe.each([1, 2, 3, 4, 5, 6])("a lane (%i)", (seed) => {
  const lane = laneOf(seed, 400, 2 ** (seed - 3));
  const length = lane.end[399];
  const spans: [number, number][] = [[0, length], [length * 0.2, length * 0.9], [length * 0.5, length * 0.501]];

  test.each(spans)("every box on screen is visited once, and none beside it (%f to %f)", (from, to) => {
    const scale = { from, to, left: 68, width: 900 };
    const unit = scale.width / (to - from);
    const found = seen(lane, scale);
    const wanted = [...lane.order].filter((k) => lane.end[k] > from && lane.start[k] < to);
    expect([...found.boxes.map(({ index }) => index), ...found.small].sort((one, other) => one - other)).toEqual(wanted);
    for (const { index, x, width } of found.boxes) {
      expect(width).toBeGreaterThanOrEqual(1);
      expect(x).toBeCloseTo(68 + (lane.start[index] - from) * unit, 6);
      expect(width).toBeCloseTo((lane.end[index] - lane.start[index]) * unit, 6);
    }
  });

  test.each(spans)("a column of pixels is merged from what begins in it (%f to %f)", (from, to) => {
    const scale = { from, to, left: 68, width: 900 };
    const unit = scale.width / (to - from);
    for (const { x, filled, of } of seen(lane, scale).columns) {
      const sum = of.reduce((all, k) => all + (lane.end[k] - lane.start[k]) * unit, 0);
      expect(filled).toBeCloseTo(Math.min(1, sum), 6);
      for (const k of of) expect(Math.floor(68 + (lane.start[k] - from) * unit)).toBe(x);
    }
  });

  test("the box at a time is found as by looking at all", () => {
    const next = random(seed + 100);
    for (let k = 0; k < 200; k++) {
      const time = next() * length * 1.02;
      const wanted = [...lane.order].find((each) => lane.start[each] <= time && time < lane.end[each]) ?? -1;
      const got = boxAt(lane, time);
      if (wanted >= 0) expect(got).toBe(wanted);
      else if (got >= 0) expect([lane.start[got], lane.end[got]]).toContain(time);
      expect(firstEndingAfter(lane, time)).toBe([...lane.end].filter((end) => end <= time).length);
    }
  });
});

test("beside a thin box the pointer still finds the nearest", () => {
  const lane: Lane = { order: Int32Array.of(0, 1), start: Float64Array.of(1, 5), end: Float64Array.of(1, 5.1) };
  expect(boxAt(lane, 1.3, 0.5)).toBe(0);
  expect(boxAt(lane, 4.8, 0.5)).toBe(1);
  expect(boxAt(lane, 3, 0.5)).toBe(-1);
});

test.each([1, 2, 3])("a step curve shows the highest value of each column of pixels (%i)", (seed) => {
  const next = random(seed);
  const times = Float64Array.from({ length: 5000 }, () => next() * 100).sort();
  const values = Float64Array.from({ length: 5000 }, () => next());
  const scale = { from: 20, to: 70, left: 10, width: 200 };
  const { x, value } = stepsOn(times, values, scale);
  expect(x.length).toBeLessThanOrEqual(2 * scale.width + 3);
  expect([...x].sort((one, other) => one - other)).toEqual(x);
  const before = values[lastAt(times, 20)];
  const inside = [...times].map((time, k) => ({ time, k })).filter(({ time }) => time > 20 && time <= 70);
  expect(Math.max(...value)).toBe(Math.max(before, ...inside.map(({ k }) => values[k])));
});

test("a step curve with few changes is exact", () => {
  const { x, value } = stepsOn(Float64Array.of(0, 2, 5), Float64Array.of(1, 3, 2), { from: 0, to: 10, left: 0, width: 100 });
  expect(x).toEqual([0, 20, 50]);
  expect(value).toEqual([1, 3, 2]);
});
