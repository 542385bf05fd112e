import { messageSizes } from "./durations.ts";
import { computes, finishedOf, numbersOf } from "./figures.ts";
import { isCopy, OFFLOAD, RELOAD } from "./kinds.ts";
import { memoryOf } from "./memory.ts";
import { entryText } from "./text.ts";
import { CATEGORIES } from "./types.ts";
import type { Costs, Curve, Memory, Timing, View } from "./types.ts";

export type TraceEvent = Record<string, unknown>;

/** Microseconds of a unit of the costs' time. */
const UNITS: Record<string, number> = { s: 1e6, ms: 1e3, us: 1, ns: 1e-3 };
/** Times are rounded to eighths of a microsecond, so that slices that touch still touch wherever the trace is read. */
const TICKS = 8;

/** A timing as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: one process per rank, one thread per lane. */
export function toTrace(view: View, timing: Timing, costs: Costs, unit = "ms"): Record<string, unknown> {
  const memory = memoryOf(view, timing, costs);
  const trace = new Trace(view, timing, costs, UNITS[unit] ?? 1e3);
  const events = [...trace.names(), ...trace.computation(), ...trace.optimizer(), ...trace.collectives(), ...trace.copies(), ...trace.messages()];
  const { makespan, bubble, spanBubble, peaks, peak, messages } = numbersOf(view, timing, costs, memory);
  const { name } = view.table;
  const shape = { name: name || `unnamed ${view.table.type}`, source: timing.source, ranks: view.ranks, stages: view.stages };
  const figures = { makespan, bubble, span_bubble: spanBubble, peak_memory: peaks, peak, messages, unit };
  return {
    traceEvents: [...events, ...trace.memory(memory)],
    displayTimeUnit: "ms",
    otherData: { ...shape, microbatches: view.microbatches, ...(view.slices > 1 ? { slices: view.slices } : {}), ...figures },
  };
}

class Trace {
  constructor(
    private readonly view: View,
    private readonly timing: Timing,
    private readonly costs: Costs,
    private readonly scale: number,
  ) {}

  private at(time: number): number {
    return roundEven(time * this.scale * TICKS) / TICKS;
  }

  private slice(rank: number, lane: number, name: string, start: number, end: number, args: TraceEvent): TraceEvent {
    const begin = this.at(start);
    return { ph: "X", pid: rank, tid: lane, name, ts: begin, dur: this.at(end) - begin, args };
  }

  // The threads' numbers, no two alike in all processes; 0 would be the idle thread.

  private compute = (rank: number) => 1 + rank;
  private collective = (rank: number) => 1 + this.view.ranks + rank;
  private channel = (channel: number) => 1 + 2 * this.view.ranks + channel;
  private copy = (rank: number, kind: number) => 1 + (kind === RELOAD ? 3 : 2) * this.view.ranks + this.view.channels.length + rank;

  /** What processes and threads are called, and their order. */
  names(): TraceEvent[] {
    const found: TraceEvent[] = [];
    for (let rank = 0; rank < this.view.ranks; rank++) {
      found.push(meta("process_name", rank, 0, { name: `rank ${rank}` }), meta("process_sort_index", rank, 0, { sort_index: rank }));
    }
    for (const [rank, lane, name] of this.lanes()) {
      found.push(meta("thread_name", rank, lane, { name }), meta("thread_sort_index", rank, lane, { sort_index: lane }));
    }
    return found;
  }

  private lanes(): [number, number, string][] {
    const ranks = Array.from({ length: this.view.ranks }, (_, rank) => rank);
    const gathering = [...new Set(this.besideNodes(false).map((node) => this.view.graph.rank[node]))];
    const copying = [...new Set(this.besideNodes(true).map((node) => 2 * this.view.graph.rank[node] + (this.kindOf(node) === RELOAD ? 1 : 0)))].sort((one, other) => one - other);
    const ways = this.view.channels.map(([source, target, kind], channel): [number, number, string] => {
      return [source, this.channel(channel), `${kind === "SEND_F" ? "activations" : "gradients"} to rank ${target}`];
    });
    return [
      ...ranks.map((rank): [number, number, string] => [rank, this.compute(rank), "compute"]),
      ...gathering.map((rank): [number, number, string] => [rank, this.collective(rank), "collectives"]),
      ...copying.map((key): [number, number, string] => [key >> 1, this.copy(key >> 1, key % 2 ? RELOAD : OFFLOAD), `copies ${key % 2 ? "from" : "to"} the host`]),
      ...ways,
    ];
  }

  computation(): TraceEvent[] {
    const { entries, graph, slices } = this.view;
    const found: TraceEvent[] = [];
    const before = new Float64Array(this.view.ranks);
    for (let node = 0; node < this.view.nodes; node++) {
      if (!computes(this.view, node)) continue;
      const [start, end, rank] = [this.timing.start[node], this.timing.end[node], graph.rank[node]];
      const parts = Array.from({ length: entries.at[node + 1] - entries.at[node] }, (_, k) => entries.at[node] + k);
      const name = parts.map((entry) => entryText(this.view, entry)).join(" & ");
      const args = {
        stage: parts.map((entry) => entries.stage[entry]),
        microbatch: parts.map((entry) => Math.floor(entries.unit[entry] / slices)),
        wait: start - before[rank],
        ...(slices > 1 ? { slice: parts.map((entry) => entries.unit[entry] % slices) } : {}),
      };
      found.push(this.slice(rank, this.compute(rank), name, start, end, args));
      before[rank] = end;
    }
    return found;
  }

  optimizer(): TraceEvent[] {
    const finished = finishedOf(this.view, this.timing);
    const taking = Array.from(this.timing.optimizer, (takes, rank) => ({ takes, rank })).filter(({ takes }) => takes > 0);
    return taking.map(({ takes, rank }) => this.slice(rank, this.compute(rank), "optimizer", finished[rank] - takes, finished[rank], {}));
  }

  private kindOf(node: number): number {
    return this.view.entries.kind[this.view.entries.at[node]];
  }

  /** The nodes that start a collective, or a copy, that takes time. */
  private besideNodes(copies: boolean): number[] {
    const { collectiveStart, collectiveEnd } = this.timing;
    const all = Array.from({ length: this.view.nodes }, (_, node) => node);
    return all.filter((node) => this.view.graph.collective[node] && isCopy(this.kindOf(node)) === copies && collectiveEnd[node] > collectiveStart[node]);
  }

  /** Gathers of parameters and reductions of gradients. */
  collectives(): TraceEvent[] {
    const { entries, graph } = this.view;
    return this.besideNodes(false).map((node) => {
      const [rank, entry] = [graph.rank[node], entries.at[node]];
      const [start, end] = [this.timing.collectiveStart[node], this.timing.collectiveEnd[node]];
      return this.slice(rank, this.collective(rank), entryText(this.view, entry), start, end, { stage: entries.stage[entry] });
    });
  }

  /** Copies of activations to host memory and back. */
  copies(): TraceEvent[] {
    const { entries, graph, slices } = this.view;
    return this.besideNodes(true).map((node) => {
      const [rank, entry] = [graph.rank[node], entries.at[node]];
      const [start, end] = [this.timing.collectiveStart[node], this.timing.collectiveEnd[node]];
      const args = { stage: entries.stage[entry], microbatch: Math.floor(entries.unit[entry] / slices), ...(slices > 1 ? { slice: entries.unit[entry] % slices } : {}) };
      return this.slice(rank, this.copy(rank, entries.kind[entry]), entryText(this.view, entry), start, end, args);
    });
  }

  /** Each message on its channel's lane if it takes time, and its arrow. */
  messages(): TraceEvent[] {
    const { messages, entries } = this.view;
    const sizes = messageSizes(this.view, this.costs);
    const found: TraceEvent[] = [];
    messages.before.forEach((before, k) => {
      const [source, target, lane] = [messages.source[k], messages.target[k], this.channel(messages.channel[k])];
      found.push(this.flow("s", k, source, this.compute(source), this.inside(entries.node[messages.maker[k]])));
      const args = { size: sizes[k], used: entryText(this.view, messages.after[k]) };
      const message = this.slice(source, lane, entryText(this.view, before), this.timing.depart[k], this.timing.arrive[k], args);
      if ((message.dur as number) > 0) found.push(message, this.flow("t", k, source, lane, message.ts as number));
      const used = this.at(this.timing.start[entries.node[messages.after[k]]]);
      found.push({ ...this.flow("f", k, target, this.compute(target), used), bp: "e" });
    });
    return found;
  }

  /** The last moment of an action that is still inside it, so that an arrow from there belongs to it. */
  private inside(node: number): number {
    return Math.max(this.at(this.timing.start[node]), this.at(this.timing.end[node]) - 1 / TICKS);
  }

  private flow(phase: string, number: number, rank: number, lane: number, at: number): TraceEvent {
    return { ph: phase, id: number, pid: rank, tid: lane, name: "message", cat: "message", ts: at };
  }

  /** What each rank holds from each time on: all of it, and by use if there are several. */
  memory(memory: Memory): TraceEvent[] {
    return memory.ranks.flatMap((curve, rank) => this.counters(curve, rank));
  }

  private counters(curve: Curve, rank: number): TraceEvent[] {
    const times = Array.from(curve.times, (time) => this.at(time));
    const clean = (value: number) => (Math.abs(value) < 1e-9 * curve.peak ? 0 : value);
    const uses = CATEGORIES.filter((name) => curve.held[name].some((value) => value !== 0));
    const found = times.length && times[0] <= 0 ? [] : [counter("memory", rank, 0, { held: curve.fixed })];
    times.forEach((time, place) => {
      if (times[place + 1] === time) return;
      found.push(counter("memory", rank, time, { held: clean(curve.fixed + curve.total[place]) }));
      const held = Object.fromEntries(uses.map((name) => [name, clean(curve.held[name][place])]));
      if (uses.length > 1) found.push(counter("memory by use", rank, time, held));
    });
    return found;
  }
}

function meta(name: string, rank: number, lane: number, args: TraceEvent): TraceEvent {
  return { ph: "M", name, pid: rank, tid: lane, args };
}

function counter(name: string, rank: number, at: number, args: TraceEvent): TraceEvent {
  return { ph: "C", pid: rank, name, ts: at, args };
}

/** To the nearest whole number, of two equally near the even one. */
function roundEven(value: number): number {
  const down = Math.floor(value);
  if (value - down !== 0.5) return Math.round(value);
  return down % 2 === 0 ? down : down + 1;
}
