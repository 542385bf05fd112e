import { isCompute, isJoin, isWait, OFFLOAD, RELOAD } from "../core/kinds.ts";
import { entryText, unitText } from "../core/text.ts";
import type { Shown } from "../state/shown.ts";
import { slowLinks } from "../state/linkRows.ts";
import { lengthDifference } from "../state/differences.ts";
import { blended, inkOn, meetingFill, TONES, type Paper } from "./colours.ts";
import type { Fills } from "./fills.ts";
import type { Layout, Row, Strip } from "./layout.ts";
import type { Pen } from "./pen.ts";
import { toX, type Scale } from "./span.ts";
import { visit, type Lane } from "./visible.ts";

/** Of the size: the width of a digit or letter, near enough to say whether a label fits. */
const CHARACTER = 0.62;
/** The width of a kind's letter in digits: a W is the widest. */
const LETTER = 1.6;
const LARGEST = 11;
/** The smallest size of a whole name, and of a number. */
const LEAST_NAME = 10;
const LEAST = 7;

/** What stands on the actions of a chart, all of them alike: whole names, microbatches or nothing; and in which size. */
export interface Labels {
  form: "names" | "microbatches" | "none";
  size: number;
}

/** What fits the shorter actions of a panel with so many pixels per unit of time and so high a lane; `most` is what the whole chart has room for. */
export function labelsOf(shown: Shown, pixels: number, height: number, most: Labels["form"]): Labels {
  const { stages, unitCount, slices } = shown.view;
  const digits = unitText(unitCount - 1, slices).length;
  const highest = Math.min(LARGEST, Math.floor((height / shown.structure.parts) * 0.62));
  const fitting = (characters: number, room: number): number => Math.min(highest, Math.floor(room / (characters * CHARACTER)));
  const room = roomIn(shown.short * pixels);
  const named = fitting(String(stages - 1).length + LETTER + digits, room - 2);
  if (most === "names" && named >= LEAST_NAME) return { form: "names", size: named };
  const size = fitting(digits, room);
  return size >= LEAST ? { form: "microbatches", size } : { form: "none", size };
}

/** What stands on the actions of all panels of a chart: whole names only if all of them have room for these. */
export function chartForm(panels: Shown[], layout: Layout, scale: Scale): Labels["form"] {
  const isNamed = (shown: Shown, panel: number): boolean => labelsOf(shown, pixelsOf(scale), layout.panels[panel].rows[0]?.compute.height ?? 0, "names").form === "names";
  return panels.every(isNamed) ? "names" : "microbatches";
}

/** The room for text in a box. */
function roomIn(width: number): number {
  return width - Math.min(2, 0.15 * width);
}

/** The pixels of a unit of time. */
export function pixelsOf(scale: Scale): number {
  return scale.width / (scale.to - scale.from);
}

/** The computation of one rank. */
export function paintCompute(pen: Pen, shown: Shown, row: Row, scale: Scale, fills: Fills, form: Labels["form"]): void {
  const { at } = shown.view.entries;
  const labels = labelsOf(shown, pixelsOf(scale), row.compute.height, form);
  visit(shown.computeLane(row.rank), scale, {
    box: (node, x, width) => paintAction(pen, shown, node, row.compute, x, width, fills, labels),
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

/** One action: a box, or one below the other for what runs together, with its label if that fits. */
export function paintAction(pen: Pen, shown: Shown, node: number, strip: Strip, x: number, width: number, fills: Fills, labels: Labels): void {
  const { at } = shown.view.entries;
  const parts = at[node + 1] - at[node];
  const height = strip.height / parts;
  const seam = width > 5 ? 1 : width > 2.5 ? 0.5 : 0;
  for (let part = 0; part < parts; part++) {
    const entry = at[node] + part;
    const fill = fills.of(entry);
    const top = strip.top + part * height;
    pen.rect(x, top, width - seam, height - (part < parts - 1 ? 0.5 : 0), fill);
    const text = labelFor(shown, entry, width, labels);
    if (text) pen.text(x + (width - seam) / 2, top + height / 2 + 0.5, text, { fill: fills.inkOn(fill), size: labels.size, align: "center" });
  }
}

/** An entry's label in the form of its chart; empty if it does not fit. */
function labelFor(shown: Shown, entry: number, width: number, { form, size }: Labels): string {
  if (form === "none") return "";
  const { entries, slices } = shown.view;
  const short = form === "microbatches" && isCompute(entries.kind[entry]);
  const text = short ? unitText(entries.unit[entry], slices) : entryText(shown.view, entry);
  return text.length * size * CHARACTER <= roomIn(width) ? text : "";
}

/** The recorded run of one rank below its prediction: what takes longer in one colour, what takes shorter in the other. */
export function paintMeasured(pen: Pen, shown: Shown, row: Row, scale: Scale, paper: Paper, form: Labels["form"]): void {
  const strip = row.measured;
  if (!strip || !shown.beside) return;
  const labels = labelsOf(shown.beside, pixelsOf(scale), strip.height, form);
  pen.rect(scale.left, strip.top, scale.width, strip.height, paper.idle);
  visit(shown.beside.computeLane(row.rank), scale, {
    box: (node, x, width) => paintMeasuredAction(pen, shown, node, strip, x, width, paper, labels),
    small: () => undefined,
    column: (x, filled) => pen.rect(x, strip.top, 1, strip.height, paper.soft, Math.max(0.2, filled)),
  });
}

/** One action of a recorded run. */
export function paintMeasuredAction(pen: Pen, shown: Shown, node: number, strip: Strip, x: number, width: number, paper: Paper, labels: Labels): void {
  const { at } = shown.view.entries;
  const fill = differenceFill(shown, node, paper);
  const seam = width > 3 ? 0.75 : 0;
  pen.rect(x, strip.top, width - seam, strip.height, fill);
  const parts = Array.from({ length: at[node + 1] - at[node] }, (_, part) => labelFor(shown, at[node] + part, width, labels));
  const height = strip.height / parts.length;
  parts.forEach((text, part) => {
    if (text) pen.text(x + (width - seam) / 2, strip.top + (part + 0.5) * height + 0.5, text, { fill: inkOn(fill), size: labels.size, align: "center" });
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

/** What runs beside the computation: waits, messages on the channels that leave the rank, collectives and copies. */
export function paintLanes(pen: Pen, shown: Shown, row: Row, scale: Scale, paper: Paper): void {
  for (const lane of row.lanes) {
    const fill = channelFill(shown, lane.channel);
    const [from, to] = shown.view.channels[lane.channel];
    const slow = slowLinks(shown).has(from * shown.view.ranks + to);
    pen.rect(scale.left, lane.top + lane.height - (slow ? 1 : 0.5), scale.width, slow ? 1 : 0.5, slow ? paper.late : paper.faint);
    paintThin(pen, shown.channelLane(lane.channel), lane, scale, fill);
  }
  if (row.waits) paintThin(pen, shown.waitLane(row.rank), row.waits, scale, paper.soft);
  if (row.collectives) paintThin(pen, shown.besideLane("collectives", row.rank), row.collectives, scale, (node) => besideFill(shown, node, paper));
  if (row.out) paintThin(pen, shown.besideLane("out", row.rank), row.out, scale, TONES.OUT.fill);
  if (row.back) paintThin(pen, shown.besideLane("back", row.rank), row.back, scale, TONES.BACK.fill);
}

/** The colour of what a node starts beside the computation, or of the wait that it is. */
export function besideFill(shown: Shown, node: number, paper: Paper): string {
  const kind = shown.view.entries.kind[shown.view.entries.at[node]];
  if (isWait(kind)) return paper.soft;
  if (isJoin(kind)) return meetingFill(shown.view.kinds[kind]);
  return kind === OFFLOAD ? TONES.OUT.fill : kind === RELOAD ? TONES.BACK.fill : TONES.SHARD.fill;
}

export function channelFill(shown: Shown, channel: number): string {
  return shown.view.channels[channel][2] === "SEND_F" ? TONES.SEND.fill : TONES.GRADIENT.fill;
}

/** Thin boxes of one colour, or of one each; what takes no time is a tick. */
function paintThin(pen: Pen, lane: Lane, strip: Strip, scale: Scale, fill: string | ((item: number) => string)): void {
  const fillOf = typeof fill === "string" ? () => fill : fill;
  let latest = fillOf(lane.order[0]);
  visit(lane, scale, {
    box: (item, x, width) => pen.rect(x, strip.top, width > 4 ? width - 0.5 : width, strip.height, fillOf(item)),
    small: (item) => (latest = fillOf(item)),
    column: (x, filled) => pen.rect(x, strip.top, 1, strip.height, latest, Math.max(0.55, filled)),
  });
}
