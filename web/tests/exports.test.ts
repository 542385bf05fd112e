import { expect, test } from "vitest";
import { CanvasPen, escaped } from "../src/draw/pen.ts";
import { paintScene } from "../src/draw/scene.ts";
import { paintOverlay } from "../src/draw/overlay.ts";
import { TONES } from "../src/draw/colours.ts";
import { fileName, textOf, toSvg, wholeScene } from "../src/state/exports.ts";
import { Shown } from "../src/state/shown.ts";
import { two } from "./core/two.ts";
import * as core from "../src/core/index.ts";
import { readDocument } from "../src/core/index.ts";
import { blended, LIGHT } from "../src/draw/colours.ts";
import { boxOf } from "../src/draw/target.ts";
import { gpipe } from "./pipeline.ts";
import { sceneOf } from "./scene.ts";

const NOTHING = { hovered: null, selected: null, path: false };
const view = gpipe({ ranks: 3, microbatches: 4, costs: { latency: 0.5, activation: 2 }, more: { memory_limit: 6, title: 'a <b> & "c"' } });
const shown = Shown.of(view.title, view, view.costs);

function count(text: string, what: string | RegExp): number {
  return text.split(what).length - 1;
}

test("an SVG holds every action in its colour, every message, every rank and the title", () => {
  const svg = toSvg(sceneOf([shown], 0, shown.length), NOTHING);
  expect(count(svg, `fill="${TONES.F.fill}"`)).toBe(3 * 4);
  expect(count(svg, `fill="${TONES.B.fill}"`)).toBe(3 * 4);
  expect(count(svg, `fill="${TONES.SEND.fill}"`)).toBe(2 * 4);
  for (const rank of [0, 1, 2]) expect(svg).toContain(`>rank ${rank}<`);
  for (const name of ["0F0", "2B3", "1F2"]) expect(svg).toContain(`>${name}<`);
  expect(svg).toContain("<title>a &#60;b&#62; &#38; &#34;c&#34;</title>");
});

test("an SVG is well formed: every element that is opened is closed", () => {
  const svg = toSvg({ ...sceneOf([shown, shown], 0, shown.length), limit: 6 }, { ...NOTHING, path: true, selected: { what: "action", panel: 0, index: 5 } });
  const open: string[] = [];
  for (const [, end, name, attributes, closed] of svg.matchAll(/<(\/?)([a-zA-Z]+)((?:\s[a-z-A-Z]+="[^"<]*")*)\s*(\/?)>/g)) {
    expect(attributes).not.toMatch(/NaN|undefined|Infinity/);
    if (end) expect(open.pop()).toBe(name);
    else if (!closed) open.push(name);
  }
  expect(open).toEqual([]);
  expect(svg.replace(/<(\/?)([a-zA-Z]+)((?:\s[a-z-A-Z]+="[^"<]*")*)\s*(\/?)>/g, "")).not.toMatch(/[<]/);
});

test("an SVG shows the part of the axis that is on screen, and all rows however the page is scrolled", () => {
  const scene = { ...sceneOf([shown], 0, 3.9), scroll: 200, visible: 50 };
  expect(count(toSvg(scene, NOTHING), `fill="${TONES.B.fill}"`)).toBe(0);
  expect(toSvg(scene, NOTHING)).toContain(">rank 2<");
  expect(wholeScene(scene)).toMatchObject({ scroll: 0, visible: scene.layout.height });
});

test("the same picture goes to a canvas: as many boxes of each colour", () => {
  const fills: string[] = [];
  const ignored = (): void => undefined;
  const context = new Proxy({ fillStyle: "", fillRect: () => fills.push(context.fillStyle) } as Record<string, unknown> & { fillStyle: string }, {
    get: (target, name: string) => (name in target ? target[name] : ignored),
  });
  const scene = wholeScene(sceneOf([shown], 0, shown.length));
  const pen = new CanvasPen(context as unknown as CanvasRenderingContext2D);
  paintScene(pen, scene);
  paintOverlay(pen, scene, NOTHING);
  expect(fills.filter((fill) => fill === TONES.F.fill).length).toBe(12);
  expect(fills.filter((fill) => fill === TONES.SEND.fill).length).toBe(8);
});

test("a selection is drawn with what it needs and unblocks", () => {
  const scene = sceneOf([shown], 0, shown.length);
  const svg = toSvg(scene, { ...NOTHING, selected: { what: "action", panel: 0, index: 8 } });
  // Node 8 is 1F0: it needs 0F0 by message, and unblocks 2F0 by message and 1B0 on its rank.
  expect(count(svg, /<path [^>]*stroke="#9c2f74"/)).toBe(1);
  expect(count(svg, /<path [^>]*stroke="#0b5cad"/)).toBe(1);
  expect(count(svg, /<rect [^>]*stroke="#9c2f74"/)).toBe(1);
  expect(count(svg, /<rect [^>]*stroke="#0b5cad"/)).toBe(2);
});

test("findings frame their place on a grid", () => {
  const finding = { rule: "order", severity: "wrong", rank: 1, step: 0, action: "1F0", message: "no", remedy: "do" };
  const changes = { timed: false, graph: { bounds: [0, 2, 4] }, local: null, messages: null, channels: [] };
  const grid = readDocument(two({ ...changes, findings: [finding, { ...finding, step: 5 }] }));
  const made = Shown.of(grid.title, grid, grid.costs);
  const svg = toSvg(sceneOf([made], 0, 8), NOTHING);
  expect(count(svg, /<rect [^>]*fill="none"[^>]*stroke="#b3261e"/)).toBe(2);
  expect(count(svg, /stroke="#b3261e"[^>]*stroke-dasharray/)).toBe(1);
});

test("text forms: one row per rank, one slice per action, the times themselves", () => {
  const rows = textOf(shown, "csv").trim().split("\n");
  expect(rows.length).toBe(3);
  for (const row of rows) expect(row.split(",").filter((cell) => cell.trim()).length).toBe(2 * 4);
  const trace = JSON.parse(textOf(shown, "trace")) as { traceEvents: { ph: string; name: string }[] };
  expect(trace.traceEvents.filter((event) => event.ph === "X" && /^\dF\d$/.test(event.name)).length).toBeGreaterThanOrEqual(12);
  const timeline = JSON.parse(textOf(shown, "json")) as { makespan: number; start: number[]; type: string };
  expect(timeline).toMatchObject({ type: "timeline", makespan: (4 + 3 - 1) * 3 + 4 * 0.5 });
  expect(timeline.start).toEqual([...shown.timing.start]);
});

test.each([
  ["zbv, 8 ranks, 32 microbatches", "csv", "zbv-8-ranks-32-microbatches.csv"],
  ["interleaved-1f1b{chunks=4}", "trace", "interleaved-1f1b-chunks-4.trace.json"],
  ["../../etc/passwd", "svg", "..-..-etc-passwd.svg"],
  ["…", "png", "penstock.png"],
] as const)("%s as %s is named %s", (title, format, name) => expect(fileName(title, format)).toBe(name));

test("text is escaped", () => expect(escaped(`<a href="x">'&`)).not.toMatch(/[<>"']/));

test.each([60, 90, 130, 200, 330, 600, 1200, 2400])("at %i pixels all actions of a chart are named alike, or none", (width) => {
  for (const microbatches of [4, 40]) {
    const made = Shown.of("gpipe", gpipe({ ranks: 3, microbatches, costs: { f: 1, i: 1.5, w: 1.5 } }), core.fullCosts({ f: 1, i: 1.5, w: 1.5 }));
    const labels = [...toSvg(sceneOf([made], 0, made.length, width + 80), NOTHING).matchAll(/fill="#(?:000000|ffffff)" font-size="\d+" text-anchor="middle">([^<]*)<\/text>/g)].map(([, text]) => text);
    const names = labels.filter((text) => /^\d+[FB]\d+$/.test(text)).length;
    const numbers = labels.filter((text) => /^\d+$/.test(text)).length;
    expect([[0, 0], [made.view.nodes, 0], [0, made.view.nodes]]).toContainEqual([names, numbers]);
    if (width > 1000 && microbatches === 4) expect(names).toBeGreaterThan(0);
  }
});

test("pictures of a drag, of a cycle, of a recorded run and of a moment are well formed", () => {
  const order = core.orderOf(view);
  const broken = core.checkedView(view, core.applyEdits(order, core.decodeEdits("m0.4.0"), view.table.edges));
  const stuck = Shown.of("stuck", broken, broken.costs);
  const run = new Shown("measured", view, view.costs, { ...shown.timing, end: shown.timing.end.map((end) => end + 0.3), source: "measured" });
  const beside = Shown.of("predicted", view, view.costs);
  beside.beside = run;
  const slotted = core.checkedView(view, core.applyEdits(order, core.decodeEdits("i0.2_i1.0"), view.table.edges));
  const ghost = { node: 3, view, box: boxOf(sceneOf([shown], 0, shown.length), { what: "action", panel: 0, index: 3 }) };
  const pictures = [
    toSvg(sceneOf([stuck], 0, stuck.length), { ...NOTHING, selected: { what: "finding", panel: 0, index: 0 } }),
    toSvg(sceneOf([stuck], 0, stuck.length), NOTHING),
    toSvg(sceneOf([shown], 0, shown.length), { ...NOTHING, drag: { ghost, broken: [[3, 8], [9, 1]] } }),
    toSvg(sceneOf([beside], 0, run.length), { ...NOTHING, moment: 5.2, selected: { what: "measured", panel: 0, index: 4 } }),
    toSvg(sceneOf([Shown.of("slots", slotted, slotted.costs)], 0, 20), NOTHING),
  ];
  for (const svg of pictures) expect(svg).not.toMatch(/NaN|undefined|Infinity/);
  expect(pictures[0]).toMatch(/>1<\/text>/);
  // Each action takes 0.3 longer: of a forward of 1 that is a larger share than of a backward of 2.
  expect(count(pictures[3], `fill="${blended(LIGHT.same, LIGHT.late, 0.65)}"`)).toBe(3 * 4);
  expect(count(pictures[3], `fill="${blended(LIGHT.same, LIGHT.late, 0.5)}"`)).toBe(3 * 4 + 1); // the selected one again, over the veil
  expect(pictures[4]).toContain("stroke-dasharray");
});
