import type { Device } from "../core/index.ts";
import type { Shown } from "../state/shown.ts";
import { paintAxis } from "./axis.ts";
import type { Paper } from "./colours.ts";
import { Fills, type ColourBy } from "./fills.ts";
import type { Layout, Row } from "./layout.ts";
import { hostTop, memoryTop, paintMemory, type Limit } from "./memory.ts";
import type { Pen } from "./pen.ts";
import { paintCompute, paintLanes, paintMeasured, type Labels } from "./rows.ts";
import { percent, toX, type Scale } from "./span.ts";
import { findingSpan } from "./target.ts";

/** Everything that a picture is made from. */
export interface Scene {
  panels: Shown[];
  layout: Layout;
  scale: Scale;
  paper: Paper;
  colourBy: ColourBy;
  limit: Limit;
  /** What stands on actions. */
  form: Labels["form"];
  /** Whether figures and memory are drawn too; they take longer than the rest. */
  whole: boolean;
  /** How far the content is scrolled, and how much of it shows, in pixels. */
  scroll: number;
  visible: number;
}

/** Pixels from which on a row has room for a rank and its device. */
const TWO_LINES = 24;
/** Letters that have room beside a row. */
const SHORT = 10;
/** Pixels from which on there is room for the node too, and the letters of one. */
const THREE_LINES = 34;
const LONGEST_NODE = 10;
/** Pixels: how wide the bar of a device's speed is, and how far it stands from the row. */
const SPEED = 3;
const SPEED_APART = 3;
/** Pixels by which a rank's band is higher than its row. */
const BAND = 4;

/** What depends on views and colours alone; kept from picture to picture. */
const fillsOf = new WeakMap<Shown["view"], Map<ColourBy, Fills>>();

export function fills(shown: Shown, by: ColourBy): Fills {
  let known = fillsOf.get(shown.view);
  if (!known) fillsOf.set(shown.view, (known = new Map()));
  let found = known.get(by);
  if (!found) known.set(by, (found = new Fills(shown.view, by)));
  return found;
}

/** The whole picture but what is pointed at. */
export function paintScene(pen: Pen, scene: Scene): void {
  const { layout, paper, scale } = scene;
  pen.rect(0, 0, layout.width, layout.axis + scene.visible, paper.paper);
  pen.clip(0, layout.axis, layout.width, scene.visible, () => {
    shifted(pen, scene, (moved) => paintPanels(moved, scene));
  });
  const grid = scene.panels.some((each) => !each.timed);
  paintAxis(pen, layout, scale, paper, grid ? "step" : axisTitle(scene), grid, grid ? 1 : scene.panels[0]?.unit.size);
}

function axisTitle(scene: Scene): string {
  const unit = scene.panels[0]?.unit.name;
  return unit ? `time, ${unit}` : "time";
}

/** A pen whose content begins below the axis and is scrolled. */
export function shifted(pen: Pen, scene: Scene, body: (pen: Pen) => void): void {
  body(shiftedPen(pen, scene.layout.axis - scene.scroll));
}

function paintPanels(pen: Pen, scene: Scene): void {
  const [top, host] = scene.whole ? [memoryTop(scene.panels, scene.limit), hostTop(scene.panels)] : [0, 0];
  scene.layout.panels.forEach((place, panel) => {
    const shown = scene.panels[panel];
    if (scene.panels.length > 1) paintTitle(pen, scene, panel);
    for (const row of place.rows.filter((each) => isVisible(scene, each))) {
      if (row.rank % 2) paintBand(pen, scene, row);
      paintLabel(pen, scene, row);
      paintSpeed(pen, scene, row);
      if (row.rank > 0) paintNodeEdge(pen, scene, place.rows[row.rank - 1], row);
      pen.clip(scene.scale.left, row.top - 2, scene.scale.width, row.height + 4, () => {
        pen.rect(scene.scale.left, row.compute.top, scene.scale.width, row.compute.height, scene.paper.idle);
        paintCompute(pen, shown, row, scene.scale, fills(shown, scene.colourBy), scene.form);
        paintMeasured(pen, shown, row, scene.scale, scene.paper, scene.form);
        if (shown.timed) paintLanes(pen, shown, row, scene.scale, scene.paper);
        if (scene.whole) paintMemory(pen, shown, row, scene.scale, scene.paper, scene.limit, top, host);
      });
      paintFindings(pen, scene, row);
    }
  });
}

/** Every other rank stands on a band, so that its memory is not taken for that of the next. */
function paintBand(pen: Pen, scene: Scene, row: Row): void {
  pen.rect(0, row.top - BAND, scene.layout.width, row.height + 2 * BAND, scene.paper.band);
}

function isVisible(scene: Scene, row: Row): boolean {
  return row.top + row.height > scene.scroll && row.top < scene.scroll + scene.visible;
}

function paintTitle(pen: Pen, scene: Scene, panel: number): void {
  const { paper, layout } = scene;
  const shown = scene.panels[panel];
  const top = layout.panels[panel].top;
  pen.rect(0, top, layout.width, 22, paper.band);
  pen.text(10, top + 11.5, shown.label, { fill: paper.ink, size: 12, bold: true });
  if (!shown.timed || !scene.whole || layout.width < 560) return;
  const { makespan, bubble, peak } = shown.numbers;
  const said = `makespan ${shown.time(makespan)} · bubble ${percent(bubble)} · peak ${shown.size(peak)}`;
  pen.text(layout.width - 10, top + 11.5, said, { fill: paper.soft, size: 11, align: "right" });
}

function paintLabel(pen: Pen, scene: Scene, row: Row): void {
  const { paper, layout } = scene;
  const size = Math.min(12, Math.max(9, row.compute.height * 0.6));
  const text = layout.gutter < 60 ? `r${row.rank}` : `rank ${row.rank}`;
  const device = scene.panels[row.panel].view.devices?.[row.rank];
  const below = device && layout.gutter >= 60 && row.compute.height >= TWO_LINES ? deviceLabel(device) : "";
  const node = device && below && row.compute.height >= THREE_LINES && nodesOf(scene, row).size > 1 && device.node.length <= LONGEST_NODE ? device.node : "";
  const middle = row.compute.top + row.compute.height / 2 - (node ? 5 : 0);
  pen.text(10, below ? middle - size / 2 : middle, text, { fill: paper.ink, size });
  if (below) pen.text(10, middle + size / 2 + 1, below, { fill: paper.soft, size: 9 });
  if (node) pen.text(10, middle + size / 2 + 12, node.length + 5 <= LONGEST_NODE ? `node ${node}` : node, { fill: paper.soft, size: 9 });
  if (row.measured && row.measured.height >= 9 && layout.gutter >= 60) {
    pen.text(10, row.measured.top + row.measured.height / 2, "measured", { fill: paper.soft, size: 10 });
  }
  for (const name of ["memory", "host"] as const) {
    const strip = row[name];
    if (strip && strip.height >= (name === "host" ? 10 : 14) && layout.gutter >= 60) pen.text(10, strip.top + strip.height / 2, name, { fill: paper.soft, size: 10 });
  }
  if (row.out && row.back && row.out.height >= 5 && layout.gutter >= 60) pen.text(10, row.back.top, "copies", { fill: paper.soft, size: 10 });
}

function nodesOf(scene: Scene, row: Row): Set<string> {
  return new Set(scene.panels[row.panel].view.devices?.map((device) => device.node));
}

/** How fast the rank's device is, as a bar beside its row: as high as the row for the fastest. */
function paintSpeed(pen: Pen, scene: Scene, row: Row): void {
  const rates = scene.panels[row.panel].view.devices?.map((device) => device.rate ?? 0) ?? [];
  const fastest = Math.max(...rates);
  if (!rates.length || rates.some((rate) => rate <= 0) || rates.every((rate) => rate === fastest)) return;
  const { top, height } = row.compute;
  const [x, filled] = [scene.layout.gutter - SPEED_APART - SPEED, Math.max(1, (height * rates[row.rank]) / fastest)];
  pen.rect(x, top, SPEED, height, scene.paper.idle);
  pen.rect(x, top + height - filled, SPEED, filled, scene.paper.soft);
}

/** A line between two ranks whose devices are in different nodes. */
function paintNodeEdge(pen: Pen, scene: Scene, above: Row, row: Row): void {
  const devices = scene.panels[row.panel].view.devices;
  if (!devices || devices[above.rank].node === devices[row.rank].node) return;
  const y = Math.round((above.top + above.height + row.top) / 2) + 0.5;
  pen.line([0, y, scene.layout.width, y], scene.paper.soft, 1);
}

/** A device's name and speed, or the speed alone, or the name alone: the first that has room beside a row. */
export function deviceLabel({ name, speed }: Device): string {
  return [`${name} ×${speed}`.trim(), `×${speed}`, name].find((text) => text && text.length <= SHORT) ?? "";
}

/** A frame around each place at which the verifier found something; dashed if nothing stands there. */
function paintFindings(pen: Pen, scene: Scene, row: Row): void {
  const shown = scene.panels[row.panel];
  for (const finding of shown.view.findings.filter((each) => each.rank === row.rank)) {
    const [from, to] = findingSpan(shown, finding.rank, finding.step);
    const x = Math.max(toX(scene.scale, from), scene.scale.left);
    const end = toX(scene.scale, to);
    if (end < scene.scale.left || x > scene.scale.left + scene.scale.width) continue;
    const { bounds } = shown.view.graph;
    const missing = finding.step >= bounds[row.rank + 1] - bounds[row.rank];
    pen.frame(x, row.compute.top - 1, Math.max(3, end - x), row.compute.height + 2, scene.paper.alarm, 2, missing);
    pen.dot(Math.max(x, scene.scale.left + 4), row.compute.top - 1, 4, scene.paper.alarm, scene.paper.paper);
  }
}

function shiftedPen(pen: Pen, by: number): Pen {
  const moved = (points: number[]): number[] => points.map((value, k) => (k % 2 ? value + by : value));
  return {
    rect: (x, y, width, height, fill, alpha) => pen.rect(x, y + by, width, height, fill, alpha),
    frame: (x, y, width, height, stroke, thickness, dashed) => pen.frame(x, y + by, width, height, stroke, thickness, dashed),
    line: (points, stroke, thickness, dashed) => pen.line(moved(points), stroke, thickness, dashed),
    area: (points, fill) => pen.area(moved(points), fill),
    curve: (from, to, stroke, thickness) => pen.curve([from[0], from[1] + by], [to[0], to[1] + by], stroke, thickness),
    tip: (x, y, fill) => pen.tip(x, y + by, fill),
    dot: (x, y, radius, fill, stroke) => pen.dot(x, y + by, radius, fill, stroke),
    text: (x, y, text, style) => pen.text(x, y + by, text, style),
    clip: (x, y, width, height, body) => pen.clip(x, y + by, width, height, body),
  };
}
