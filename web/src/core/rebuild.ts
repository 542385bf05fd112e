import { meetings } from "./document.ts";
import { B, F, I, W } from "./kinds.ts";
import { cellNumber, codesOf, IDLE, kindOf, type Order } from "./order.ts";
import type { Channel, Entries, Graph, Messages, View } from "./types.ts";

/** Pairs of entries: `before[k]` must come before `after[k]`. */
export interface Pairs {
  before: Int32Array;
  after: Int32Array;
}

/** The entries of an order and every dependency between them: the rules of `ir/dependencies.py` for schedules. */
export interface Linked {
  entries: Entries;
  bounds: Int32Array;
  /** The rank of each node. */
  rank: Int32Array;
  /** The number of idle slots before each node. */
  slots: Uint16Array;
  /** Each node's place among the cells of its row, idle slots included. */
  place: Int32Array;
  /** Both ends on one rank; made on one rank and used on another. */
  local: Pairs;
  data: Pairs;
  /** Entries that need a missing action: its code, with I for either backward. */
  missing: { after: number; code: number }[];
  /** The first F, and the first B or I, of each stage and unit; -1 for none. */
  forwards: Int32Array;
  gradients: Int32Array;
}

const NONE = new Int32Array(0);

export function linkOrder(order: Order, edges: readonly (readonly [number, number])[]): Linked {
  const laid = layOutCells(order);
  const { stages, slices, units, copies } = order;
  const { kind, stage, unit } = laid.entries;
  const count = kind.length;
  const [forwards, gradients] = [new Int32Array(stages * units).fill(-1), new Int32Array(stages * units).fill(-1)];
  for (let entry = count - 1; entry >= 0; entry--) {
    const cell = stage[entry] * units + unit[entry];
    if (kind[entry] === F) forwards[cell] = entry;
    else if (kind[entry] !== W) gradients[cell] = entry;
  }
  const local = new PairList((slices > 1 ? 5 : 3) * count);
  const data = new PairList(edges.length ? 2 * Math.ceil(edges.length / Math.max(1, stages)) * count + 2 * count : 0);
  const missing: Linked["missing"] = [];
  /** An entry needs the forward, or whichever backward makes the gradient, of a stage and unit. */
  const need = (after: number, forward: boolean, of: number, which: number, into: PairList): void => {
    const cell = of * units + which;
    const before = (forward ? forwards : gradients)[cell];
    if (before >= 0) into.push(before, after);
    else missing.push({ after, code: (cell << 2) | (forward ? F : I) });
  };
  const isGradient = (entry: number): boolean => kind[entry] === B || kind[entry] === I;
  for (let entry = 0; entry < count; entry++) if (isGradient(entry)) need(entry, true, stage[entry], unit[entry], local);
  for (let entry = 0; entry < count; entry++) if (kind[entry] === W) need(entry, false, stage[entry], unit[entry], local);
  if (slices > 1) {
    // Forwards of a microbatch's slices ascend on a stage, backwards descend.
    for (let entry = 0; entry < count; entry++) if (kind[entry] === F && unit[entry] % slices) need(entry, true, stage[entry], unit[entry] - 1, local);
    for (let entry = 0; entry < count; entry++) if (isGradient(entry) && (unit[entry] + 1) % slices) need(entry, false, stage[entry], unit[entry] + 1, local);
  }
  for (const forward of [true, false]) {
    for (const column of neighbours(edges, stages, forward)) {
      for (let entry = 0; entry < count; entry++) {
        if (forward ? kind[entry] !== F : !isGradient(entry)) continue;
        const source = column[stage[entry]];
        if (source < 0) continue;
        const copy = copies[unit[entry] % copies.length];
        need(entry, forward, source, unit[entry], copy[stage[entry]] !== copy[source] ? data : local);
      }
    }
  }
  return { ...laid, local: local.pairs(), data: data.pairs(), missing, forwards, gradients };
}

function layOutCells(order: Order): Pick<Linked, "entries" | "bounds" | "rank" | "slots" | "place"> {
  const { rows, units } = order;
  let [nodes, entries] = [0, 0];
  for (const row of rows) {
    for (const cell of row) {
      if (cell === IDLE) continue;
      nodes++;
      entries += cell >= 0 ? 1 : codesOf(order, cell).length;
    }
  }
  const bounds = new Int32Array(rows.length + 1);
  const [rank, slots, place] = [new Int32Array(nodes), new Uint16Array(nodes), new Int32Array(nodes)];
  const [at, node] = [new Int32Array(nodes + 1), new Int32Array(entries)];
  const [kind, stage, unit] = [new Int8Array(entries), new Int32Array(entries), new Int32Array(entries)];
  let [n, e] = [0, 0];
  const put = (code: number): void => {
    const number = cellNumber(code);
    kind[e] = kindOf(code);
    stage[e] = Math.floor(number / units);
    unit[e] = number - stage[e] * units;
    node[e++] = n;
  };
  rows.forEach((row, r) => {
    let idle = 0;
    for (let k = 0; k < row.length; k++) {
      const cell = row[k];
      if (cell === IDLE) {
        idle++;
        continue;
      }
      if (cell >= 0) put(cell);
      else codesOf(order, cell).forEach(put);
      rank[n] = r;
      slots[n] = idle;
      place[n] = k;
      idle = 0;
      at[++n] = e;
    }
    bounds[r + 1] = n;
  });
  return { entries: { kind, stage, unit, peer: new Int32Array(entries).fill(-1), at, node }, bounds, rank, slots, place };
}

/** For each column the stage that a stage reads (forward) or is read by, -1 for none. */
function neighbours(edges: readonly (readonly [number, number])[], stages: number, forward: boolean): Int32Array[] {
  const lists: number[][] = Array.from({ length: stages }, () => []);
  for (const [source, target] of edges) (forward ? lists[target] : lists[source]).push(forward ? source : target);
  const width = Math.max(0, ...lists.map((list) => list.length));
  lists.forEach((list) => list.sort((one, other) => one - other));
  return Array.from({ length: width }, (_, column) => Int32Array.from(lists, (list) => list[column] ?? -1));
}

class PairList {
  private before: Int32Array;
  private after: Int32Array;
  private length = 0;

  constructor(room: number) {
    this.before = new Int32Array(room);
    this.after = new Int32Array(room);
  }

  push(before: number, after: number): void {
    if (this.length === this.before.length) {
      const [one, other] = [new Int32Array(2 * this.length + 16), new Int32Array(2 * this.length + 16)];
      one.set(this.before);
      other.set(this.after);
      [this.before, this.after] = [one, other];
    }
    this.before[this.length] = before;
    this.after[this.length++] = after;
  }

  pairs(): Pairs {
    return { before: this.before.subarray(0, this.length), after: this.after.subarray(0, this.length) };
  }
}

/**
 * The view of a changed order, as the library would describe it: the same timing graph, to the last number. `base` gives the
 * names and costs. `timed` says whether the order can run.
 */
export function viewOf(base: View, order: Order, linked: Linked, timed: boolean): View {
  const { entries, bounds, rank, slots, place } = linked;
  const nodes = rank.length;
  const placed = order.copies === base.copies || sameCopies(order.copies, base.copies);
  const structure = timed ? structureOf(order, linked, base.table.edges) : emptyStructure(linked);
  return {
    ...base,
    lowered: false,
    dependsOnCosts: false,
    copies: order.copies as number[][],
    table: { type: "schedule", name: base.table.name, placement: placed ? base.table.placement : "custom", edges: base.table.edges },
    entries,
    nodes,
    graph: { ...structure.graph, bounds, rank },
    local: structure.local,
    messages: structure.messages,
    channels: structure.channels,
    measured: null,
    findings: [],
    numFindings: 0,
    timed,
    slots: slots.some((count) => count > 0) ? slots : null,
    place,
  };
}

function sameCopies(one: Order["copies"], other: Order["copies"]): boolean {
  return one.length === other.length && one.every((copy, k) => copy.every((rank, stage) => rank === other[k][stage]));
}

interface Structure {
  graph: Omit<Graph, "bounds" | "rank">;
  local: View["local"];
  messages: Messages;
  channels: Channel[];
}

function emptyStructure(linked: Linked): Structure {
  const nodes = linked.rank.length;
  const graph = { need_at: NONE, need: NONE, send_at: NONE, gather_at: NONE, gather: NONE, received: NONE, sender: NONE, user: NONE, receive: NONE, slot: NONE };
  const messages: Messages = { before: NONE, after: NONE, maker: NONE, begun: NONE, last: NONE, source: NONE, target: NONE, channel: NONE };
  return {
    graph: { ...graph, retire: new Int32Array(nodes).fill(-1), collective: new Int8Array(nodes), ...meetings(new Int32Array(nodes).fill(-1)) },
    local: { before: NONE, after: NONE },
    messages,
    channels: [],
  };
}

function structureOf(order: Order, linked: Linked, edges: readonly (readonly [number, number])[]): Structure {
  const { entries, rank } = linked;
  const nodes = rank.length;
  const { messages, channels } = deliver(order, linked, edges);
  const count = messages.before.length;
  const sender = messages.before.map((entry) => entries.node[entry]);
  const user = messages.after.map((entry) => entries.node[entry]);
  const [send_at, need_at] = [starts(sender, nodes), starts(user, nodes)];
  const none = (length: number): Int32Array => new Int32Array(length).fill(-1);
  return {
    graph: {
      need_at,
      need: sortedBy(user, need_at),
      send_at,
      gather_at: new Int32Array(nodes + 1),
      gather: NONE,
      received: none(nodes),
      sender,
      user,
      receive: none(count),
      slot: none(count),
      retire: none(nodes),
      ...meetings(none(nodes)),
      collective: new Int8Array(nodes),
    },
    local: localPairs(linked, messages),
    messages,
    channels,
  };
}

/** For items that belong to owners, where each owner's items start. */
function starts(owner: Int32Array, count: number): Int32Array {
  const at = new Int32Array(count + 1);
  for (let k = 0; k < owner.length; k++) at[owner[k] + 1]++;
  for (let k = 0; k < count; k++) at[k + 1] += at[k];
  return at;
}

/** Items in the order of their owners, and of their numbers. */
function sortedBy(owner: Int32Array, at: Int32Array): Int32Array {
  const next = at.slice();
  const items = new Int32Array(owner.length);
  for (let k = 0; k < owner.length; k++) items[next[owner[k]]++] = k;
  return items;
}

/** The messages between ranks, in the order in which they are sent; one that several stages of a rank use is sent once. */
function deliver(order: Order, linked: Linked, edges: readonly (readonly [number, number])[]): { messages: Messages; channels: Channel[] } {
  const { entries, rank, data } = linked;
  const rankOf = (entry: number): number => rank[entries.node[entry]];
  const ranks = order.rows.length;
  const readers = new Int32Array(order.stages);
  for (const [source] of edges) readers[source]++;
  const grouped = readers.some((count) => count > 1) ? shareMessages(linked, ranks) : { begun: data.before, sent: data.before, first: data.after, last: data.after, peer: data.after.map((entry) => entries.stage[entry]) };
  const sent = bySender(grouped.sent, grouped.peer, entries.kind.length);
  const pick = (column: Int32Array): Int32Array => sent.map((k) => column[k]);
  const [before, after] = [pick(grouped.sent), pick(grouped.first)];
  const [source, target] = [before.map(rankOf), after.map(rankOf)];
  const key = source.map((from, k) => (from * ranks + target[k]) * 2 + (entries.kind[after[k]] === F ? 0 : 1));
  const keys = [...new Set(key)].sort((one, other) => one - other);
  const number = new Map(keys.map((name, k) => [name, k]));
  return {
    messages: { before, after, maker: before, begun: pick(grouped.begun), last: pick(grouped.last), source, target, channel: key.map((name) => number.get(name)!) },
    channels: keys.map((name) => [Math.floor(name / 2 / ranks), Math.floor(name / 2) % ranks, name % 2 ? "SEND_B" : "SEND_F"]),
  };
}

/** Places in the order of senders, and of the stages that they send to. */
function bySender(sent: Int32Array, peer: Int32Array, entries: number): Int32Array {
  const at = starts(sent, entries);
  const places = sortedBy(sent, at);
  for (let entry = 0; entry < entries; entry++) {
    if (at[entry + 1] - at[entry] > 1) places.subarray(at[entry], at[entry + 1]).sort((one, other) => peer[one] - peer[other] || one - other);
  }
  return places;
}

type Shared = Record<"begun" | "sent" | "first" | "last" | "peer", Int32Array>;

/** An output goes once to each rank that reads it, and the gradients of its readers there come back as one sum. */
function shareMessages({ entries, rank, data }: Linked, ranks: number): Shared {
  const span = entries.kind.length;
  const groups = new Map<number, { begun: number; sent: number; first: number; last: number; peer: number }>();
  for (let k = 0; k < data.before.length; k++) {
    const [before, after] = [data.before[k], data.after[k]];
    const forward = entries.kind[after] === F;
    const key = forward ? before * ranks + rank[entries.node[after]] : (span + after) * ranks + rank[entries.node[before]];
    const stage = entries.stage[after];
    const group = groups.get(key);
    if (!group) groups.set(key, { begun: before, sent: before, first: after, last: after, peer: stage });
    else {
      group.begun = Math.min(group.begun, before);
      group.sent = Math.max(group.sent, before);
      group.first = Math.min(group.first, after);
      group.last = Math.max(group.last, after);
      group.peer = Math.max(group.peer, stage);
    }
  }
  const sorted = [...groups.entries()].sort(([one], [other]) => one - other).map(([, group]) => group);
  const column = (name: keyof Shared): Int32Array => Int32Array.from(sorted, (group) => group[name]);
  return { begun: column("begun"), sent: column("sent"), first: column("first"), last: column("last"), peer: column("peer") };
}

/** Pairs of nodes that no message stands for, sorted by what comes after, each once. */
function localPairs({ entries, local, data }: Linked, messages: Messages): View["local"] {
  const span = entries.kind.length;
  const beside: number[] = [];
  if (messages.before.length < data.before.length) {
    const sent = new Set<number>();
    for (let k = 0; k < messages.before.length; k++) sent.add(messages.before[k] * span + messages.after[k]);
    for (let k = 0; k < data.before.length; k++) if (!sent.has(data.before[k] * span + data.after[k])) beside.push(k);
  }
  const count = local.before.length + beside.length;
  const keys = new Float64Array(count);
  const nodes = entries.at.length - 1;
  for (let k = 0; k < local.before.length; k++) keys[k] = entries.node[local.after[k]] * nodes + entries.node[local.before[k]];
  beside.forEach((k, place) => (keys[local.before.length + place] = entries.node[data.after[k]] * nodes + entries.node[data.before[k]]));
  keys.sort();
  const [before, after] = [new Int32Array(count), new Int32Array(count)];
  let kept = 0;
  for (let k = 0; k < count; k++) {
    if (k && keys[k] === keys[k - 1]) continue;
    after[kept] = Math.floor(keys[k] / nodes);
    before[kept++] = keys[k] % nodes;
  }
  return { before: before.slice(0, kept), after: after.slice(0, kept) };
}
