import { entryText } from "../core/text.ts";
import type { Shown } from "../state/shown.ts";
import { TONES, type Paper } from "./colours.ts";
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
  paintOptimizer(pen, shown, row, scale);
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
    const size = Math.min(11, Math.floor(height * 0.62));
    if (size < 7 || width < 9) continue;
    const text = labelFor(shown, entry, width - 3, size);
    if (text) pen.text(x + (width - seam) / 2, top + height / 2 + 0.5, text, { fill: fills.inkOn(fill), size, align: "center" });
  }
}

/** The whole name where the longest of the view would fit, its microbatch where the longest of those would, or nothing. */
function labelFor(shown: Shown, entry: number, room: number, size: number): string {
  const unit = size * CHARACTER;
  const { stages, microbatches, entries, kinds } = shown.view;
  const digits = String(microbatches - 1).length;
  const kind = kinds[entries.kind[entry]];
  if ((String(stages - 1).length + kind.length + digits) * unit <= room) return entryText(shown.view, entry);
  return digits * unit <= room ? String(entries.microbatch[entry]) : "";
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
