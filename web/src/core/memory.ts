import { perAction, perShare, perStage } from "./costs.ts";
import { isSpreadView, messageSizes } from "./durations.ts";
import { indexOfMost, ofRanks } from "./figures.ts";
import { B, BROADCAST, COMBINE, F, I, OFFLOAD, RELOAD, RESHARD, S, T, UNSHARD, W } from "./kinds.ts";
import { hasCopies } from "./lanes.ts";
import { pairwiseSum } from "./sums.ts";
import { CATEGORIES } from "./types.ts";
import type { Category, Costs, Curve, Memory, Timing, View } from "./types.ts";

/** Changes of what the ranks hold: when, in which place among equals, by how much, and of what. */
class Changes {
  readonly time: Float64Array;
  readonly place: Float64Array;
  readonly size: Float64Array;
  readonly category: Int8Array;
  private readonly ofRank: number[][];
  private count = 0;

  constructor(ranks: number, most: number) {
    [this.time, this.place, this.size] = [new Float64Array(most), new Float64Array(most), new Float64Array(most)];
    this.category = new Int8Array(most);
    this.ofRank = Array.from({ length: ranks }, () => []);
  }

  add(rank: number, category: number, time: number, place: number, size: number): void {
    const change = this.count++;
    this.ofRank[rank].push(change);
    this.time[change] = time;
    this.place[change] = place;
    this.size[change] = size;
    this.category[change] = category;
  }

  /** At the start or the end of a node; at one time in the order of the row, and an action's end gives before it takes. */
  at(rank: number, category: number, node: number, time: number, size: number, after: boolean): void {
    this.add(rank, category, time, node * 4 + (after ? 2 : 0) + (size > 0 ? 1 : 0), size);
  }

  /** The changes of a rank in order. They come in a few runs that are sorted already, which the sort makes use of. */
  sorted(rank: number): number[] {
    const { time, place } = this;
    return this.ofRank[rank].sort((one, other) => time[one] - time[other] || place[one] - place[other]);
  }
}

const [ACTIVATIONS, STASH, RECEIVED, PARAMETERS] = [0, 1, 2, 3];

/**
 * What each rank holds over time: an activation from the start of F to the end of I or B, which leaves the weight stash that
 * the end of W frees; a received message from its receive (in a schedule, its arrival) to the end of what uses it; a sent
 * message from its send to the end of its WAIT_SEND, if there is one; parameters
 * from the start of their gathering to RESHARD. Ranks that never shard keep their parameters all the time. An activation that is
 * moved to the host is not held from the start of what waits for the copy out to the start of its RELOAD. What a slice keeps for later
 * ones is held from the start of its F to the end of I or B of the microbatch's first slice, and the sums of its gradients from the start of
 * I or B of the last slice to the end of that of the slice itself. The logits of a share of the vocabulary are held from the start of S to
 * the end of T.
 */
export function memoryOf(view: View, timing: Timing, costs: Costs): Memory {
  const changes = new Changes(view.ranks, 4 * view.entries.kind.length + 2 * view.messages.before.length);
  addActivations(view, timing, costs, changes);
  addStashes(view, timing, costs, changes);
  addKept(view, timing, costs, changes);
  addShares(view, timing, costs, changes);
  addParameters(view, timing, costs, changes);
  addMoves(view, timing, costs, changes);
  addReceived(view, timing, costs, changes);
  const sharded = view.entries.kind.some((kind) => kind === UNSHARD || kind === RESHARD);
  const fixed = sharded ? ofRanks(view, costs.shard, "shard") : ofRanks(view, costs.parameters, "parameters");
  return { ranks: Array.from(fixed, (kept, rank) => curveOf(changes, rank, kept)), host: hostMemory(view, timing, costs) };
}

/** What the host holds of each rank: a moved activation from the start of its OFFLOAD to the start of its backward; null if nothing moves. */
function hostMemory(view: View, timing: Timing, costs: Costs): Curve[] | null {
  if (!hasCopies(view)) return null;
  const changes = new Changes(view.ranks, 2 * view.entries.kind.length);
  const size = sizesOf(view, costs, "activation");
  each(view, [OFFLOAD], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.start[node], size(entry), false));
  awaited(view, RELOAD, (entry, node) => changes.at(view.graph.rank[node], ACTIVATIONS, node, timing.start[node], -size(entry), false));
  return Array.from({ length: view.ranks }, (_, rank) => curveOf(changes, rank, 0));
}

/** Calls with every copy of a kind, by its entry, and the node that waits for its end. */
function awaited(view: View, kind: number, use: (entry: number, node: number) => void): void {
  const { entries, graph } = view;
  for (let node = 0; node < view.nodes; node++) {
    for (let k = graph.gather_at[node]; k < graph.gather_at[node + 1]; k++) {
      const entry = entries.at[graph.gather[k]];
      if (entries.kind[entry] === kind) use(entry, node);
    }
  }
}

function each(view: View, kinds: number[], use: (entry: number, node: number, rank: number) => void): void {
  const { kind, node } = view.entries;
  const wanted = view.kinds.map((_, number) => kinds.includes(number));
  for (let entry = 0; entry < kind.length; entry++) {
    if (wanted[kind[entry]]) use(entry, node[entry], view.graph.rank[node[entry]]);
  }
}

function sizesOf(view: View, costs: Costs, name: "activation" | "weight_stash"): (entry: number) => number {
  const { stage, unit } = view.entries;
  const table = perAction(costs[name], view.stages, view.unitCount, name);
  return (entry) => table[stage[entry] * view.unitCount + unit[entry]];
}

function addActivations(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  if (!view.entries.kind.some((kind) => kind === B || kind === I || kind === W)) return;
  const size = sizesOf(view, costs, "activation");
  each(view, [F], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.start[node], size(entry), false));
  each(view, [B, I], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.end[node], -size(entry), true));
}

function addStashes(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  const size = sizesOf(view, costs, "weight_stash");
  each(view, [I], (entry, node, rank) => changes.at(rank, STASH, node, timing.end[node], size(entry), true));
  each(view, [W], (entry, node, rank) => changes.at(rank, STASH, node, timing.end[node], -size(entry), true));
}

function addKept(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  const trains = view.entries.kind.some((kind) => kind === B || kind === I || kind === W);
  if (!trains || (costs.kept === 0 && costs.kept_gradients === 0)) return;
  const { stages, slices, unitCount: units, entries } = view;
  const taken = perAction(costs.kept, stages, units, "kept");
  const sums = perAction(costs.kept_gradients, stages, units, "kept_gradients");
  const [opened, freed] = [new Float64Array(sums.length), sums];
  for (let first = 0; first < sums.length; first += slices) {
    const last = first + slices - 1;
    sums[last] = 0;
    opened[last] = pairwiseSum(sums, first, first + slices);
    freed[first] += pairwiseSum(taken, first, first + slices);
  }
  const cell = (entry: number): number => entries.stage[entry] * units + entries.unit[entry];
  each(view, [F], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.start[node], taken[cell(entry)], false));
  each(view, [B, I], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.start[node], opened[cell(entry)], false));
  each(view, [B, I], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, timing.end[node], -freed[cell(entry)], true));
}

/** What a spread vocabulary holds on every rank: logits, what a BROADCAST brings, and a share's embeddings until they are combined. */
function addShares(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  if (!isSpreadView(view)) return;
  const { stages, unitCount: units, entries } = view;
  const trains = entries.kind.some((kind) => kind === B || kind === I || kind === W);
  const logits = perAction(costs.logits, stages, units, "logits");
  const multiple = perShare(costs.rank_logits, view.ranks, "rank_logits");
  const [brought, made] = [perAction(costs.output, stages, units, "output"), perAction(costs.output, stages, units, "output")];
  made.fill(0, units);
  if (!trains) brought.fill(0, 0, units);
  const last = trains ? T : S;
  const sizeOf = (sizes: Float64Array, entry: number, rank: number): number => {
    const size = sizes[entries.stage[entry] * units + entries.unit[entry]];
    return sizes === logits ? size * multiple(rank, entries.stage[entry]) : size;
  };
  const take = (category: number, kind: number, sizes: Float64Array): void =>
    each(view, [kind], (entry, node, rank) => changes.at(rank, category, node, timing.start[node], sizeOf(sizes, entry, rank), false));
  const give = (category: number, kind: number, sizes: Float64Array): void =>
    each(view, [kind], (entry, node, rank) => {
      const end = kind === COMBINE ? Math.max(timing.end[node], timing.collectiveEnd[node]) : timing.end[node];
      changes.at(rank, category, node, end, -sizeOf(sizes, entry, rank), true);
    });
  take(ACTIVATIONS, S, logits);
  give(ACTIVATIONS, last, logits);
  take(RECEIVED, BROADCAST, brought);
  give(RECEIVED, last, brought);
  take(RECEIVED, S, made);
  give(RECEIVED, COMBINE, made);
}

function addReceived(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  const { graph, messages, lowered } = view;
  const sizes = messageSizes(view, costs);
  sizes.forEach((size, k) => {
    const time = lowered ? timing.start[graph.receive[k]] : timing.arrive[k];
    const place = lowered ? graph.receive[k] * 4 : graph.user[k] * 4 - 1;
    changes.add(messages.target[k], RECEIVED, time, place, size);
  });
  const at = (entry: number, rank: number, size: number): void => {
    const node = view.entries.node[entry];
    changes.at(rank, RECEIVED, node, timing.end[node], size, true);
  };
  sizes.forEach((size, k) => at(messages.last[k], messages.target[k], -size));
  const sums = Array.from(sizes.keys()).filter((k) => messages.begun[k] !== messages.maker[k]);
  for (const k of sums) at(messages.begun[k], messages.source[k], sizes[k]);
  for (const k of sums) at(messages.maker[k], messages.source[k], -sizes[k]);
  addSent(view, timing, sizes, changes);
}

/** Messages that the sender keeps until its WAIT_SEND. */
function addSent(view: View, timing: Timing, sizes: Float64Array, changes: Changes): void {
  const { retire, sender, rank } = view.graph;
  retire.forEach((k, wait) => {
    if (k < 0) return;
    changes.at(rank[wait], RECEIVED, sender[k], timing.start[sender[k]], sizes[k], false);
    changes.at(rank[wait], RECEIVED, wait, timing.end[wait], -sizes[k], true);
  });
}

/** Activations that leave the device and come back. */
function addMoves(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  if (!hasCopies(view)) return;
  const size = sizesOf(view, costs, "activation");
  const { start } = timing;
  awaited(view, OFFLOAD, (entry, node) => changes.at(view.graph.rank[node], ACTIVATIONS, node, start[node], -size(entry), false));
  each(view, [RELOAD], (entry, node, rank) => changes.at(rank, ACTIVATIONS, node, start[node], size(entry), false));
}

function addParameters(view: View, timing: Timing, costs: Costs, changes: Changes): void {
  const size = perStage(costs.parameters, view.stages, "parameters");
  const of = (entry: number) => size[view.entries.stage[entry]];
  each(view, [UNSHARD], (entry, node, rank) => changes.at(rank, PARAMETERS, node, timing.collectiveStart[node], of(entry), false));
  each(view, [RESHARD], (entry, node, rank) => changes.at(rank, PARAMETERS, node, timing.end[node], -of(entry), true));
}

function curveOf(changes: Changes, rank: number, fixed: number): Curve {
  const order = changes.sorted(rank);
  const count = order.length;
  const columns = CATEGORIES.map(() => new Float64Array(count));
  const [first, second, third, fourth] = columns;
  const now = new Float64Array(CATEGORIES.length);
  const [times, total] = [new Float64Array(count), new Float64Array(count)];
  for (let k = 0; k < count; k++) {
    const change = order[k];
    now[changes.category[change]] += changes.size[change];
    times[k] = changes.time[change];
    first[k] = now[0];
    second[k] = now[1];
    third[k] = now[2];
    fourth[k] = now[3];
    total[k] = now[0] + now[1] + now[2] + now[3];
  }
  const most = indexOfMost(total);
  const held = Object.fromEntries(CATEGORIES.map((name, category) => [name, columns[category]])) as Record<Category, Float64Array>;
  return { times, held, total, fixed, peak: fixed + (count ? Math.max(0, total[most]) : 0), peakTime: count ? times[most] : 0 };
}
