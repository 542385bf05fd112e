import { scaleLinear } from "d3-scale";
import type { Paper } from "./colours.ts";
import type { Layout } from "./layout.ts";
import type { Pen } from "./pen.ts";
import { toX, type Scale } from "./span.ts";

export interface Tick {
  x: number;
  text: string;
}

/** Round times, in a unit of so many of the costs', about 90 pixels apart. */
export function ticksOf(scale: Scale, whole: boolean, unit = 1): Tick[] {
  const made = scaleLinear([scale.from / unit, scale.to / unit], [0, scale.width]);
  const count = Math.max(2, Math.floor(scale.width / 90));
  const format = made.tickFormat(count);
  const values = made.ticks(count).filter((value) => !whole || Number.isInteger(value));
  return values.map((value) => ({ x: toX(scale, value * unit), text: whole ? String(value) : format(value) }));
}

export function paintAxis(pen: Pen, layout: Layout, scale: Scale, paper: Paper, title: string, whole: boolean, unit = 1): void {
  pen.rect(0, 0, layout.width, layout.axis, paper.paper);
  pen.text(10, layout.axis / 2, title, { fill: paper.soft, size: 11 });
  for (const tick of ticksOf(scale, whole, unit)) {
    pen.line([tick.x, layout.axis - 5, tick.x, layout.axis], paper.line, 1);
    pen.text(tick.x, layout.axis / 2 - 1, tick.text, { fill: paper.soft, size: 11, align: "center" });
  }
  pen.line([0, layout.axis - 0.5, layout.width, layout.axis - 0.5], paper.line, 1);
}
