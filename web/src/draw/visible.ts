import type { Scale } from "./span.ts";

/** Boxes one after the other on a line: `order` names them in the order of their times, which do not overlap. */
export interface Lane {
  order: Int32Array;
  start: Float64Array;
  end: Float64Array;
}

export interface Visitor {
  /** A box of at least a pixel, from x to x + width. */
  box(index: number, x: number, width: number): void;
  /** A box of less than a pixel; `column` is called after the last of its column. */
  small(index: number, width: number): void;
  /** A column of pixels in which there are small boxes, and how much of it they fill. */
  column(x: number, filled: number): void;
}

/** The first place of the lane whose box ends after the time. */
export function firstEndingAfter(lane: Lane, time: number): number {
  let low = 0;
  let high = lane.order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[lane.order[middle]] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The box at a time, -1 if there is none; `reach` is how far beside a box still counts. */
export function boxAt(lane: Lane, time: number, reach = 0): number {
  const place = firstEndingAfter(lane, time - reach);
  let best = -1;
  let nearest = Infinity;
  for (let k = place; k < lane.order.length && lane.start[lane.order[k]] <= time + reach; k++) {
    const index = lane.order[k];
    const away = Math.max(lane.start[index] - time, time - lane.end[index], 0);
    if (away < nearest) [best, nearest] = [index, away];
    if (away === 0 && lane.end[index] > time) break;
  }
  return best;
}

/** Calls the visitor for what is on screen: boxes of a pixel and more one by one, smaller ones a column of pixels at a time. */
export function visit(lane: Lane, scale: Scale, visitor: Visitor): void {
  const { order, start, end } = lane;
  const unit = scale.width / (scale.to - scale.from);
  let column = -1;
  let filled = 0;
  let any = false;
  const flush = (): void => {
    if (any) visitor.column(column, Math.min(filled, 1));
    any = false;
    filled = 0;
  };
  for (let k = firstEndingAfter(lane, scale.from); k < order.length; k++) {
    const index = order[k];
    const begin = start[index];
    if (begin >= scale.to) break;
    const width = (end[index] - begin) * unit;
    const x = scale.left + (begin - scale.from) * unit;
    if (width >= 1) {
      flush();
      visitor.box(index, x, width);
      continue;
    }
    const at = Math.floor(x);
    if (at !== column) {
      flush();
      column = at;
    }
    any = true;
    filled += width;
    visitor.small(index, width);
  }
  flush();
}

/** A step curve on screen: x and value where it changes, at most the highest value per column of pixels. */
export function stepsOn(times: Float64Array, values: Float64Array, scale: Scale): { x: number[]; value: number[] } {
  const x: number[] = [];
  const value: number[] = [];
  const unit = scale.width / (scale.to - scale.from);
  let place = lastAt(times, scale.from);
  let held = place >= 0 ? values[place] : 0;
  x.push(scale.left);
  value.push(held);
  for (place++; place < times.length && times[place] <= scale.to; ) {
    const here = scale.left + (times[place] - scale.from) * unit;
    const column = Math.floor(here);
    let most = -Infinity;
    for (; place < times.length && times[place] <= scale.to && scale.left + (times[place] - scale.from) * unit < column + 1; place++) {
      held = values[place];
      if (held > most) most = held;
    }
    x.push(here);
    value.push(most);
    if (held < most) {
      x.push(Math.min(column + 1, scale.left + scale.width));
      value.push(held);
    }
  }
  return { x, value };
}

/** The last place whose time is not after the given one, -1 for none. */
export function lastAt(times: Float64Array, time: number): number {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
