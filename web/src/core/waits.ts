import { computes } from "./figures.ts";
import type { Timing, View } from "./types.ts";

/** Of the median computation: a rank that stands idle for less has not waited. Measured times never fall together. */
const NEGLIGIBLE = 0.01;

/** What each computation of a measured timing waited for; others are named by their place among the computations. */
export interface Waits {
  /** The node that each computation is. */
  node: Int32Array;
  /** The reverse; of what is no computation, the place of the computation before it. */
  place: Int32Array;
  rank: Int32Array;
  /** The rank's computation before, -1 for its first. */
  before: Int32Array;
  /** When the rank had computed what comes before; 0 for its first. */
  free: Float64Array;
  /** The message that came last of those it needs, -1 if it needs none. */
  message: Int32Array;
  /** The idle time that is none. */
  negligible: number;
}

const known = new WeakMap<Timing, Waits>();

export function waitsOf(view: View, timing: Timing): Waits {
  const found = known.get(timing) ?? made(view, timing);
  known.set(timing, found);
  return found;
}

function made(view: View, timing: Timing): Waits {
  const place = new Int32Array(view.nodes);
  const nodes: number[] = [];
  for (let node = 0; node < view.nodes; node++) {
    if (computes(view, node)) nodes.push(node);
    place[node] = nodes.length - 1;
  }
  const node = Int32Array.from(nodes);
  const rank = node.map((each) => view.graph.rank[each]);
  const before = node.map((_, k) => (k > 0 && rank[k] === rank[k - 1] ? k - 1 : -1));
  const free = Float64Array.from(before, (k) => (k < 0 ? 0 : timing.end[node[k]]));
  const message = node.map((each) => lastMessage(view, timing, each));
  return { node, place, rank, before, free, message, negligible: negligibleOf(node, timing) };
}

/** Of several at once the first counts. */
function lastMessage(view: View, timing: Timing, node: number): number {
  const { need, need_at } = view.graph;
  let last = -1;
  for (let k = need_at[node]; k < need_at[node + 1]; k++) {
    if (last < 0 || timing.arrive[need[k]] > timing.arrive[last]) last = need[k];
  }
  return last;
}

function negligibleOf(node: Int32Array, timing: Timing): number {
  if (timing.source === "simulated" || !node.length) return 0;
  const lengths = Float64Array.from(node, (each) => timing.end[each] - timing.start[each]).sort();
  const half = lengths.length >> 1;
  return NEGLIGIBLE * (lengths.length % 2 ? lengths[half] : (lengths[half - 1] + lengths[half]) / 2);
}
