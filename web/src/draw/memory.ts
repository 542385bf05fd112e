import type { Curve } from "../core/types.ts";
import type { Shown } from "../state/shown.ts";
import type { Paper } from "./colours.ts";
import type { Row, Strip } from "./layout.ts";
import type { Pen } from "./pen.ts";
import { toX, type Scale } from "./span.ts";
import { stepsOn } from "./visible.ts";

export type Limit = number | number[] | null;

export function limitOf(limit: Limit, rank: number): number | null {
  return Array.isArray(limit) ? (limit[rank] ?? null) : limit;
}

/** The memory at the top of every strip, so that ranks and panels can be compared; a limit far above the peaks is left out. */
export function memoryTop(panels: Shown[], limit: Limit): number {
  const timed = panels.filter((each) => each.timed);
  const peak = Math.max(0, ...timed.map((each) => each.numbers.peak));
  const limits = Array.isArray(limit) ? limit : limit === null ? [] : [limit];
  const near = Math.max(0, ...limits.filter((each) => each <= 2 * peak));
  return Math.max(peak, near) * 1.08 || 1;
}

/** The host memory at the top of every strip. */
export function hostTop(panels: Shown[]): number {
  const peaks = panels.flatMap((shown) => (shown.timed ? (shown.memory.host ?? []).map((curve) => curve.peak) : []));
  return Math.max(0, ...peaks) * 1.08 || 1;
}

/** The strips of a rank: what it holds over time, what it may hold, and the moment of its peak; and what the host holds of it. */
export function paintMemory(pen: Pen, shown: Shown, row: Row, scale: Scale, paper: Paper, limit: Limit, top: number, host: number): void {
  if (!shown.timed) return;
  if (row.memory) paintCurve(pen, shown, shown.memory.ranks[row.rank], row.memory, scale, paper, limitOf(limit, row.rank), top);
  const curve = shown.memory.host?.[row.rank];
  if (row.host && curve) paintCurve(pen, shown, curve, row.host, scale, paper, null, host);
}

function paintCurve(pen: Pen, shown: Shown, curve: Curve, strip: Strip, scale: Scale, paper: Paper, most: number | null, top: number): void {
  const bottom = strip.top + strip.height;
  const toY = (value: number): number => bottom - (value / top) * strip.height;
  pen.rect(scale.left, strip.top, scale.width, strip.height, paper.idle);
  const { x, value } = stepsOn(curve.times, curve.total, scale);
  const points: number[] = [];
  const end = Math.min(toX(scale, shown.length), scale.left + scale.width);
  x.forEach((here, k) => {
    const y = toY(curve.fixed + value[k]);
    points.push(here, y, k + 1 < x.length ? x[k + 1] : Math.max(end, here), y);
  });
  pen.area([scale.left, bottom, ...points, points[points.length - 2], bottom], paper.memory);
  pen.line(points, paper.memoryLine, 1);
  if (curve.fixed > 0) pen.line([scale.left, toY(curve.fixed), end, toY(curve.fixed)], paper.memoryLine, 0.5, true);
  if (most !== null && most <= top) pen.line([scale.left, toY(most), scale.left + scale.width, toY(most)], paper.alarm, 1, true);
  paintPeak(pen, shown, curve, strip, scale, paper, toY, most);
}

function paintPeak(
  pen: Pen,
  shown: Shown,
  { peak, peakTime }: Curve,
  strip: Strip,
  scale: Scale,
  paper: Paper,
  toY: (value: number) => number,
  limit: number | null,
): void {
  if (peakTime < scale.from || peakTime > scale.to || peak <= 0) return;
  const over = limit !== null && peak > limit;
  const colour = over ? paper.alarm : paper.memoryLine;
  const [x, y] = [toX(scale, peakTime), toY(peak)];
  pen.dot(x, y, 2.5, colour, paper.paper);
  if (strip.height < 20) return;
  const left = x > scale.left + scale.width - 70;
  const text = `${over ? "over: " : ""}${shown.size(peak)}`;
  const at = Math.min(y + 11, strip.top + strip.height - 7);
  pen.text(left ? x - 6 : x + 6, at, text, { fill: over ? paper.alarm : paper.ink, size: 10, align: left ? "right" : "left", bold: over });
}
