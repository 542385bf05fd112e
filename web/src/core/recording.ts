import { computes, optimizerOf } from "./figures.ts";
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
}

type Json = Record<string, unknown>;

const COLUMNS = ["start", "end", "depart", "arrive", "collective_start", "collective_end"] as const;
const ACTION = /^\d{1,7}[FBIW]\d{1,7}$/;
/** Microseconds of the units that traces are told in. */
const UNITS: Record<string, number> = { s: 1e6, ms: 1e3, us: 1, ns: 1e-3 };

/** Whether a text looks like a recorded run: a timeline of Penstock's, or a trace. */
export function isRecording(text: string): boolean {
  const data = parsed(text);
  return data !== null && (data.type === "timeline" || Array.isArray(data.traceEvents));
}

/** Reads a timeline as Penstock saves it, or a trace whose slices are named like actions. */
export function readRecording(name: string, text: string): Recording {
  const data = parsed(text);
  if (data?.type === "timeline") return readTimeline(name, data);
  if (data && Array.isArray(data.traceEvents)) return readTrace(name, data);
  throw new RecordingError(`${name} is neither a timeline nor a trace`);
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
  return { name, source: String(data.source ?? "measured"), times, exact: { actions, columns } };
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

/** Slices named like actions; the earliest action starts at 0. */
function readTrace(name: string, data: Json): Recording {
  const unit = UNITS[String((data.otherData as Json | undefined)?.unit)] ?? UNITS.s;
  const times = new Map<string, [number, number]>();
  for (const event of data.traceEvents as unknown[]) {
    const { ph, name: label, ts, dur } = (event ?? {}) as Json;
    if (ph !== "X" || !Number.isFinite(ts) || !Number.isFinite(dur)) continue;
    for (const part of partsOf(String(label))) if (!times.has(part)) times.set(part, [(ts as number) / unit, ((ts as number) + (dur as number)) / unit]);
  }
  if (!times.size) throw new RecordingError(`${name} has no slice that is named like an action, as 0F0`);
  let first = Infinity;
  times.forEach(([start]) => (first = Math.min(first, start)));
  times.forEach(([start, end], part) => times.set(part, [start - first, end - first]));
  return { name, source: "measured", times, exact: null };
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

/** Computations are found by their names; a message is under way from the end of its maker to the start of what waited for it. */
function matchedTiming(view: View, { name, times, source }: Recording): Timing {
  const { entries, graph } = view;
  const [start, end] = [new Float64Array(view.nodes), new Float64Array(view.nodes)];
  let missing = 0;
  let clock = 0;
  for (let node = 0; node < view.nodes; node++) {
    if (node === graph.bounds[graph.rank[node]]) clock = 0;
    const span = computes(view, node) ? times.get(entryText(view, entries.at[node])) : ([clock, clock] as [number, number]);
    if (!span) missing++;
    else [start[node], end[node]] = span;
    clock = end[node];
  }
  if (missing) throw new RecordingError(`${name} is a run of other actions: it lacks ${missing} of the ${view.nodes} that are shown`);
  const depart = Float64Array.from(graph.sender, (node) => end[node]);
  const arrive = Float64Array.from(graph.user, (node, message) => {
    const free = node > graph.bounds[graph.rank[node]] ? end[node - 1] : 0;
    return start[node] > free ? Math.max(start[node], depart[message]) : depart[message];
  });
  const nowhere = new Float64Array(view.nodes).fill(-1);
  return { start, end, depart, arrive, collectiveStart: nowhere, collectiveEnd: nowhere, heldBy: new Int32Array(0), source: measuredSource(source), optimizer: optimizerOf(view, view.costs) };
}
