// Traces that `torch.profiler` writes on each rank, read as `integrations/profiler_traces.py` does: a test compares the two.
import { entryText } from "./text.ts";
import type { View } from "./types.ts";

/** One computation of a rank: when it was entered, when its first operator began, and when it ended, in microseconds. */
export interface Range {
  action: string;
  /** The actions that run together in it; itself if it is one. */
  parts: string[];
  entered: number;
  start: number;
  end: number;
}

/** The trace of one rank, step by step. */
export interface RankTrace {
  file: string;
  /** The rank among all processes of the run; null if neither the file nor its name says it. */
  process: number | null;
  steps: Range[][];
  /** Whether ranges are of the rank's only stage and do not name it: it is 0 for now. */
  numbered: boolean;
}

type Json = Record<string, unknown>;

const RANGE = /^(?:PP:|penstock::)(.+)$/;
const NUMBERED = /^(Forward|Backward) (\d{1,18})$/;
const COMPUTATION = /^\s*(\d{1,18})([FBIW])(\d{1,18})(?:\.(\d{1,18}))?\s*$/;
const OVERLAP = /^\s*\(([^()]*)\)OVERLAP_F_B\s*$/;
/** Operators, and kernels, that do not compute. */
const COMMUNICATION = /^(?:c10d|gloo|nccl|record_param_comms|ProfilerStep)/;
const SENDS = /nccl/i;

/** Reads the trace of one rank; null if there is no range of a pipeline in it. */
export function readRankTrace(file: string, data: Json): RankTrace | null {
  const told = (data.distributedInfo as Json | undefined)?.rank;
  const process = Number.isInteger(told) ? (told as number) : rankIn(file);
  const base = typeof data.baseTimeNanoseconds === "number" ? data.baseTimeNanoseconds / 1e3 : 0;
  const events = sortEvents(data.traceEvents as unknown[]);
  const steps = splitSteps(findRanges(events, base));
  return steps.length ? { file, process, steps, numbered: events.host.some(({ numbered }) => numbered) } : null;
}

/** The last number in a file's name. */
function rankIn(file: string): number | null {
  const numbers = file.match(/\d+/g);
  return numbers ? Number(numbers[numbers.length - 1]) : null;
}

interface Named {
  action: string;
  parts: string[];
  numbered: boolean;
}

/** The computation that a range is of; null for other ranges. */
function computationOf(name: string): Named | null {
  const named = RANGE.exec(name)?.[1];
  if (named !== undefined) {
    const parts = (OVERLAP.exec(named)?.[1].split(";") ?? [named]).map(canonical);
    if (parts.includes(null)) return null;
    return { action: parts.length > 1 ? `(${parts.join(";")})OVERLAP_F_B` : parts[0]!, parts: parts as string[], numbered: false };
  }
  const numbered = NUMBERED.exec(name);
  if (!numbered) return null;
  const action = `0${numbered[1] === "Forward" ? "F" : "B"}${Number(numbered[2])}`;
  return { action, parts: [action], numbered: true };
}

/** A computation as Penstock writes it; null for what is none. */
function canonical(text: string): string | null {
  const match = COMPUTATION.exec(text);
  if (!match) return null;
  return `${Number(match[1])}${match[2]}${Number(match[3])}${match[4] === undefined ? "" : `.${Number(match[4])}`}`;
}

/** A range as one event, on the host or on a stream of a GPU. */
interface Annotation extends Named {
  name: string;
  start: number;
  end: number;
  /** The profiler's own number; undefined if it has none. */
  ident: unknown;
  stream: string;
}

/** What a trace says about a rank's ranges. */
interface Events {
  host: Annotation[];
  gpu: Annotation[];
  /** The starts of operators that compute, in order. */
  operators: number[];
  /** The streams that run kernels that compute. */
  computing: Set<string>;
}

function sortEvents(all: unknown[]): Events {
  const events: Events = { host: [], gpu: [], operators: [], computing: new Set() };
  for (const event of all) {
    const { ph, name, cat, ts, dur = 0, args, pid, tid } = (event ?? {}) as Json;
    if (ph !== "X" || typeof name !== "string" || typeof ts !== "number" || typeof dur !== "number") continue;
    const stream = JSON.stringify([pid, tid]);
    const named = computationOf(name);
    if (cat === "kernel") {
      if (!SENDS.test(name)) events.computing.add(stream);
    } else if (named) {
      const ident = (args as Json | undefined)?.["External id"];
      (cat === "gpu_user_annotation" ? events.gpu : events.host).push({ ...named, name, start: ts, end: ts + dur, ident, stream });
    } else if (cat === "cpu_op" && !COMMUNICATION.test(name)) events.operators.push(ts);
  }
  events.operators.sort((one, other) => one - other);
  events.host.sort((one, other) => one.start - other.start || other.end - one.end);
  return events;
}

/** The ranges of computations in the order in which they began; an overlapped pair counts, and not its two parts. */
function findRanges(events: Events, base: number): Range[] {
  const gpu = matchGpu(events);
  const ranges: Range[] = [];
  let [inside, until]: [string[], number] = [[], 0];
  events.host.forEach(({ action, parts, start: entry, end: left }, index) => {
    if (inside.includes(action) && entry < until) return; // a part of an overlapped pair
    [inside, until] = [parts, left];
    const at = firstFrom(events.operators, entry);
    const begun = at < events.operators.length && events.operators[at] < left ? events.operators[at] : entry;
    const ran = gpu.get(index);
    const [start, end] = ran ?? [begun, left];
    const before = ranges[ranges.length - 1];
    const entered = ran && before ? Math.max(entry, before.end - base) : entry; // a GPU runs one range after the other
    ranges.push({ action, parts, entered: Math.min(entered, start) + base, start: start + base, end: end + base });
  });
  return ranges;
}

/**
 * When the GPU ran each range of the host, by its index: from the first to the last of the streams that compute. A range has one event
 * per stream; they belong together by the profiler's own number, or else by their turn among ranges of this name on their stream.
 */
function matchGpu({ host, gpu, computing }: Events): Map<number, [number, number]> {
  const key = (name: string, other: unknown): string => JSON.stringify([name, other ?? null]);
  const byIdent = new Map<string, number>();
  const inTurn = new Map<string, number[]>();
  host.forEach(({ name, ident }, index) => {
    if (ident !== undefined && ident !== null) byIdent.set(key(name, ident), index);
    inTurn.set(name, [...(inTurn.get(name) ?? []), index]);
  });
  const seen = new Map<string, number>();
  const times = new Map<number, [number, number]>();
  const annotations = gpu.filter(({ stream }) => !computing.size || computing.has(stream)).sort((one, other) => one.start - other.start);
  for (const { name, ident, stream, start, end } of annotations) {
    const turn = seen.get(key(name, stream)) ?? 0;
    seen.set(key(name, stream), turn + 1);
    const owner = byIdent.get(key(name, ident)) ?? inTurn.get(name)?.[turn];
    if (owner === undefined) continue;
    const [first, last] = times.get(owner) ?? [start, end];
    times.set(owner, [Math.min(first, start), Math.max(last, end)]);
  }
  return times;
}

/** The first place of a sorted list whose value is not below another. */
function firstFrom(sorted: number[], value: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A step ends when an action comes again. */
function splitSteps(ranges: Range[]): Range[][] {
  const steps: Range[][] = [];
  let seen = new Set<string>();
  for (const range of ranges) {
    if (!steps.length || seen.has(range.action)) {
      steps.push([]);
      seen = new Set();
    }
    steps[steps.length - 1].push(range);
    seen.add(range.action);
  }
  return steps;
}

/** The last step of the traces of all ranks: its ranges by the names of their computations, and the rank of each. */
export interface Traced {
  ranges: Map<string, Range & { rank: number }>;
  ranks: number;
}

/** The traces of a pipeline's ranks in one, in any order of the files; refuses traces of different runs, of other steps and of copies. */
export function joinTraces(traces: RankTrace[]): Traced {
  const ordered = orderByStage(traces);
  if (new Set(ordered.map(({ steps }) => steps.length)).size > 1) {
    const held = ordered.map((trace) => `${trace.steps.length} in ${told(trace)}`).join(", ");
    throw new Error(`the traces hold different numbers of steps: ${held}. Profile the same steps on every rank`);
  }
  const ranges: Traced["ranges"] = new Map();
  ordered.forEach((trace, rank) => {
    for (const range of trace.steps[trace.steps.length - 1]) {
      for (const part of range.parts) {
        const other = ranges.get(part);
        if (other && other.rank !== rank) throw new Error(`${told(ordered[other.rank])} and ${told(trace)} both ran ${part}: give the files of one pipeline, without its data-parallel copies`);
        ranges.set(part, { ...range, rank });
      }
    }
  });
  return { ranges, ranks: ordered.length };
}

function told({ file, process }: RankTrace): string {
  return `${file} (rank ${process ?? "unknown"})`;
}

/** By the first stage of each rank, or by process if the ranges do not name their stage. */
function orderByStage(traces: RankTrace[]): RankTrace[] {
  const numbered = traces.filter((trace) => trace.numbered);
  if (numbered.length && numbered.length < traces.length) {
    const other = traces.find((trace) => !trace.numbered)!;
    throw new Error(`the traces are of different runs: ${told(numbered[0])} has ranges like 'Forward 0', and ${told(other)} has not`);
  }
  const processes = traces.map(({ process }) => process);
  const distinct = !processes.includes(null) && new Set(processes).size === processes.length;
  const byProcess = (): RankTrace[] => [...traces].sort((one, other) => (one.process ?? 0) - (other.process ?? 0));
  if (numbered.length) {
    if (!distinct) throw new Error(`ranges like 'Forward 0' are ordered by rank, so give one file for each: they are ${traces.map(told).join(", ")}`);
    return byProcess().map((trace, stage) => ({ ...trace, steps: trace.steps.map((step) => step.map((range) => ofStage(range, stage))) }));
  }
  const first = new Map(traces.map((trace) => [trace, Math.min(...trace.steps[trace.steps.length - 1].flatMap(({ parts }) => parts.map((part) => parseInt(part, 10))))]));
  if (new Set(first.values()).size < traces.length && distinct) return byProcess(); // copies of stages, as in bidirectional schedules
  return [...traces].sort((one, other) => first.get(one)! - first.get(other)!);
}

function ofStage(range: Range, stage: number): Range {
  const action = range.action.replace(/^\d+/, String(stage));
  return { ...range, action, parts: [action] };
}

/**
 * How far each rank's clock is ahead of rank 0's, in microseconds, as far as the messages of a view show: a computation cannot begin
 * before the one that made its input has ended. A difference of 0 stays if it is possible, because ranks of one machine share a clock.
 */
export function alignClocks(view: View, { ranges, ranks }: Traced): number[] {
  const least = new Map<number, number>();
  const at = (source: number, target: number): number => least.get(source * ranks + target) ?? -Infinity;
  view.messages.maker.forEach((maker, message) => {
    const [before, use] = [ranges.get(entryText(view, maker))!, ranges.get(entryText(view, view.messages.after[message]))!];
    const key = before.rank * ranks + use.rank;
    least.set(key, Math.max(least.get(key) ?? -Infinity, before.end - use.start)); // the source's clock is at least this far ahead
  });
  const ahead = new Map<number, number>([[0, 0]]);
  const queue = [0];
  for (let rank = queue.shift(); rank !== undefined; rank = queue.shift()) {
    for (let other = 0; other < ranks; other++) {
      if (ahead.has(other) || (at(rank, other) === -Infinity && at(other, rank) === -Infinity)) continue;
      ahead.set(other, ahead.get(rank)! + chooseDifference(at(other, rank), -at(rank, other)));
      queue.push(other);
    }
  }
  return Array.from({ length: ranks }, (_, rank) => ahead.get(rank) ?? 0);
}

/** A difference of two clocks between its bounds: 0 if that is possible, else their middle, or the one that there is. */
function chooseDifference(low: number, high: number): number {
  if (low <= 0 && high >= 0) return 0;
  if (Number.isFinite(low) && Number.isFinite(high)) return (low + high) / 2;
  return Number.isFinite(low) ? low : high;
}
