import { expect, test } from "vitest";
import { chunkFill, DARK, inkOn, LIGHT, microbatchFill, rgb, TONES } from "../src/draw/colours.ts";

function linear(colour: string): number[] {
  return rgb(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
}

function contrast(one: string, other: string): number {
  const light = (colour: string): number => linear(colour).reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// What people see who lack one kind of cone: Viénot, Brettel and Mollon 1999.
const SEEN: Record<string, number[][]> = {
  protanopia: [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
  deuteranopia: [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
};

function apart(one: string, other: string, matrix: number[][]): number {
  const seen = (colour: string): number[] => matrix.map((row) => row.reduce((sum, weight, k) => sum + weight * linear(colour)[k], 0)).map((c) => Math.cbrt(Math.max(c, 0)));
  return Math.hypot(...seen(one).map((c, k) => c - seen(other)[k]));
}

test("labels can be read on every fill", () => {
  const fills = ["F", "B", "I", "W"].flatMap((kind) => [1, 2, 4].flatMap((chunks) => Array.from({ length: chunks }, (_, chunk) => chunkFill(kind, chunk, chunks))));
  const ramp = Array.from({ length: 64 }, (_, microbatch) => microbatchFill(microbatch, 64));
  for (const fill of [...fills, ...ramp, ...Object.values(TONES).map((tone) => tone.fill)]) expect(contrast(fill, inkOn(fill))).toBeGreaterThan(4.5);
});

test.each(Object.keys(SEEN))("kinds stay apart with %s", (name) => {
  const fills = [TONES.F.fill, TONES.B.fill, TONES.I.fill, TONES.W.fill, TONES.S.fill, TONES.T.fill];
  for (const one of fills) for (const other of fills) if (one !== other) expect(apart(one, other, SEEN[name])).toBeGreaterThan(0.1);
});

test("neighbouring microbatches are different colours, also of many", () => {
  for (const count of [2, 8, 33, 256]) {
    for (let k = 0; k + 1 < count; k++) expect(microbatchFill(k, count)).not.toBe(microbatchFill(k + 1, count));
  }
});

test.each([["light", LIGHT], ["dark", DARK]] as const)("text reads on the %s paper", (_, paper) => {
  for (const colour of [paper.ink, paper.soft, paper.alarm, paper.accent, paper.needs]) expect(contrast(colour, paper.paper)).toBeGreaterThan(4.5);
});
