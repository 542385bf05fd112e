import { criticalPath } from "../core/path.ts";
import { gapsOf } from "../core/gaps.ts";
import { memoryOf } from "../core/memory.ts";
import { finishedOf, numbersOf } from "../core/figures.ts";
import { messageSizes, slotLength } from "../core/durations.ts";
import { timeView } from "../core/timing.ts";
import type { Costs, Gap, Memory, Numbers, PathStep, Timing, View } from "../core/types.ts";
import { sizeText, timeIn, unitFor, type TimeUnit } from "../draw/span.ts";
import type { Lane } from "../draw/visible.ts";
import { structureOf, type Structure } from "./structure.ts";

/** One timeline on screen: a view under costs. What follows from its times is computed when it is first asked for. */
export class Shown {
  readonly structure: Structure;
  /** The recorded run that is drawn beside it, action by action. */
  beside: Shown | null = null;
  /** The length of the longest timeline on screen. */
  longest: number | null = null;
  private kept: { memory?: Memory; numbers?: Numbers; path?: PathStep[]; finished?: Float64Array; sizes?: Float64Array; travel?: number; slot?: number; short?: number; waited?: Float64Array } = {};
  private readonly gaps = new Map<number, Gap[]>();
  private readonly lanes = new Map<string, Lane>();

  constructor(
    readonly label: string,
    readonly view: View,
    readonly costs: Costs,
    readonly timing: Timing,
  ) {
    this.structure = structureOf(view);
  }

  static of(label: string, view: View, costs: Costs): Shown {
    return new Shown(label, view, costs, view.timed ? timeView(view, costs) : steps(view));
  }

  /** The same times for another order of the same actions, for what is drawn by itself. */
  like(view: View): Shown {
    return new Shown(this.label, view, this.costs, this.timing);
  }

  /** Times and sizes in the view's units. */
  readonly time = (value: number): string => timeIn(value, this.unit);
  readonly size = (value: number): string => sizeText(value, this.view.units.size);

  /** All times on screen are told in one unit: that of the longest timeline. */
  get unit(): TimeUnit {
    return unitFor(this.longest ?? this.length, this.view.units.time);
  }

  get timed(): boolean {
    return this.view.timed;
  }

  get measured(): boolean {
    return this.timing.source !== "simulated";
  }

  /** What the axis has to show. */
  get length(): number {
    if (this.view.timed) return this.finished.reduce((most, time) => Math.max(most, time), 0);
    return this.timing.end.reduce((most, end) => Math.max(most, end), 1);
  }

  get memory(): Memory {
    return (this.kept.memory ??= memoryOf(this.view, this.timing, this.costs));
  }

  get numbers(): Numbers {
    return (this.kept.numbers ??= numbersOf(this.view, this.timing, this.costs, this.memory));
  }

  /** When each rank is through with everything. */
  get finished(): Float64Array {
    return (this.kept.finished ??= finishedOf(this.view, this.timing));
  }

  /** How long an idle slot of the order lasts. */
  get slot(): number {
    return (this.kept.slot ??= slotLength(this.view, this.costs));
  }

  /** How long a message travels, in the median of those that take time; 0 if none does. */
  get travel(): number {
    if (this.kept.travel === undefined) {
      const { depart, arrive } = this.timing;
      const lengths = sampled(arrive.length, (message) => arrive[message] - depart[message]).filter((length) => length > 0);
      this.kept.travel = lengths[lengths.length >> 1] ?? 0;
    }
    return this.kept.travel;
  }

  /** The size of each message. */
  get sizes(): Float64Array {
    return (this.kept.sizes ??= messageSizes(this.view, this.costs));
  }

  /** How long the shorter computations take: nearly all take at least this long. Infinite if nothing is computed. */
  get short(): number {
    if (this.kept.short === undefined) {
      const { start, end } = this.timing;
      const { compute } = this.structure;
      const lengths = sampled(compute.length, (place) => end[compute[place]] - start[compute[place]]).filter((length) => length > 0);
      this.kept.short = lengths[Math.floor(lengths.length * OUTLIERS)] ?? Infinity;
    }
    return this.kept.short;
  }

  get path(): PathStep[] {
    return (this.kept.path ??= criticalPath(this.view, this.timing, this.costs));
  }

  gapsOf(rank: number): Gap[] {
    let found = this.gaps.get(rank);
    if (!found) this.gaps.set(rank, (found = this.view.timed ? gapsOf(this.view, this.timing, rank) : []));
    return found;
  }

  gapAt(rank: number, time: number): Gap | null {
    return this.gapsOf(rank).find((gap) => gap.start <= time && time < gap.end) ?? null;
  }

  computeLane(rank: number): Lane {
    const { compute, computeAt } = this.structure;
    return this.lane(`r${rank}`, () => compute.subarray(computeAt[rank], computeAt[rank + 1]), this.timing.start, this.timing.end);
  }

  channelLane(channel: number): Lane {
    return this.lane(`c${channel}`, () => this.structure.ofChannel[channel], this.timing.depart, this.timing.arrive);
  }

  /** Collectives of a rank, or its copies to the host or back. */
  besideLane(what: "collectives" | "out" | "back", rank: number): Lane {
    const { collectiveStart, collectiveEnd } = this.timing;
    return this.lane(`${what}${rank}`, () => this.structure[what][rank], collectiveStart, collectiveEnd);
  }

  /** The waits of a rank for its sends and reductions, each from when the rank came to it. */
  waitLane(rank: number): Lane {
    return this.lane(`w${rank}`, () => this.structure.waits[rank], this.waited, this.timing.start);
  }

  /** When the rank of an action had done what comes before it. */
  readonly freeAt = (node: number): number => (node > this.view.graph.bounds[this.view.graph.rank[node]] ? this.timing.end[node - 1] : 0);

  /** For each wait, when its rank came to it. */
  get waited(): Float64Array {
    if (!this.kept.waited) {
      const { start } = this.timing;
      this.kept.waited = start.slice();
      for (const nodes of this.structure.waits) for (const node of nodes) this.kept.waited[node] = Math.min(start[node], this.freeAt(node));
    }
    return this.kept.waited;
  }

  private lane(key: string, order: () => Int32Array, start: Float64Array, end: Float64Array): Lane {
    let found = this.lanes.get(key);
    if (!found) this.lanes.set(key, (found = { order: inOrder(order(), start), start, end }));
    return found;
  }
}

/** Of the computations: those that are shorter still have no say in how actions are named. */
const OUTLIERS = 0.02;
const SAMPLES = 500;

/** Lengths of at most so many items, evenly chosen, in ascending order. */
function sampled(count: number, length: (item: number) => number): Float64Array {
  const taken = Math.min(count, SAMPLES);
  return Float64Array.from({ length: taken }, (_, k) => length(Math.floor((k * count) / taken))).sort();
}

/** Measured messages may have left in another order than that of their numbers. */
function inOrder(order: Int32Array, start: Float64Array): Int32Array {
  for (let k = 1; k < order.length; k++) {
    if (start[order[k]] < start[order[k - 1]]) return order.slice().sort((one, other) => start[one] - start[other]);
  }
  return order;
}

/** A grid in place of times: every action takes one step. */
function steps(view: View): Timing {
  const start = new Float64Array(view.nodes);
  for (let rank = 0; rank < view.ranks; rank++) {
    const { bounds } = view.graph;
    for (let node = bounds[rank]; node < bounds[rank + 1]; node++) start[node] = node - bounds[rank];
  }
  const none = new Float64Array(0);
  const nowhere = new Float64Array(view.nodes).fill(-1);
  return {
    start,
    end: start.map((step) => step + 1),
    depart: none,
    arrive: none,
    collectiveStart: nowhere,
    collectiveEnd: nowhere,
    heldBy: new Int32Array(0),
    source: "simulated",
    optimizer: new Float64Array(view.ranks),
  };
}
