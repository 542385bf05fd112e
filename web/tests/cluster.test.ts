import { expect, test } from "vitest";
import { decodeEdits, defaultCosts, readDocument, toDocument } from "../src/core/index.ts";
import { deviceLabel } from "../src/draw/scene.ts";
import { linkRows, slowLinks } from "../src/state/linkRows.ts";
import { isUniform } from "../src/state/adjust.ts";
import { Editing } from "../src/state/editing.ts";
import { toSvg } from "../src/state/exports.ts";
import { sameModel } from "../src/state/loader.ts";
import { Shown } from "../src/state/shown.ts";
import { gpipe } from "./pipeline.ts";
import { sceneOf } from "./scene.ts";

const NOTHING = { hovered: null, selected: null, path: false };
const DEVICES = [
  { name: "slow", speed: "0.5", rate: 0.5, node: "a" },
  { name: "fast", speed: "1", rate: 1, node: "a" },
  { name: "a device with a long name", speed: "2", rate: 2, node: "b" },
];
const apart = [0, 0] as [number, number];
const COSTS = {
  latency: [[0, 0.1, 9], [0.1, 0, 0.5], [9, 0.5, 0]],
  bandwidth: [[null, null, 9], [4, null, 2], [9, 2, null]],
  contention: "links",
  lanes: [[apart, [0, 0], [1, 1]], [[2, 3], apart, [2, 4]], [[5, 5], [6, 6], apart]],
};

function shownOf(more: Record<string, unknown>, costs: Record<string, unknown> = COSTS): Shown {
  const view = gpipe({ ranks: 3, microbatches: 4, costs, more });
  return Shown.of(view.title, view, view.costs);
}

test("a row of the chart is labelled with its device and speed, as far as there is room", () => {
  const svg = toSvg(sceneOf([shownOf({ devices: DEVICES })], 0, 20), NOTHING);
  for (const text of ["rank 0", "slow ×0.5", "rank 1", "fast ×1", "rank 2", "×2"]) expect(svg).toContain(`>${text}<`);
  expect(svg).not.toContain("long name");
  expect(toSvg(sceneOf([shownOf({ devices: DEVICES })], 0, 20, 500), NOTHING)).not.toContain("slow");
  expect(toSvg(sceneOf([shownOf({})], 0, 20), NOTHING)).not.toContain("×");
});

/** The rectangles of a picture with a fill: x, y, width and height. */
function rects(svg: string, fill: string): number[][] {
  const found = [...svg.matchAll(/<rect ([^>]*)>/g)].map(([, inner]) => Object.fromEntries([...inner.matchAll(/([a-z-]+)="([^"]*)"/g)].map(([, name, value]) => [name, value])));
  return found.filter((each) => each.fill === fill).map((each) => [each.x, each.y, each.width, each.height].map(Number));
}

test("the bar beside a row is as high as the device is fast, and a line stands between nodes", () => {
  const scene = sceneOf([shownOf({ devices: DEVICES })], 0, 20);
  const svg = toSvg(scene, NOTHING);
  const { rows } = scene.layout.panels[0];
  const bars = rects(svg, scene.paper.soft).filter(([x]) => x < scene.layout.gutter);
  expect(bars.map(([, , , height], rank) => height / rows[rank].compute.height)).toEqual([0.25, 0.5, 1]);
  const edges = (picture: string): number[] => [...picture.matchAll(new RegExp(`<polyline points="0 ([\\d.]+) \\S+ \\S+" fill="none" stroke="${scene.paper.soft}"`, "g"))].map(([, y]) => Number(y) - scene.layout.axis);
  const lines = edges(svg);
  expect(lines.length).toBe(1);
  expect(lines[0]).toBeGreaterThanOrEqual(rows[1].top + rows[1].height);
  expect(lines[0]).toBeLessThanOrEqual(rows[2].top);
  const equal = sceneOf([shownOf({ devices: DEVICES.map((device) => ({ ...device, rate: 2, node: "a" })) })], 0, 20);
  expect(rects(toSvg(equal, NOTHING), scene.paper.soft).filter(([x]) => x < scene.layout.gutter)).toEqual([]);
  expect(edges(toSvg(equal, NOTHING))).toEqual([]);
});

test("links on which a message takes twice as long as on the fastest are marked, by their latency and their bandwidth", () => {
  const slow = (costs: Record<string, unknown>): number[] => [...slowLinks(shownOf({}, costs))].sort();
  expect(slow(COSTS)).toEqual([5, 7]);
  expect(slow({ latency: [[0, 1, 1], [1, 0, 1.9], [1, 2, 0]] })).toEqual([7]);
  expect(slow({ latency: 1, output: 8, bandwidth: [[null, 8, 8], [2, null, 8], [8, 8, null]] })).toEqual([3]);
  expect(slow({ latency: 1 })).toEqual([]);
  expect(slow({ latency: [[0, 0, 0], [0, 0, 0], [0, 0, 0]] })).toEqual([]);
});

test("a device without a name is told by its speed, and one of many speeds by its name", () => {
  expect(deviceLabel({ name: "", speed: "0.4", rate: 0.4, node: "" })).toBe("×0.4");
  expect(deviceLabel({ name: "H200", speed: "f 1, i 2, w 0.5", rate: 1, node: "" })).toBe("H200");
  expect(deviceLabel({ name: "a device of many speeds", speed: "f 1, i 2, w 0.5", rate: 1, node: "" })).toBe("");
});

test("the links that messages take are listed with what they share", () => {
  expect(linkRows(shownOf({}))).toEqual([
    { name: "0 → 1", latency: 0.1, bandwidth: null, messages: 4, shared: "", slow: false },
    { name: "1 → 0", latency: 0.1, bandwidth: 4, messages: 4, shared: "1 → 2", slow: false },
    { name: "1 → 2", latency: 0.5, bandwidth: 2, messages: 4, shared: "1 → 0", slow: true },
    { name: "2 → 1", latency: 0.5, bandwidth: 2, messages: 4, shared: "", slow: true },
  ]);
  expect(linkRows(shownOf({}, { latency: 0.5 }))).toEqual([]);
});

test("a schedule is compared under the costs of the devices only if its stages are on the same ranks", () => {
  const first = shownOf({ devices: DEVICES }).view;
  expect(sameModel(first, { ...first, costs: defaultCosts() })).toBe(first.costs);
  const turned = { ...first, copies: [[2, 1, 0]], costs: defaultCosts() };
  expect(sameModel(first, turned)).toBe(turned.costs);
  expect(sameModel({ ...first, devices: null }, turned)).toBe(first.costs);
  expect(isUniform(first.costs)).toBe(false);
});

test("a saved or changed view keeps its devices, and one of another number of ranks is refused", () => {
  const { view } = shownOf({ devices: DEVICES, cluster: "[[devices]]" });
  expect(readDocument(JSON.parse(JSON.stringify(toDocument(view, ""))))).toMatchObject({ devices: DEVICES, cluster: "[[devices]]" });
  const editing = new Editing();
  editing.reset(view);
  editing.apply(...decodeEdits("m0.0.2"));
  expect(editing.shown.value).toMatchObject({ devices: DEVICES, cluster: "[[devices]]" });
  expect(gpipe({ ranks: 3, microbatches: 4 }).devices).toBeNull();
  expect(() => gpipe({ ranks: 2, microbatches: 1, more: { devices: DEVICES } })).toThrow("devices has 3 values, there should be 2");
});
