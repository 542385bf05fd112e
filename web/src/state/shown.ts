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
  private kept: { memory?: Memory; numbers?: Numbers; path?: PathStep[]; finished?: Float64Array; sizes?: Float64Array; travels?: boolean; slot?: number; shortest?: number } = {};
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

  /** Whether any message takes time. */
  get travels(): boolean {
    if (this.kept.travels === undefined) this.kept.travels = this.timing.arrive.some((arrival, message) => arrival > this.timing.depart[message]);
    return this.kept.travels;
  }

  /** The size of each message. */
  get sizes(): Float64Array {
    return (this.kept.sizes ??= messageSizes(this.view, this.costs));
  }

  /** The shortest computation that takes time; infinite without any. */
  get shortest(): number {
    if (this.kept.shortest === undefined) {
      let least = Infinity;
      for (const node of this.structure.compute) {
        const takes = this.timing.end[node] - this.timing.start[node];
        if (takes > 0 && takes < least) least = takes;
      }
      this.kept.shortest = least;
    }
    return this.kept.shortest;
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

  collectiveLane(rank: number): Lane {
    const { collectiveStart, collectiveEnd } = this.timing;
    return this.lane(`g${rank}`, () => this.structure.collectives[rank], collectiveStart, collectiveEnd);
  }

  private lane(key: string, order: () => Int32Array, start: Float64Array, end: Float64Array): Lane {
    let found = this.lanes.get(key);
    if (!found) this.lanes.set(key, (found = { order: inOrder(order(), start), start, end }));
    return found;
  }
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
