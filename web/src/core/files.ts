import { plainCosts } from "./costs.ts";
import { numbersOf } from "./figures.ts";
import { actionText } from "./text.ts";
import type { Costs, Timing, View } from "./types.ts";

/**
 * PyTorch's CSV form: one row per rank, one cell per action; a schedule spaced out by step, a program without idle cells. PyTorch has
 * no slices: one number stands for microbatch and slice, and the first action says how many slices there are.
 */
export function toCsv(view: View): string {
  const steps = view.lowered || !view.timed ? null : stepsOf(view);
  const lines = rowsOf(view, 1)
    .map((row, rank) => {
      if (!steps) return row;
      const first = view.graph.bounds[rank];
      const cells: string[] = [];
      row.forEach((text, k) => (cells[steps[first + k]] = text));
      return Array.from(cells, (cell) => cell ?? "");
    })
    .map((cells) => `${cells.join(",")}\r\n`);
  if (view.slices > 1) lines[0] = lines[0].replace(/[^,\r\n]+/, (first) => `${first} slices=${view.slices}`);
  return lines.join("");
}

function rowsOf(view: View, slices = view.slices): string[][] {
  const { bounds } = view.graph;
  return Array.from({ length: view.ranks }, (_, rank) =>
    Array.from({ length: bounds[rank + 1] - bounds[rank] }, (_, k) => actionText(view, bounds[rank] + k, slices)),
  );
}

/** The first step in which each node could run if every action took one. */
export function stepsOf(view: View): Int32Array {
  const { bounds, need_at, need, sender, send_at, user, rank: rankOf, gather_at, gather, meet, meet_at, join } = view.graph;
  const joinsOf = (node: number): Int32Array => join.subarray(meet_at[meet[node]], meet_at[meet[node] + 1]);
  const step = new Int32Array(view.nodes).fill(-1);
  const at = bounds.slice(0, view.ranks);
  const now = new Int32Array(view.ranks);
  const stack = Array.from({ length: view.ranks }, (_, rank) => rank);
  while (stack.length) {
    const rank = stack.pop() as number;
    ahead: while (at[rank] < bounds[rank + 1]) {
      const node = at[rank];
      let begin = now[rank] + (view.slots?.[node] ?? 0);
      for (let k = need_at[node]; k < need_at[node + 1]; k++) {
        const made = step[sender[need[k]]];
        if (made < 0) break ahead;
        begin = Math.max(begin, made + 1);
      }
      for (let k = gather_at[node]; k < gather_at[node + 1]; k++) {
        if (meet[gather[k]] < 0) continue;
        for (const joined of joinsOf(gather[k])) {
          if (step[joined] < 0) break ahead;
          begin = Math.max(begin, step[joined] + 1);
        }
      }
      step[node] = begin;
      now[rank] = begin + 1;
      at[rank]++;
      for (let message = send_at[node]; message < send_at[node + 1]; message++) {
        const other = rankOf[user[message]];
        if (at[other] === user[message]) stack.push(other);
      }
      if (meet[node] >= 0) for (const joined of joinsOf(node)) if (rankOf[joined] !== rank) stack.push(rankOf[joined]);
    }
  }
  return step;
}

/** A timeline as the library saves it: `penstock.Timeline.load` reads it. */
export function toTimelineJson(view: View, timing: Timing, costs: Costs): Record<string, unknown> {
  const numbers = numbersOf(view, timing, costs);
  return {
    format: "penstock",
    version: 1,
    type: "timeline",
    source: timing.source,
    units: { time: view.units.time, bytes: view.units.size === "B" },
    makespan: numbers.makespan,
    bubble: numbers.bubble,
    span_bubble: numbers.spanBubble,
    peak_memory: numbers.peaks,
    costs: plainCosts(costs),
    table: toTableJson(view),
    held_by: Array.from(timing.heldBy),
    start: Array.from(timing.start),
    end: Array.from(timing.end),
    depart: Array.from(timing.depart),
    arrive: Array.from(timing.arrive),
    collective_start: Array.from(timing.collectiveStart),
    collective_end: Array.from(timing.collectiveEnd),
  };
}

/** The schedule or program as the library saves it: `penstock.load` reads it. */
export function toTableJson(view: View): Record<string, unknown> {
  const { table } = view;
  const made = {
    format: "penstock",
    version: 1,
    type: table.type,
    name: table.name,
    microbatches: view.microbatches,
    placement: { kind: table.placement, ranks: view.ranks, copies: view.copies },
    edges: table.edges,
    rows: rowsOf(view),
    ...(view.slices > 1 ? { slices: view.slices } : {}),
  };
  return table.type === "program" ? { ...made, passes: table.passes ?? "", lowered: view.lowered, buffers: table.buffers ?? null } : made;
}
