// Where a recorded run differs from its prediction, action by action, and why.
import { actionText } from "../core/index.ts";
import type { Shown } from "./shown.ts";

/** One action that took longer or shorter than predicted, or began later or sooner after what it needs. */
export interface Difference {
  node: number;
  rank: number;
  action: string;
  /** How much it adds to the run; negative for what is faster than predicted. */
  adds: number;
  /** In words, with both times. */
  cause: string;
}

/** Of the predicted length: what differs less is as predicted. */
const LITTLE = 0.05;

/** How an action's own length differs from its prediction: -1 shorter, 0 as predicted, 1 longer; and by which share. */
export function lengthDifference(predicted: Shown, node: number): number {
  const measured = predicted.beside!;
  const length = predicted.timing.end[node] - predicted.timing.start[node];
  const share = length ? (measured.timing.end[node] - measured.timing.start[node]) / length - 1 : 0;
  return Math.abs(share) < LITTLE ? 0 : share;
}

interface Wait {
  /** When the last of what it needs was there, or its rank was free. */
  ready: number;
  /** The action on another rank that was waited for last, -1 if it was its own rank. */
  maker: number;
}

/** What each computation had to wait for, with the times of one of the two. */
function waitOf(shown: Shown, node: number, before: number): Wait {
  const { view, timing } = shown;
  const { need, need_at } = view.graph;
  let [ready, maker] = [before < 0 ? 0 : timing.end[before], -1];
  for (let k = need_at[node]; k < need_at[node + 1]; k++) {
    const source = view.entries.node[view.messages.maker[need[k]]];
    if (timing.end[source] > ready) [ready, maker] = [timing.end[source], source];
  }
  return { ready, maker };
}

/** The differences that add the most, the largest first. */
export function largestDifferences(predicted: Shown, count = 10): Difference[] {
  const measured = predicted.beside;
  if (!measured) return [];
  const { view } = predicted;
  const differences: Difference[] = [];
  const { compute, computeAt } = predicted.structure;
  const say = (value: number): string => measured.time(value);
  for (let rank = 0; rank < view.ranks; rank++) {
    for (let k = computeAt[rank]; k < computeAt[rank + 1]; k++) {
      const [node, before] = [compute[k], k > computeAt[rank] ? compute[k - 1] : -1];
      const length = (shown: Shown): number => shown.timing.end[node] - shown.timing.start[node];
      const [planned, took] = [length(predicted), length(measured)];
      const about = { node, rank, action: "" };
      differences.push({ ...about, adds: took - planned, cause: `takes ${say(took)}, predicted ${say(planned)}` });
      const [expected, actual] = [waitOf(predicted, node, before), waitOf(measured, node, before)];
      const idle = measured.timing.start[node] - actual.ready;
      const planIdle = predicted.timing.start[node] - expected.ready;
      const { maker } = actual;
      const why = maker < 0 ? `starts ${say(idle)} after rank ${rank} was free` : `starts ${say(idle)} after ${actionText(view, maker)} ended on rank ${view.graph.rank[maker]}`;
      differences.push({ ...about, adds: idle - planIdle, cause: `${why}, predicted ${say(planIdle)}` });
    }
  }
  const least = 1e-6 * predicted.length;
  const largest = differences.filter(({ adds }) => Math.abs(adds) > least).sort((one, other) => Math.abs(other.adds) - Math.abs(one.adds));
  return largest.slice(0, count).map((difference) => ({ ...difference, action: actionText(view, difference.node) }));
}
