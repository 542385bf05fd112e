import { backward, perAction, perLink, perShare, perStage } from "./costs.ts";
import { B, BROADCAST, COMBINE, F, I, isCompute, isCopy, isJoin, isSpread, REDUCE_GRAD, S, T, UNSHARD, W } from "./kinds.ts";
import { pairwiseSum } from "./sums.ts";
import type { Costs, View } from "./types.ts";

export interface Durations {
  node: Float64Array;
  message: Float64Array;
  collective: Float64Array;
  /** How long the idle slots before each node last; null without any. */
  idle: Float64Array | null;
}

/** How long every node, message and collective takes. */
export function durationsOf(view: View, costs: Costs): Durations {
  return { node: nodeDurations(view, costs), message: travelTimes(view, costs), collective: collectiveDurations(view, costs), idle: idleDurations(view, costs) };
}

/** An idle slot lasts as long as the mean forward. */
function idleDurations(view: View, costs: Costs): Float64Array | null {
  const { slots } = view;
  if (!slots) return null;
  const slot = slotLength(view, costs);
  return Float64Array.from(slots, (count) => count * slot);
}

export function slotLength(view: View, costs: Costs): number {
  const forwards = perAction(costs.f, view.stages, view.unitCount, "f");
  return pairwiseSum(forwards) / forwards.length;
}

function nodeDurations(view: View, costs: Costs): Float64Array {
  const { entries, stages, unitCount: units, nodes } = view;
  const taken = new Float64Array(entries.kind.length);
  const tables: Float64Array[] = [];
  tables[F] = perAction(costs.f, stages, units, "f");
  tables[B] = backward(costs, stages, units);
  tables[I] = perAction(costs.i, stages, units, "i");
  tables[W] = perAction(costs.w, stages, units, "w");
  const multiples: ((rank: number, stage: number) => number)[] = [];
  if (isSpreadView(view)) {
    tables[S] = perAction(costs.s, stages, units, "s");
    tables[T] = perAction(costs.t, stages, units, "t");
    multiples[S] = perShare(costs.rank_s, view.ranks, "rank_s");
    multiples[T] = perShare(costs.rank_t, view.ranks, "rank_t");
  }
  for (let e = 0; e < taken.length; e++) {
    const kind = entries.kind[e];
    if (!isCompute(kind)) continue;
    taken[e] = tables[kind][entries.stage[e] * units + entries.unit[e]];
    if (kind === S || kind === T) taken[e] *= multiples[kind](view.graph.rank[entries.node[e]], entries.stage[e]);
  }
  if (nodes === taken.length) return taken;
  const made = new Float64Array(nodes);
  for (let n = 0; n < nodes; n++) {
    const [low, high] = [entries.at[n], entries.at[n + 1]];
    made[n] = high - low === 1 ? taken[low] : (taken[low] + pairwiseSum(taken, low + 1, high)) * costs.overlap;
  }
  return made;
}

/** Whether a view has a vocabulary that is spread over the ranks. */
export function isSpreadView(view: View): boolean {
  return view.entries.kind.some(isSpread);
}

/** What runs beside the computation: collectives, and copies of activations to host memory and back. */
function collectiveDurations(view: View, costs: Costs): Float64Array {
  const { entries, stages, nodes, unitCount: units } = view;
  const [unshard, reduce] = [perStage(costs.unshard, stages, "unshard"), perStage(costs.reduce, stages, "reduce")];
  const made = new Float64Array(nodes);
  const tables: Float64Array[] = [];
  if (isSpreadView(view)) {
    tables[BROADCAST] = perAction(costs.broadcast, stages, units, "broadcast");
    tables[COMBINE] = perAction(costs.combine, stages, units, "combine");
  }
  let sizes: Float64Array | null = null;
  for (let n = 0; n < nodes; n++) {
    const entry = entries.at[n];
    const [kind, stage] = [entries.kind[entry], entries.stage[entry]];
    if (isCopy(kind)) {
      sizes ??= perAction(costs.activation, stages, units, "activation");
      made[n] = costs.host_latency + sizes[stage * units + entries.unit[entry]] / (costs.host_bandwidth ?? Infinity);
    } else if (isJoin(kind)) made[n] = tables[kind][stage * units + entries.unit[entry]];
    else if (kind === UNSHARD) made[n] = unshard[stage];
    else if (kind === REDUCE_GRAD) made[n] = reduce[stage];
  }
  return made;
}

/** The size of each message: what the lower stage of its edge puts out. */
export function messageSizes(view: View, costs: Costs): Float64Array {
  const { entries, messages, stages, unitCount: units } = view;
  const output = perAction(costs.output, stages, units, "output");
  return Float64Array.from(messages.before, (before, k) => {
    const after = messages.after[k];
    const lower = entries.kind[after] === F ? before : after;
    return output[entries.stage[lower] * units + entries.unit[before]];
  });
}

function travelTimes(view: View, costs: Costs): Float64Array {
  const { source, target } = view.messages;
  const [latency, bandwidth] = [perLink(costs.latency, view.ranks, "latency"), perLink(costs.bandwidth, view.ranks, "bandwidth")];
  return messageSizes(view, costs).map((size, k) => latency(source[k], target[k]) + size / (bandwidth(source[k], target[k]) ?? Infinity));
}
