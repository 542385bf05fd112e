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

/** The trace of one rank, step by step; the rank is null if neither the file nor its name says it. */
export interface RankTrace {
  file: string;
  rank: number | null;
  steps: Range[][];
}

type Json = Record<string, unknown>;

const RANGE = /^(?:PP:|penstock::)(.+)$/;
const NUMBERED = /^(Forward|Backward) (\d{1,18})$/;
const COMPUTATION = /^\s*(\d{1,18})([FBIW])(\d{1,18})(?:\.(\d{1,18}))?\s*$/;
const OVERLAP = /^\s*\(([^()]*)\)OVERLAP_F_B\s*$/;
/** Operators that do not compute. */
const COMMUNICATION = /^(?:c10d|gloo|nccl|record_param_comms|ProfilerStep)/;

/** Reads the trace of one rank; null if there is no range of a pipeline in it. */
export function readRankTrace(file: string, data: Json): RankTrace | null {
  const told = (data.distributedInfo as Json | undefined)?.rank;
  const rank = Number.isInteger(told) ? (told as number) : rankIn(file);
  const base = typeof data.baseTimeNanoseconds === "number" ? data.baseTimeNanoseconds / 1e3 : 0;
  const steps = splitSteps(findRanges(data.traceEvents as unknown[], rank, base));
  return steps.length ? { file, rank, steps } : null;
}

/** The last number in a file's name. */
function rankIn(file: string): number | null {
  const numbers = file.match(/\d+/g);
  return numbers ? Number(numbers[numbers.length - 1]) : null;
}

interface Named {
  action: string;
  parts: string[];
}

/** The computation that a range is of; ranges that only have a microbatch are of the rank's only stage. Null for other ranges. */
function computationOf(name: string, rank: number | null): Named | null {
  const named = RANGE.exec(name)?.[1];
  if (named !== undefined) {
    const parts = (OVERLAP.exec(named)?.[1].split(";") ?? [named]).map(canonical);
    if (parts.includes(null)) return null;
    return { action: parts.length > 1 ? `(${parts.join(";")})OVERLAP_F_B` : parts[0]!, parts: parts as string[] };
  }
  const numbered = NUMBERED.exec(name);
  if (!numbered || rank === null) return null;
  const action = `${rank}${numbered[1] === "Forward" ? "F" : "B"}${Number(numbered[2])}`;
  return { action, parts: [action] };
}

/** A computation as Penstock writes it; null for any other name. */
function canonical(text: string): string | null {
  const match = COMPUTATION.exec(text);
  if (!match) return null;
  return `${Number(match[1])}${match[2]}${Number(match[3])}${match[4] === undefined ? "" : `.${Number(match[4])}`}`;
}

/** The ranges of computations in the order in which they began; nested ones, as in an overlapped pair, count alone. */
function findRanges(events: unknown[], rank: number | null, base: number): Range[] {
  const own: { start: number; end: number; named: Named }[] = [];
  const gpu = new Map<string, [number, number]>();
  const seen = new Map<string, number>();
  const operators: number[] = [];
  for (const event of events) {
    const { ph, name, cat, ts, dur = 0 } = (event ?? {}) as Json;
    if (ph !== "X" || typeof name !== "string" || typeof ts !== "number" || typeof dur !== "number") continue;
    const named = computationOf(name, rank);
    if (named && cat === "gpu_user_annotation") {
      const number = (seen.get(name) ?? -1) + 1;
      seen.set(name, number);
      gpu.set(`${name}#${number}`, [ts, ts + dur]);
    } else if (named) own.push({ start: ts, end: ts + dur, named });
    else if (cat === "cpu_op" && !RANGE.test(name) && !COMMUNICATION.test(name)) operators.push(ts);
  }
  operators.sort((one, other) => one - other);
  own.sort((one, other) => one.start - other.start || other.end - one.end);
  const counts = new Map<string, number>();
  const ranges: Range[] = [];
  for (const { start, end, named } of own) {
    const last = ranges[ranges.length - 1];
    if (last?.parts.includes(named.action) && start + base < last.end) continue; // a part of an overlapped pair
    const number = (counts.get(named.action) ?? -1) + 1;
    counts.set(named.action, number);
    const at = firstFrom(operators, start);
    const begun = at < operators.length && operators[at] < end ? operators[at] : start;
    const [from, to] = gpuTimes(gpu, named, number) ?? [begun, end];
    ranges.push({ ...named, entered: start + base, start: from + base, end: to + base });
  }
  return ranges;
}

function gpuTimes(gpu: Map<string, [number, number]>, { action, parts }: Named, number: number): [number, number] | undefined {
  const [, , kind, microbatch] = COMPUTATION.exec(parts[0])!;
  const names = [`PP:${action}`, `penstock::${action}`, ...(parts.length === 1 ? [`${kind === "F" ? "Forward" : "Backward"} ${Number(microbatch)}`] : [])];
  return names.map((name) => gpu.get(`${name}#${number}`)).find((times) => times !== undefined);
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
export type Traced = Map<string, Range & { rank: number }>;

/** The traces in one: refuses ranks that are missing or there twice. */
export function joinTraces(traces: RankTrace[]): Traced {
  const sorted = [...traces].sort((one, other) => (one.rank ?? -1) - (other.rank ?? -1));
  if (sorted.some(({ rank }, k) => rank !== k)) {
    const found = traces.map(({ file, rank }) => `${file}: ${rank ?? "unknown"}`).join(", ");
    throw new Error(`the traces must be of ranks 0, 1 and so on, one file each, but are of ranks ${found}: lay the traces of all ranks over the schedule together`);
  }
  const ranges: Traced = new Map();
  sorted.forEach(({ steps }, rank) => {
    for (const range of steps[steps.length - 1]) for (const part of range.parts) ranges.set(part, { ...range, rank });
  });
  return ranges;
}

/**
 * How far each rank's clock is ahead of rank 0's, in microseconds, as far as the messages of a view show: a computation cannot begin
 * before the one that made its input has ended. A difference of 0 stays if it is possible, because ranks of one machine share a clock.
 */
export function alignClocks(view: View, ranges: Traced): number[] {
  const least = new Map<number, number>();
  const at = (source: number, target: number): number => least.get(source * view.ranks + target) ?? -Infinity;
  view.messages.maker.forEach((maker, message) => {
    const [before, use] = [ranges.get(entryText(view, maker))!, ranges.get(entryText(view, view.messages.after[message]))!];
    const key = before.rank * view.ranks + use.rank;
    least.set(key, Math.max(least.get(key) ?? -Infinity, before.end - use.start)); // the source's clock is at least this far ahead
  });
  const ahead = new Map<number, number>([[0, 0]]);
  const queue = [0];
  for (let rank = queue.shift(); rank !== undefined; rank = queue.shift()) {
    for (let other = 0; other < view.ranks; other++) {
      if (ahead.has(other) || (at(rank, other) === -Infinity && at(other, rank) === -Infinity)) continue;
      ahead.set(other, ahead.get(rank)! + chooseDifference(at(other, rank), -at(rank, other)));
      queue.push(other);
    }
  }
  return Array.from({ length: view.ranks }, (_, rank) => ahead.get(rank) ?? 0);
}

/** A difference of two clocks between its bounds: 0 if that is possible, else their middle, or the one that there is. */
function chooseDifference(low: number, high: number): number {
  if (low <= 0 && high >= 0) return 0;
  if (Number.isFinite(low) && Number.isFinite(high)) return (low + high) / 2;
  return Number.isFinite(low) ? low : high;
}
