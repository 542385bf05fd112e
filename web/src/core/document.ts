import { fullCosts } from "./costs.ts";
import { optimizerOf } from "./figures.ts";
import type { Channel, Costs, Device, Entries, Finding, Graph, Messages, Source, TableInfo, Timing, View } from "./types.ts";

export class DocumentError extends Error {}

type Json = Record<string, unknown>;

const VERSION = 1;
const GRAPH = ["bounds", "need_at", "need", "send_at", "gather_at", "gather", "received", "sender", "user", "receive", "slot"] as const;
const ENDS = ["before", "after", "maker", "begun", "last", "source", "target", "channel"] as const;
const NONE = new Int32Array(0);

/** Read a document; whatever is wrong with it is said in a sentence. */
export function readDocument(data: unknown): View {
  const json = object(data, "the document");
  if (json.format !== "penstock" || json.type !== "view") throw new DocumentError("this is not a document of the studio");
  if (json.version !== VERSION) throw new DocumentError(`version ${String(json.version)}: this page reads version ${VERSION}`);
  const timed = json.timed === true;
  const entries = readEntries(object(json.entries, "entries"));
  const nodes = entries.at.length - 1;
  const [microbatches, slices] = [count(json.microbatches, "microbatches"), count(json.slices ?? 1, "slices")];
  const view: View = {
    title: String(json.title),
    source: json.source as Source,
    dependsOnCosts: json.depends_on_costs === true,
    ranks: count(json.ranks, "ranks"),
    stages: count(json.stages, "stages"),
    microbatches,
    slices,
    unitCount: microbatches * slices,
    copies: json.copies as number[][],
    lowered: json.lowered === true,
    table: json.table as TableInfo,
    kinds: json.kinds as string[],
    entries,
    nodes,
    graph: readGraph(object(json.graph, "graph"), nodes, timed),
    local: timed ? readLocal(object(json.local, "local")) : { before: NONE, after: NONE },
    messages: timed ? readMessages(object(json.messages, "messages")) : noMessages(),
    channels: json.channels as Channel[],
    costs: fullCosts(object(json.costs, "costs") as Partial<Costs>),
    units: { time: "", size: "", ...(json.units as object | undefined) },
    memoryLimit: (json.memory_limit ?? null) as View["memoryLimit"],
    devices: readDevices(json.devices),
    cluster: typeof json.cluster === "string" ? json.cluster : null,
    measured: null,
    findings: (json.findings ?? []) as Finding[],
    numFindings: Number(json.num_findings ?? 0),
    timed,
    slots: null,
    place: null,
  };
  check(view);
  if (json.measured) view.measured = readMeasured(object(json.measured, "measured"), view);
  return view;
}

function readDevices(json: unknown): Device[] | null {
  if (!Array.isArray(json)) return null;
  return json.map((item, rank) => {
    const device = object(item, `devices[${rank}]`);
    return { name: String(device.name), speed: String(device.speed), rate: typeof device.rate === "number" && device.rate > 0 ? device.rate : null, node: String(device.node) };
  });
}

function readEntries(json: Json): Entries {
  const at = ints(json.at, "entries.at");
  const kind = bytes(json.kind, "entries.kind");
  const node = new Int32Array(kind.length);
  if (at.length === 0 || at[at.length - 1] !== kind.length) throw new DocumentError("entries.at does not end at the number of entries");
  for (let n = 0; n + 1 < at.length; n++) node.fill(n, at[n], at[n + 1]);
  return { kind, stage: ints(json.stage, "stage"), unit: ints(json.microbatch, "microbatch"), peer: ints(json.peer, "peer"), at, node };
}

function readGraph(json: Json, nodes: number, timed: boolean): Graph {
  const columns = Object.fromEntries(GRAPH.map((name) => [name, timed || name === "bounds" ? ints(json[name], `graph.${name}`) : NONE]));
  const bounds = columns.bounds;
  const rank = new Int32Array(nodes);
  for (let r = 0; r + 1 < bounds.length; r++) rank.fill(r, bounds[r], bounds[r + 1]);
  const collective = timed ? bytes(json.collective, "graph.collective") : new Int8Array(nodes);
  const meet = json.meet === undefined || !timed ? new Int32Array(nodes).fill(-1) : sized(ints(json.meet, "graph.meet"), nodes, "graph.meet");
  const retire = json.retire === undefined ? new Int32Array(nodes).fill(-1) : ints(json.retire, "graph.retire"); // programs without waits
  return { ...(columns as unknown as Graph), rank, collective, retire, ...meetings(meet) };
}

/** The nodes that join each collective of all ranks. */
export function meetings(meet: Int32Array): Pick<Graph, "meet" | "meet_at" | "join"> {
  const count = 1 + meet.reduce((most, number) => Math.max(most, number), -1);
  if (count > meet.length) throw new DocumentError(`graph.meet names collective ${count - 1} of ${meet.length} actions`);
  const meet_at = new Int32Array(count + 1);
  for (const number of meet) if (number >= 0) meet_at[number + 1]++;
  for (let number = 0; number < count; number++) meet_at[number + 1] += meet_at[number];
  const next = meet_at.slice();
  const join = new Int32Array(meet_at[count]);
  meet.forEach((number, node) => void (number >= 0 && (join[next[number]++] = node)));
  return { meet, meet_at, join };
}

function readMessages(json: Json): Messages {
  return Object.fromEntries(ENDS.map((name) => [name, ints(json[name], `messages.${name}`)])) as unknown as Messages;
}

function noMessages(): Messages {
  return Object.fromEntries(ENDS.map((name) => [name, NONE])) as unknown as Messages;
}

function readLocal(json: Json): View["local"] {
  return { before: ints(json.before, "local.before"), after: ints(json.after, "local.after") };
}

function readMeasured(json: Json, view: View): Timing {
  const times = (name: string, length: number) => sized(floats(json[name], `measured.${name}`), length, `measured.${name}`);
  const messages = view.messages.before.length;
  return {
    start: times("start", view.nodes),
    end: times("end", view.nodes),
    depart: times("depart", messages),
    arrive: times("arrive", messages),
    collectiveStart: times("collective_start", view.nodes),
    collectiveEnd: times("collective_end", view.nodes),
    heldBy: NONE,
    source: String(json.source),
    optimizer: optimizerOf(view, view.costs),
  };
}

/** Columns that belong together must be of one length, or every figure would be wrong. */
function check(view: View): void {
  const { entries, graph, messages, nodes } = view;
  for (const name of ["stage", "unit", "peer"] as const) sized(entries[name], entries.kind.length, `entries.${name}`);
  sized(graph.bounds, view.ranks + 1, "graph.bounds");
  if (graph.bounds[view.ranks] !== nodes) throw new DocumentError(`graph.bounds ends at ${graph.bounds[view.ranks]}, there are ${nodes} actions`);
  if (view.devices) sized(view.devices, view.ranks, "devices");
  if (!view.timed) return;
  const count = messages.before.length;
  for (const name of ["need_at", "send_at", "gather_at"] as const) sized(graph[name], nodes + 1, `graph.${name}`);
  for (const name of ["received", "retire", "collective"] as const) sized(graph[name], nodes, `graph.${name}`);
  for (const name of ["need", "sender", "user", "receive", "slot"] as const) sized(graph[name], count, `graph.${name}`);
  for (const name of ENDS) sized(messages[name], count, `messages.${name}`);
}

function sized<Column extends { length: number }>(column: Column, length: number, name: string): Column {
  if (column.length !== length) throw new DocumentError(`${name} has ${column.length} values, there should be ${length}`);
  return column;
}

function object(value: unknown, name: string): Json {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new DocumentError(`${name} must be an object`);
  return value as Json;
}

function count(value: unknown, name: string): number {
  if (!Number.isInteger(value) || (value as number) < 1) throw new DocumentError(`${name} must be a whole number of at least 1`);
  return value as number;
}

// Columns -------------------------------------------------------------------------------------------------------------

function ints(value: unknown, name: string): Int32Array {
  return Array.isArray(value) ? Int32Array.from(value) : new Int32Array(unpacked(value, "i32", name, 4));
}

function bytes(value: unknown, name: string): Int8Array {
  return Array.isArray(value) ? Int8Array.from(value) : new Int8Array(unpacked(value, "i8", name, 1));
}

function floats(value: unknown, name: string): Float64Array {
  return Array.isArray(value) ? Float64Array.from(value) : new Float64Array(unpacked(value, "f64", name, 8));
}

function unpacked(value: unknown, type: string, name: string, width: number): ArrayBuffer {
  const text = object(value, name)[type];
  if (typeof text !== "string") throw new DocumentError(`${name} must be a column of type ${type}`);
  let raw: string;
  try {
    raw = atob(text);
  } catch {
    throw new DocumentError(`${name} is not base64`);
  }
  if (raw.length % width) throw new DocumentError(`${name} ends in the middle of a number`);
  const made = new Uint8Array(raw.length);
  for (let k = 0; k < raw.length; k++) made[k] = raw.charCodeAt(k);
  return made.buffer;
}
