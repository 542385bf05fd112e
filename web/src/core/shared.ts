import type { Durations } from "./durations.ts";
import { RankHeap } from "./heap.ts";
import type { Lanes } from "./lanes.ts";
import type { Costs, Graph, Timing, View } from "./types.ts";

/** The links that each message occupies while it travels; the same twice where it is one. */
export interface Links {
  one: Int32Array;
  other: Int32Array;
  count: number;
}

/** A link for each channel, for each way of a pair of ranks, for each way of a rank, for each rank, or as the lanes of the costs say. */
export function linksOf(view: View, { contention, lanes }: Costs): Links {
  const { source, target, channel } = view.messages;
  if (contention === "independent") return { one: channel, other: channel, count: view.channels.length };
  if (lanes) {
    const lane = (end: 0 | 1): Int32Array => source.map((from, k) => lanes[from][target[k]][end]);
    return { one: lane(0), other: lane(1), count: 1 + lanes.flat(2).reduce((most, lane) => Math.max(most, lane), -1) };
  }
  if (contention === "rank") return { one: source, other: target, count: view.ranks };
  if (contention === "duplex") return { one: source, other: target.map((to) => view.ranks + to), count: 2 * view.ranks };
  const numbers = new Map<number, number>();
  const one = source.map((from, k) => {
    const key = from * view.ranks + target[k];
    if (!numbers.has(key)) numbers.set(key, numbers.size);
    return numbers.get(key) as number;
  });
  return { one, other: one, count: numbers.size };
}

const TRYING = 0;
const RUNNING = 1;
const WAITING = 2;

/**
 * Time a graph whose links several channels share, or whose lanes several ranks: first come, first served, and lower ranks first at
 * the same time. Gives the node that each rank came to, its end if nothing hangs.
 */
export function runShared(graph: Graph, takes: Durations, times: Timing, links: Links, lanes: Lanes): Int32Array {
  return new SharedRun(graph, takes, times, links, lanes).run();
}

class SharedRun {
  private readonly ranks: number;
  private readonly at: Int32Array;
  private readonly now: Float64Array;
  private readonly lane: Float64Array;
  private readonly free: Float64Array;
  private readonly lastOn: Int32Array;
  private readonly state: Int8Array;
  private readonly heap: RankHeap;
  /** How many ranks have joined each collective of all ranks. */
  private readonly arrived: Int32Array;

  constructor(
    private readonly graph: Graph,
    private readonly takes: Durations,
    private readonly times: Timing,
    private readonly links: Links,
    private readonly lanes: Lanes,
  ) {
    this.ranks = graph.bounds.length - 1;
    this.at = graph.bounds.slice(0, this.ranks);
    this.now = new Float64Array(this.ranks);
    this.lane = new Float64Array(lanes.count);
    this.free = new Float64Array(links.count);
    this.lastOn = new Int32Array(links.count).fill(-1);
    this.state = new Int8Array(this.ranks);
    this.heap = new RankHeap(this.now);
    this.arrived = new Int32Array(graph.meet_at.length - 1);
  }

  run(): Int32Array {
    for (let rank = 0; rank < this.ranks; rank++) this.heap.push(rank);
    while (this.heap.size) {
      const rank = this.heap.pop();
      if (this.state[rank] === RUNNING) this.finish(rank);
      if (this.at[rank] < this.graph.bounds[rank + 1]) this.tryNext(rank);
    }
    return this.at;
  }

  /** The rank's node has ended: start its collective, send its messages, wake who waits for them. */
  private finish(rank: number): void {
    const { graph, times, takes } = this;
    const node = this.at[rank];
    const clock = this.now[rank];
    const beside = this.lanes.of[node];
    if (graph.meet[node] >= 0) this.join(node, clock);
    else if (beside >= 0) {
      times.collectiveStart[node] = clock > this.lane[beside] ? clock : this.lane[beside];
      this.lane[beside] = times.collectiveStart[node] + takes.collective[node];
      times.collectiveEnd[node] = this.lane[beside];
    }
    this.at[rank] = node + 1;
    for (let message = graph.send_at[node]; message < graph.send_at[node + 1]; message++) {
      this.send(message, clock);
      const other = graph.rank[graph.user[message]];
      if (this.at[other] === graph.user[message]) this.wake(other, clock);
    }
    if (graph.received[node] >= 0) this.wake(graph.rank[graph.sender[graph.received[node]]], clock);
    this.state[rank] = TRYING;
  }

  /** The rank joins a collective of all ranks; the last one starts it, and wakes who waits for it. */
  private join(node: number, clock: number): void {
    const { graph, times } = this;
    const number = graph.meet[node];
    if (++this.arrived[number] < this.ranks) return;
    const beside = this.lanes.of[node];
    const begin = clock > this.lane[beside] ? clock : this.lane[beside];
    this.lane[beside] = begin + this.takes.collective[node];
    for (let k = graph.meet_at[number]; k < graph.meet_at[number + 1]; k++) {
      times.collectiveStart[graph.join[k]] = begin;
      times.collectiveEnd[graph.join[k]] = this.lane[beside];
      this.wake(graph.rank[graph.join[k]], clock);
    }
  }

  private send(message: number, clock: number): void {
    const ways = [this.links.one[message], this.links.other[message]];
    let begin = clock;
    for (const way of ways) {
      if (this.free[way] > begin) {
        begin = this.free[way];
        this.times.heldBy[message] = this.lastOn[way];
      }
    }
    this.times.depart[message] = begin;
    begin += this.takes.message[message];
    this.times.arrive[message] = begin;
    for (const way of ways) {
      this.free[way] = begin;
      this.lastOn[way] = message;
    }
  }

  private wake(rank: number, clock: number): void {
    if (this.state[rank] !== WAITING) return;
    this.state[rank] = TRYING;
    if (this.now[rank] < clock) this.now[rank] = clock;
    this.heap.push(rank);
  }

  /** Begin the rank's next node if all it waits for is known, else wait for another rank. */
  private tryNext(rank: number): void {
    const node = this.at[rank];
    const begin = this.beginOf(node, Math.max(this.now[rank], this.freeAt(rank, node)));
    if (begin < 0) {
      this.state[rank] = WAITING;
      return;
    }
    this.times.start[node] = begin;
    this.times.end[node] = begin + this.takes.node[node];
    this.now[rank] = this.times.end[node];
    this.state[rank] = RUNNING;
    this.heap.push(rank);
  }

  /** When the rank has done what comes before a node and its idle slots are over. */
  private freeAt(rank: number, node: number): number {
    const { idle } = this.takes;
    if (!idle) return 0;
    return (node > this.graph.bounds[rank] ? this.times.end[node - 1] : 0) + idle[node];
  }

  private beginOf(node: number, clock: number): number {
    const { graph, times } = this;
    let begin = clock;
    for (let k = graph.need_at[node]; k < graph.need_at[node + 1]; k++) {
      const arrival = times.arrive[graph.need[k]];
      if (arrival < 0) return -1;
      if (arrival > begin) begin = arrival;
    }
    for (let k = graph.gather_at[node]; k < graph.gather_at[node + 1]; k++) {
      const gather = graph.gather[k];
      if (times.collectiveEnd[gather] > begin) begin = times.collectiveEnd[gather];
      else if (graph.meet[gather] >= 0 && times.collectiveEnd[gather] < 0) return -1;
    }
    for (let message = graph.send_at[node]; message < graph.send_at[node + 1]; message++) {
      const earlier = graph.slot[message];
      if (earlier < 0) continue;
      const taken = times.start[graph.receive[earlier]];
      if (taken < 0) return -1;
      begin = Math.max(begin, taken, times.arrive[earlier]);
    }
    const sent = graph.retire[node];
    if (sent >= 0) {
      const taken = times.start[graph.receive[sent]];
      if (taken < 0) return -1;
      begin = Math.max(begin, taken, times.arrive[sent]);
    }
    return begin;
  }
}
