// A measured timeline beside its prediction: both are of the same view, so that node n of one is node n of the other.
import { actionText, timeView, type Costs, type PerAction, type PerLink, type PerStage } from "../core/index.ts";
import { Shown } from "./shown.ts";

/** Actions that take so many times what was predicted, or so small a part of it, are told in another unit. */
const OTHER_UNIT = 10;
/** Of the predicted makespan: what is less late is as predicted. */
export const TOLERANCE = 0.01;

/** The prediction in the unit of the measurement: multiplied so that the median action agrees, where they are far apart. */
export function inUnitOf(measured: Shown, predicted: Shown): Shown {
  const ratio = medianRatio(predicted, measured);
  if (ratio < OTHER_UNIT && ratio > 1 / OTHER_UNIT) return predicted;
  const costs = multiplied(predicted.costs, ratio);
  return new Shown(`${predicted.label} × ${ratio.toPrecision(3)}`, predicted.view, costs, timeView(predicted.view, costs));
}

export function medianRatio(predicted: Shown, measured: Shown): number {
  const ratios: number[] = [];
  for (const node of predicted.structure.compute) {
    const [one, other] = [lengthOf(predicted, node), lengthOf(measured, node)];
    if (one > 0 && other > 0) ratios.push(other / one);
  }
  ratios.sort((one, other) => one - other);
  return ratios.length ? (ratios[(ratios.length - 1) >> 1] + ratios[ratios.length >> 1]) / 2 : 1;
}

function lengthOf(shown: Shown, node: number): number {
  return shown.timing.end[node] - shown.timing.start[node];
}

function multiplied(costs: Costs, by: number): Costs {
  const each = <Value extends PerAction | PerStage>(value: Value): Value =>
    (Array.isArray(value) ? value.map((one) => each(one)) : (value as number) * by) as Value;
  return {
    ...costs,
    f: each(costs.f),
    i: each(costs.i),
    w: each(costs.w),
    b: costs.b === null ? null : each(costs.b),
    latency: eachLink(costs.latency, (time) => time * by),
    bandwidth: eachLink(costs.bandwidth, (rate) => (rate === null ? null : rate / by)),
    unshard: each(costs.unshard),
    reduce: each(costs.reduce),
    optimizer: each(costs.optimizer),
    host_latency: costs.host_latency * by,
    host_bandwidth: costs.host_bandwidth === null ? null : costs.host_bandwidth / by,
  };
}

function eachLink<Value>(value: PerLink<Value>, change: (one: Value) => Value): PerLink<Value> {
  return Array.isArray(value) ? value.map((row) => row.map(change)) : change(value);
}

export interface Parting {
  node: number;
  rank: number;
  action: string;
  late: number;
}

/** The earliest action that ends more than the tolerance later or earlier than predicted. */
export function firstParting(predicted: Shown, measured: Shown, tolerance = TOLERANCE): Parting | null {
  const allowed = tolerance * predicted.numbers.makespan;
  let found = -1;
  for (const node of measured.structure.compute) {
    const late = measured.timing.end[node] - predicted.timing.end[node];
    if (Math.abs(late) > allowed && (found < 0 || measured.timing.end[node] < measured.timing.end[found])) found = node;
  }
  if (found < 0) return null;
  const { view } = measured;
  return {
    node: found,
    rank: view.graph.rank[found],
    action: actionText(view, found),
    late: measured.timing.end[found] - predicted.timing.end[found],
  };
}

export interface Lengths {
  name: string;
  count: number;
  predicted: number;
  measured: number;
}

/** What the actions of each stage and kind take in the mean; what adds the most comes first. */
export function lengthsByWork(predicted: Shown, measured: Shown): Lengths[] {
  const { view } = predicted;
  const sums = new Map<string, Lengths>();
  for (const node of predicted.structure.compute) {
    const name = workOf(view.entries, view.kinds, node);
    const sum = sums.get(name) ?? { name, count: 0, predicted: 0, measured: 0 };
    sum.count++;
    sum.predicted += lengthOf(predicted, node);
    sum.measured += lengthOf(measured, node);
    sums.set(name, sum);
  }
  const added = (each: Lengths): number => Math.abs(each.measured - each.predicted);
  const found = [...sums.values()].sort((one, other) => added(other) - added(one));
  return found.map((each) => ({ ...each, predicted: each.predicted / each.count, measured: each.measured / each.count }));
}

function workOf(entries: Shown["view"]["entries"], kinds: string[], node: number): string {
  const parts: string[] = [];
  for (let entry = entries.at[node]; entry < entries.at[node + 1]; entry++) parts.push(`stage ${entries.stage[entry]} ${kinds[entries.kind[entry]]}`);
  return parts.join(" & ");
}

/** How late each rank's last computation is. */
export function latenessOfRanks(predicted: Shown, measured: Shown): number[] {
  return Array.from(measured.finished, (end, rank) => end - predicted.finished[rank]);
}
