import { expect, test } from "vitest";
import { ticksOf } from "../src/draw/axis.ts";
import { figure, percent, signed, sizeText, timeText, toTime, toX } from "../src/draw/span.ts";
import { readSize } from "../src/state/sizes.ts";
import { random } from "./pipeline.ts";

test("pixels and times are each other's reverse", () => {
  const next = random(1);
  for (let k = 0; k < 100; k++) {
    const from = next() * 100;
    const scale = { from, to: from + next() * 10 + 1e-3, left: 68, width: 900 };
    const time = from + next() * (scale.to - from);
    expect(toTime(scale, toX(scale, time))).toBeCloseTo(time, 9);
  }
});

test("ticks are inside, evenly apart and not crowded", () => {
  for (const width of [250, 900, 2000]) {
    for (const to of [0.003, 1, 52.6, 1e6]) {
      const ticks = ticksOf({ from: 0, to, left: 68, width }, false);
      expect(ticks.length).toBeGreaterThanOrEqual(2);
      const steps = ticks.slice(1).map((tick, k) => tick.x - ticks[k].x);
      for (const step of steps) expect(step).toBeCloseTo(steps[0], 6);
      expect(steps[0]).toBeGreaterThan(40);
      expect(ticks[0].x).toBeGreaterThanOrEqual(68);
      expect(ticks[ticks.length - 1].x).toBeLessThanOrEqual(68 + width);
    }
  }
});

test("steps of a grid have whole numbers alone", () => {
  const texts = ticksOf({ from: 0, to: 3.2, left: 0, width: 900 }, true).map((tick) => tick.text);
  expect(texts.every((text) => Number.isInteger(Number(text)))).toBe(true);
  expect(texts.every((text) => /^\d+$/.test(text))).toBe(true);
});

test("a figure is read back to a thousandth", () => {
  const next = random(2);
  for (let k = 0; k < 300; k++) {
    const value = next() * 10 ** Math.floor(next() * 14 - 6);
    expect(Math.abs(Number(figure(value).replace(/,/g, "")) / value - 1)).toBeLessThan(2e-3);
  }
});

test.each([
  [0, "0"],
  [12, "12"],
  [1743, "1,743"],
  [0.25, "0.25"],
  [23.875, "23.88"],
])("the figure of %f is %s", (value, text) => expect(figure(value)).toBe(text));

test("shares and differences", () => {
  expect(percent(0.0879)).toBe("8.79%");
  expect(percent(0.314)).toBe("31.4%");
  expect([signed(2), signed(-2), signed(0)]).toEqual(["+2", "−2", "0"]);
});

test("seconds and bytes are told in the part or the multiple that reads best", () => {
  expect([timeText(2.5, "s"), timeText(0.0025, "s"), timeText(2.5e-6, "s"), timeText(0, "s")]).toEqual(["2.5 s", "2.5 ms", "2.5 µs", "0 s"]);
  expect([timeText(7, ""), timeText(7, "ms")]).toEqual(["7", "7 ms"]);
  expect([sizeText(3 * 2 ** 30, "B"), sizeText(512, "B"), sizeText(3, "")]).toEqual(["3 GiB", "512 B", "3"]);
});

test("sizes are read as Penstock writes them", () => {
  expect([readSize("40GiB"), readSize(" 1.5 KiB "), readSize("2MB"), readSize("8"), readSize("0.5")]).toEqual([40 * 2 ** 30, 1536, 2e6, 8, 0.5]);
  for (const text of ["", "x", "-1", "4 GiBs", "GiB", "1e999", "4gib"]) expect(readSize(text)).toBeUndefined();
});
