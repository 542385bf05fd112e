import { entryText, unitText } from "../core/text.ts";
import type { Shown } from "../state/shown.ts";
import { lengthDifference } from "../state/differences.ts";
import { blended, TONES, type Paper } from "./colours.ts";
import type { Fills } from "./fills.ts";
import type { Row, Strip } from "./layout.ts";
import type { Pen } from "./pen.ts";
import { toX, type Scale } from "./span.ts";
import { visit, type Lane } from "./visible.ts";

/** Of the size: the width of a digit or letter, near enough to say whether a label fits. */
const CHARACTER = 0.62;

/** The computation of one rank. */
export function paintCompute(pen: Pen, shown: Shown, row: Row, scale: Scale, fills: Fills): void {
  const { at } = shown.view.entries;
  visit(shown.computeLane(row.rank), scale, {
    box: (node, x, width) => paintAction(pen, shown, node, row.compute, x, width, fills),
    small: (node, width) => fills.add(at[node], Math.max(width, 1e-9)),
    column: (x, filled) => pen.rect(x, row.compute.top, 1, row.compute.height, fills.mean(), Math.max(0.2, filled)),
  });
  paintSlots(pen, shown, row, scale);
  paintOptimizer(pen, shown, row, scale);
}

/** The idle slots of a changed order, as empty boxes before the action that they delay. */
function paintSlots(pen: Pen, shown: Shown, row: Row, scale: Scale): void {
  const { slots, graph } = shown.view;
  if (!slots || !shown.timed) return;
  const { top, height } = row.compute;
  const width = (shown.slot * scale.width) / (scale.to - scale.from);
  if (width < 3) return;
  for (let node = graph.bounds[row.rank]; node < graph.bounds[row.rank + 1]; node++) {
    const from = node > graph.bounds[row.rank] ? shown.timing.end[node - 1] : 0;
    for (let k = 0; k < slots[node]; k++) {
      const x = toX(scale, from + k * shown.slot);
      if (x + width > scale.left && x < scale.left + scale.width) pen.frame(x + 1.5, top + 1.5, width - 3, height - 3, TONES.STEP.fill, 1, true);
    }
  }
}

/** One action: a box, or one below the other for what runs together, with as much of its name as fits. */
export function paintAction(pen: Pen, shown: Shown, node: number, strip: Strip, x: number, width: number, fills: Fills): void {
  const { at } = shown.view.entries;
  const parts = at[node + 1] - at[node];
  const height = strip.height / parts;
  const seam = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
  for (let part = 0; part < parts; part++) {
    const entry = at[node] + part;
    const fill = fills.of(entry);
    const top = strip.top + part * height;
    pen.rect(x, top, width - seam, height - (part < parts - 1 ? 0.5 : 0), fill);
    const size = Math.min(LARGEST, Math.floor(height * 0.62));
    if (size < 7 || width < 9) continue;
    const text = labelFor(shown, entry, width - 3, size, width / Math.max(shown.timing.end[node] - shown.timing.start[node], 1e-300));
    if (text) pen.text(x + (width - seam) / 2, top + height / 2 + 0.5, text, { fill: fills.inkOn(fill), size, align: "center" });
  }
}

const LARGEST = 11;

/** What fits the shortest action of a chart with so many pixels per unit of time: all actions are named alike. */
export function labelForm(shown: Shown, unit: number, size = LARGEST): "names" | "microbatches" | "none" {
  const { stages, unitCount, slices } = shown.view;
  const digits = unitText(unitCount - 1, slices).length;
  const room = shown.shortest * unit - 4;
  if ((String(stages - 1).length + 1 + digits) * size * CHARACTER <= room) return "names";
  return digits * size * CHARACTER <= room ? "microbatches" : "none";
}

/** An action's label in the form of its chart; a longer action keeps its microbatch where the shortest has room for none. */
function labelFor(shown: Shown, entry: number, room: number, size: number, unit: number): string {
  const { entries, kinds, slices } = shown.view;
  const isCompute = kinds[entries.kind[entry]].length === 1;
  const text = !isCompute || labelForm(shown, unit, size) === "names" ? entryText(shown.view, entry) : unitText(entries.unit[entry], slices);
  return text.length * size * CHARACTER <= room ? text : "";
}

/** The recorded run of one rank below its prediction: what takes longer in one colour, what takes shorter in the other. */
export function paintMeasured(pen: Pen, shown: Shown, row: Row, scale: Scale, paper: Paper): void {
  const strip = row.measured;
  if (!strip || !shown.beside) return;
  pen.rect(scale.left, strip.top, scale.width, strip.height, paper.idle);
  visit(shown.beside.computeLane(row.rank), scale, {
    box: (node, x, width) => pen.rect(x, strip.top, width > 3 ? width - 0.75 : width, strip.height, differenceFill(shown, node, paper)),
    small: () => undefined,
    column: (x, filled) => pen.rect(x, strip.top, 1, strip.height, paper.soft, Math.max(0.2, filled)),
  });
}

/** Grey as predicted; the more an action differs, the stronger. */
function differenceFill(shown: Shown, node: number, paper: Paper): string {
  const share = lengthDifference(shown, node);
  if (share === 0) return paper.same;
  const strength = Math.min(1, 0.35 + Math.abs(share));
  return blended(paper.same, share > 0 ? paper.late : paper.early, strength);
}

function paintOptimizer(pen: Pen, shown: Shown, row: Row, scale: Scale): void {
  const { start, end } = optimizerSpan(shown, row.rank);
  if (end <= start || end < scale.from || start > scale.to) return;
  const x = toX(scale, start);
  pen.rect(x, row.compute.top, Math.max(1, toX(scale, end) - x), row.compute.height, TONES.STEP.fill);
}

/** The step of a rank's optimizer is the last that it does. */
export function optimizerSpan(shown: Shown, rank: number): { start: number; end: number } {
  const end = shown.finished[rank];
  return { start: end - shown.timing.optimizer[rank], end };
}

/** Messages on the channels that leave a rank; forward and backward ones in the colours of what they carry. */
export function paintLanes(pen: Pen, shown: Shown, row: Row, scale: Scale, paper: Paper): void {
  for (const lane of row.lanes) {
    const fill = channelFill(shown, lane.channel);
    pen.rect(scale.left, lane.top + lane.height - 0.5, scale.width, 0.5, paper.faint);
    paintThin(pen, shown.channelLane(lane.channel), lane, scale, fill);
  }
  if (row.collectives) paintThin(pen, shown.collectiveLane(row.rank), row.collectives, scale, TONES.SHARD.fill);
}

export function channelFill(shown: Shown, channel: number): string {
  return shown.view.channels[channel][2] === "SEND_F" ? TONES.SEND.fill : "#c9a26b";
}

/** Thin boxes of one colour; what takes no time is a tick. */
function paintThin(pen: Pen, lane: Lane, strip: Strip, scale: Scale, fill: string): void {
  visit(lane, scale, {
    box: (_, x, width) => pen.rect(x, strip.top, width > 4 ? width - 0.5 : width, strip.height, fill),
    small: () => undefined,
    column: (x, filled) => pen.rect(x, strip.top, 1, strip.height, fill, Math.max(0.55, filled)),
  });
}
