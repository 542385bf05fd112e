import { perStage } from "./costs.ts";
import { messageSizes } from "./durations.ts";
import { gapsOf } from "./gaps.ts";
import { isCompute } from "./kinds.ts";
import { memoryOf } from "./memory.ts";
import { pairwiseSum } from "./sums.ts";
import type { Cause, Costs, Memory, Numbers, PerStage, Timing, View } from "./types.ts";

/** What each rank's stages have together. */
export function ofRanks(view: View, value: PerStage, name: string): Float64Array {
  const values = perStage(value, view.stages, name);
  const made = new Float64Array(view.ranks);
  const held = new Set(view.copies.flatMap((copy) => copy.map((rank, stage) => rank * view.stages + stage)));
  for (const place of held) made[Math.floor(place / view.stages)] += values[place % view.stages];
  return made;
}

/** How long each rank's optimizer takes. */
export function optimizerOf(view: View, costs: Costs): Float64Array {
  return ofRanks(view, costs.optimizer, "optimizer");
}

/** Whether a node is computation. */
export function computes(view: View, node: number): boolean {
  return isCompute(view.entries.kind[view.entries.at[node]]);
}

/** When each rank is through with everything. */
export function finishedOf(view: View, timing: Timing): Float64Array {
  const { bounds } = view.graph;
  return timing.optimizer.map((optimizer, rank) => {
    let latest = 0;
    for (let node = bounds[rank]; node < bounds[rank + 1]; node++) {
      latest = Math.max(latest, timing.end[node], timing.collectiveEnd[node]);
    }
    return latest + optimizer;
  });
}

export function makespanOf(view: View, timing: Timing): number {
  return finishedOf(view, timing).reduce((most, time) => Math.max(most, time), 0);
}

/** How long each rank computes, the optimizer's step included. */
export function busyOf(view: View, timing: Timing): Float64Array {
  const { bounds } = view.graph;
  return timing.optimizer.map((optimizer, rank) => {
    let busy = 0;
    for (let node = bounds[rank]; node < bounds[rank + 1]; node++) {
      if (computes(view, node)) busy += timing.end[node] - timing.start[node];
    }
    return busy + optimizer;
  });
}

/** When each rank first computes. */
export function begunOf(view: View, timing: Timing): Float64Array {
  const { bounds } = view.graph;
  return Float64Array.from({ length: view.ranks }, (_, rank) => {
    let first = Infinity;
    for (let node = bounds[rank]; node < bounds[rank + 1]; node++) {
      if (computes(view, node)) first = Math.min(first, timing.start[node]);
    }
    return first === Infinity ? 0 : first;
  });
}

/** Idle time over all ranks, by cause. */
export function idleByCause(view: View, timing: Timing): Record<Cause, number> {
  const idle: Record<Cause, number> = { fill: 0, waiting: 0, communication: 0, memory: 0, drain: 0, overhead: 0, slot: 0 };
  for (let rank = 0; rank < view.ranks; rank++) {
    for (const gap of gapsOf(view, timing, rank)) idle[gap.cause] += gap.end - gap.start;
  }
  return idle;
}

/** The figures of a timing; the memory can be given where it is known already. */
export function numbersOf(view: View, timing: Timing, costs: Costs, memory: Memory = memoryOf(view, timing, costs)): Numbers {
  const [finished, busy, begun] = [finishedOf(view, timing), busyOf(view, timing), begunOf(view, timing)];
  const makespan = finished.reduce((most, time) => Math.max(most, time), 0);
  const whole = view.ranks * makespan;
  const spans = finished.map((time, rank) => time - begun[rank]);
  const longest = indexOfMost(spans);
  const peaks = memory.ranks.map((curve) => curve.peak);
  return {
    makespan,
    bubble: whole ? (whole - pairwiseSum(busy)) / whole : 0,
    spanBubble: spans[longest] ? (spans[longest] - busy[longest]) / spans[longest] : 0,
    peaks,
    peak: peaks.reduce((most, peak) => Math.max(most, peak), 0),
    messages: view.messages.before.length,
    bytes: pairwiseSum(messageSizes(view, costs)),
    idle: idleByCause(view, timing),
    busy: Array.from(busy),
  };
}

/** The place of the highest value, the first of several. */
export function indexOfMost(values: ArrayLike<number>): number {
  let most = 0;
  for (let k = 1; k < values.length; k++) if (values[k] > values[most]) most = k;
  return most;
}
