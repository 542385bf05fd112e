import { computes, optimizerOf } from "./figures.ts";
import { alignClocks, joinTraces, readRankTrace, type RankTrace, type Traced } from "./profiler.ts";
import { actionText, entryText } from "./text.ts";
import type { Timing, View } from "./types.ts";

/** A file that holds no recorded run, or one of other actions, in a sentence. */
export class RecordingError extends Error {}

/** When each computation of a recorded run ran, by its name; and every time, if the file has them for the same rows. */
export interface Recording {
  name: string;
  source: string;
  times: Map<string, [start: number, end: number]>;
  /** The rows that were run, and their columns of times. */
  exact: { actions: string[]; columns: Record<string, number[]> } | null;
  /** What profilers have traced on each rank, by each rank's clock; the times are empty then. */
  traced: Traced | null;
}

type Json = Record<string, unknown>;

const COLUMNS = ["start", "end", "depart", "arrive", "collective_start", "collective_end"] as const;
const ACTION = /^\d{1,7}[FBIW]\d{1,7}(\.\d{1,7})?$/;
/** Microseconds of the units that traces are told in. */
const UNITS: Record<string, number> = { s: 1e6, ms: 1e3, us: 1, ns: 1e-3 };

/** A file with its text. */
export interface NamedText {
  name: string;
  text: string;
}

/** Whether a text looks like a recorded run: a timeline of Penstock's, or a trace. */
export function isRecording(text: string): boolean {
  const data = parsed(text);
  return data !== null && (data.type === "timeline" || Array.isArray(data.traceEvents));
}

/**
 * Reads a timeline as Penstock saves it, a trace whose slices are named like actions, or the traces that `torch.profiler` has written,
 * one file per rank.
 */
export function readRecording(files: readonly NamedText[]): Recording {
  const traces: RankTrace[] = [];
  for (const { name, text } of files) {
    const data = parsed(text);
    if (data?.type === "timeline") return alone(files, readTimeline(name, data));
    if (!data || !Array.isArray(data.traceEvents)) throw new RecordingError(`${name} is neither a timeline nor a trace`);
    const own = readTrace(name, data);
    if (own) return alone(files, own);
    const trace = readRankTrace(name, data);
    if (!trace) throw new RecordingError(`${name} has no slice that is named like an action: 0F0, PP:0F0, penstock::0F0 or Forward 0. torch's Schedule1F1B writes no ranges: that of penstock.compat.torch does`);
    traces.push(trace);
  }
  try {
    return { name: namesOf(files), source: "measured", times: new Map(), exact: null, traced: joinTraces(traces) };
  } catch (error) {
    throw new RecordingError((error as Error).message);
  }
}

function namesOf(files: readonly NamedText[]): string {
  return files.length === 1 ? files[0].name : `${files[0]?.name} and ${files.length - 1} more`;
}

/** A file that holds all ranks comes by itself. */
function alone(files: readonly NamedText[], recording: Recording): Recording {
  if (files.length > 1) throw new RecordingError(`${recording.name} is a run of all ranks: lay one such file over the schedule, or one trace of torch.profiler per rank`);
  return recording;
}

function parsed(text: string): Json | null {
  if (!text.trimStart().startsWith("{")) return null;
  try {
    return JSON.parse(text) as Json;
  } catch {
    return null;
  }
}

function readTimeline(name: string, data: Json): Recording {
  const rows = (data.table as Json | undefined)?.rows;
  if (!Array.isArray(rows) || !rows.every(Array.isArray)) throw new RecordingError(`${name} has no rows of actions`);
  const actions = (rows as unknown[][]).flat().map(String);
  const columns = Object.fromEntries(COLUMNS.map((column) => [column, timesIn(name, data[column], column)]));
  if (columns.start.length !== actions.length || columns.end.length !== actions.length) {
    throw new RecordingError(`${name} has ${columns.start.length} times for ${actions.length} actions`);
  }
  const times = new Map<string, [number, number]>();
  actions.forEach((action, k) => {
    for (const part of partsOf(action)) times.set(part, [columns.start[k], columns.end[k]]);
  });
  return { name, source: String(data.source ?? "measured"), times, exact: { actions, columns }, traced: null };
}

function timesIn(name: string, values: unknown, column: string): number[] {
  if (!Array.isArray(values) || !values.every((value) => Number.isFinite(value))) throw new RecordingError(`${name}: '${column}' must be a list of times`);
  return values as number[];
}

/** The computations of an action as it is written; none for communication. */
function partsOf(action: string): string[] {
  const inner = /^\((.*)\)OVERLAP_F_B$/.exec(action)?.[1];
  return (inner ?? action).split(inner === undefined ? " & " : ";").filter((part) => ACTION.test(part));
}

/** Slices named like actions, as in our own traces; the earliest action starts at 0. Null if there is none. */
function readTrace(name: string, data: Json): Recording | null {
  const unit = UNITS[String((data.otherData as Json | undefined)?.unit)] ?? UNITS.s;
  const times = new Map<string, [number, number]>();
  for (const event of data.traceEvents as unknown[]) {
    const { ph, name: label, ts, dur } = (event ?? {}) as Json;
    if (ph !== "X" || !Number.isFinite(ts) || !Number.isFinite(dur)) continue;
    for (const part of partsOf(String(label))) if (!times.has(part)) times.set(part, [(ts as number) / unit, ((ts as number) + (dur as number)) / unit]);
  }
  if (!times.size) return null;
  let first = Infinity;
  times.forEach(([start]) => (first = Math.min(first, start)));
  times.forEach(([start, end], part) => times.set(part, [start - first, end - first]));
  return { name, source: "measured", times, exact: null, traced: null };
}

/** The times of a recorded run for a view; refuses a run of other actions. */
export function timingOf(view: View, recording: Recording): Timing {
  return exactTiming(view, recording) ?? matchedTiming(view, recording);
}

function exactTiming(view: View, { exact, source }: Recording): Timing | null {
  if (!exact || exact.actions.length !== view.nodes) return null;
  const { columns } = exact;
  const messages = view.messages.before.length;
  const fits = columns.depart.length === messages && columns.arrive.length === messages && columns.collective_start.length === view.nodes;
  if (!fits || !exact.actions.every((action, node) => action === actionText(view, node))) return null;
  const column = (name: (typeof COLUMNS)[number]): Float64Array => Float64Array.from(columns[name]);
  return {
    start: column("start"),
    end: column("end"),
    depart: column("depart"),
    arrive: column("arrive"),
    collectiveStart: column("collective_start"),
    collectiveEnd: column("collective_end"),
    heldBy: new Int32Array(0),
    source: measuredSource(source),
    optimizer: optimizerOf(view, view.costs),
  };
}

/** A simulated timeline that is laid over another is as good as measured: it has times of its own. */
function measuredSource(source: string): string {
  return source === "simulated" ? "saved" : source;
}

/** When a computation was entered, began and ended. */
interface Span {
  entered: number;
  start: number;
  end: number;
}

/** Computations are found by their names. What is in no file takes no time, right after what came before it. */
function matchedTiming(view: View, recording: Recording): Timing {
  checkActions(view, recording);
  const spans = recording.traced ? alignedSpans(view, recording.traced) : new Map(Array.from(recording.times, ([part, [start, end]]): [string, Span] => [part, { entered: start, start, end }]));
  const { entries, graph } = view;
  const [start, end] = [new Float64Array(view.nodes), new Float64Array(view.nodes)];
  let clock = 0;
  for (let node = 0; node < view.nodes; node++) {
    if (node === graph.bounds[graph.rank[node]]) clock = 0;
    start[node] = clock;
    if (computes(view, node)) {
      const parts = Array.from({ length: entries.at[node + 1] - entries.at[node] }, (_, k) => spans.get(entryText(view, entries.at[node] + k))!);
      start[node] = Math.min(...parts.map((span) => span.start));
      clock = Math.max(...parts.map((span) => span.end));
    }
    end[node] = clock;
  }
  const nowhere = new Float64Array(view.nodes).fill(-1);
  const travelled = recording.traced ? tracedMessages(view, spans) : guessedMessages(view, start, end);
  return { start, end, ...travelled, collectiveStart: nowhere, collectiveEnd: nowhere, heldBy: new Int32Array(0), source: measuredSource(recording.source), optimizer: optimizerOf(view, view.costs) };
}

/** Refuses a run that lacks computations of the view, or has others. */
function checkActions(view: View, { name, times, traced }: Recording): void {
  const known: { has: (part: string) => boolean; size: number } = traced?.ranges ?? times;
  let [missing, shown] = [0, 0];
  for (let node = 0; node < view.nodes; node++) {
    if (!computes(view, node)) continue;
    for (let entry = view.entries.at[node]; entry < view.entries.at[node + 1]; entry++) {
      shown++;
      if (!known.has(entryText(view, entry))) missing++;
    }
  }
  const ranks = traced?.ranks ?? view.ranks;
  const hint = ranks < view.ranks ? `. It has ${ranks === 1 ? "one rank" : `${ranks} ranks`} of ${view.ranks}: lay the traces of all ranks over the schedule together` : "";
  if (missing) throw new RecordingError(`${name} is a run of other actions: it lacks ${missing} of the ${shown} that are shown${hint}`);
  if (known.size > shown) throw new RecordingError(`${name} is a run of other actions: it has ${known.size - shown} besides the ${shown} that are shown`);
}

/** A message is under way from the end of its maker to the start of what waited for it. */
function guessedMessages(view: View, start: Float64Array, end: Float64Array): Pick<Timing, "depart" | "arrive"> {
  const { graph } = view;
  const depart = Float64Array.from(graph.sender, (node) => end[node]);
  const arrive = Float64Array.from(graph.user, (node, message) => {
    const free = node > graph.bounds[graph.rank[node]] ? end[node - 1] : 0;
    return start[node] > free ? Math.max(start[node], depart[message]) : depart[message];
  });
  return { depart, arrive };
}

/** What was traced, by one clock and in seconds; the first computation starts at 0. */
function alignedSpans(view: View, traced: Traced): Map<string, Span> {
  const ahead = alignClocks(view, traced);
  let zero = Infinity;
  traced.ranges.forEach(({ start, rank }) => (zero = Math.min(zero, start - ahead[rank])));
  const second = (time: number, rank: number): number => (time - ahead[rank] - zero) / 1e6;
  return new Map(Array.from(traced.ranges, ([part, { rank, entered, start, end }]): [string, Span] => [part, { entered: second(entered, rank), start: second(start, rank), end: second(end, rank) }]));
}

/**
 * A message that was waited for arrived when its use began. One that was there already is assumed to have taken as long as the quickest
 * of its channel, because its arrival was not seen.
 */
function tracedMessages(view: View, spans: Map<string, Span>): Pick<Timing, "depart" | "arrive"> {
  const { maker, after, channel } = view.messages;
  const depart = Float64Array.from(maker, (entry) => spans.get(entryText(view, entry))!.end);
  const use = Array.from(after, (entry) => spans.get(entryText(view, entry))!);
  const used = depart.map((sent, message) => Math.max(use[message].start, sent));
  const quickest = new Float64Array(view.channels.length).fill(Infinity);
  used.forEach((time, message) => (quickest[channel[message]] = Math.min(quickest[channel[message]], time - depart[message])));
  const arrive = used.map((time, message) => {
    const soonest = depart[message] + quickest[channel[message]];
    return use[message].entered >= soonest ? Math.min(time, soonest) : time;
  });
  return { depart, arrive };
}
