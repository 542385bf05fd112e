import { expect, test } from "vitest";
import { AXIS, layOut, partAt, type PanelShape } from "../src/draw/layout.ts";

function shape(ranks: number, channels: number, collectives = false, memory = true): PanelShape {
  return { channelsOf: Array.from({ length: ranks }, (_, rank) => Array.from({ length: channels }, (_, k) => rank * channels + k)), collectives, memory };
}

const CASES: [string, PanelShape[]][] = [
  ["one", [shape(4, 2)]],
  ["two", [shape(8, 4), shape(8, 2, true)]],
  ["many", [shape(256, 4, true)]],
  ["bare", [shape(3, 0, false, false)]],
];

test.each(CASES)("rows and their parts follow each other without touching (%s)", (_, shapes) => {
  const layout = layOut(shapes, 1000, 600);
  let below = 0;
  layout.panels.forEach((panel, index) => {
    expect(panel.top).toBeGreaterThanOrEqual(below);
    expect(panel.rows.map((row) => row.rank)).toEqual(shapes[index].channelsOf.map((_, rank) => rank));
    for (const row of panel.rows) {
      expect(row.top).toBeGreaterThanOrEqual(below);
      const parts = [row.compute, ...row.lanes, ...(row.collectives ? [row.collectives] : []), ...(row.memory ? [row.memory] : [])];
      let at = row.top;
      for (const part of parts) {
        expect(part.top).toBeGreaterThanOrEqual(at);
        at = part.top + part.height;
      }
      expect(at).toBeLessThanOrEqual(row.top + row.height);
      below = row.top + row.height + 1;
    }
    expect(panel.top + panel.height).toBeGreaterThanOrEqual(below - 1);
  });
  expect(layout.height).toBeGreaterThanOrEqual(below - 1);
});

test("what fits the room is shown in it, and what cannot keeps a height that can be read", () => {
  for (const ranks of [2, 4, 8, 12]) expect(layOut([shape(ranks, 2)], 1000, 700).height + AXIS).toBeLessThanOrEqual(700);
  const many = layOut([shape(256, 2)], 1000, 700);
  expect(many.height).toBeGreaterThan(700);
  expect(Math.min(...many.panels[0].rows.map((row) => row.compute.height))).toBeGreaterThanOrEqual(9);
});

test("fewer ranks have rows at least as high", () => {
  const heights = [2, 4, 8, 16, 32].map((ranks) => layOut([shape(ranks, 2)], 1000, 700).panels[0].rows[0].compute.height);
  expect([...heights].sort((one, other) => other - one)).toEqual(heights);
});

test.each(CASES)("each part is found where it stands (%s)", (_, shapes) => {
  const layout = layOut(shapes, 1000, 600);
  for (const panel of layout.panels) {
    for (const row of panel.rows) {
      const middle = (part: { top: number; height: number }): number => part.top + part.height / 2;
      expect(partAt(layout, middle(row.compute))).toEqual({ row, part: { what: "compute" } });
      for (const lane of row.lanes) expect(partAt(layout, middle(lane))?.part).toEqual({ what: "channel", channel: lane.channel });
      if (row.collectives) expect(partAt(layout, middle(row.collectives))?.part).toEqual({ what: "collectives" });
      if (row.memory) expect(partAt(layout, middle(row.memory))?.part).toEqual({ what: "memory" });
      expect(partAt(layout, row.top + row.height + 3)?.row).not.toBe(row);
    }
  }
});

test("a narrow page has less room beside the rows", () => {
  expect(layOut([shape(4, 2)], 390, 600).gutter).toBeLessThan(layOut([shape(4, 2)], 1000, 600).gutter);
});
