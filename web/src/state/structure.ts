import { computes } from "../core/figures.ts";
import { isWait, OFFLOAD, RELOAD } from "../core/kinds.ts";
import type { View } from "../core/types.ts";

/** What drawing needs of a view whatever its times: which nodes compute, and what each rank sends on. */
export interface Structure {
  /** The nodes that compute, rank after rank; those of rank r are from `computeAt[r]` up to `computeAt[r + 1]`. */
  compute: Int32Array;
  computeAt: Int32Array;
  /** The messages of each channel in the order in which they are sent. */
  ofChannel: Int32Array[];
  /** The channels that leave each rank. */
  channelsOf: number[][];
  /** One list per rank: the nodes that start a collective, a copy to the host, a copy back, and those that wait for a send or a reduction. */
  collectives: Int32Array[];
  out: Int32Array[];
  back: Int32Array[];
  waits: Int32Array[];
  /** The most actions that run together as one. */
  parts: number;
  /** The chunk of each stage in each copy of the model, and how many chunks a rank has at most. */
  chunk: number[][];
  chunks: number;
  /** Names of kinds that occur. */
  kinds: Set<string>;
}

const made = new WeakMap<View, Structure>();

/** Built once for each view. */
export function structureOf(view: View): Structure {
  let found = made.get(view);
  if (!found) made.set(view, (found = build(view)));
  return found;
}

function build(view: View): Structure {
  const compute: number[] = [];
  const computeAt = new Int32Array(view.ranks + 1);
  const beside: Pick<Structure, "collectives" | "out" | "back" | "waits"> = { collectives: [], out: [], back: [], waits: [] };
  const { at, kind } = view.entries;
  let parts = 1;
  for (let rank = 0; rank < view.ranks; rank++) {
    const started: Record<keyof typeof beside, number[]> = { collectives: [], out: [], back: [], waits: [] };
    for (let node = view.graph.bounds[rank]; node < view.graph.bounds[rank + 1]; node++) {
      if (computes(view, node) || !view.timed) compute.push(node);
      if (at[node + 1] - at[node] > parts) parts = at[node + 1] - at[node];
      if (!view.timed) continue;
      if (kind[at[node]] === OFFLOAD) started.out.push(node);
      else if (kind[at[node]] === RELOAD) started.back.push(node);
      else if (view.graph.collective[node]) started.collectives.push(node);
      else if (isWait(kind[at[node]])) started.waits.push(node);
    }
    computeAt[rank + 1] = compute.length;
    for (const name of ["collectives", "out", "back", "waits"] as const) beside[name].push(Int32Array.from(started[name]));
  }
  const kinds = new Set<string>();
  new Set(view.entries.kind).forEach((kind) => kinds.add(view.kinds[kind]));
  return { compute: Int32Array.from(compute), computeAt, ...channels(view), ...beside, parts, ...chunksOf(view), kinds };
}

function channels(view: View): Pick<Structure, "ofChannel" | "channelsOf"> {
  const lists: number[][] = view.channels.map(() => []);
  if (view.timed) view.messages.channel.forEach((channel, message) => lists[channel].push(message));
  const channelsOf: number[][] = Array.from({ length: view.ranks }, () => []);
  view.channels.forEach(([from], channel) => channelsOf[from].push(channel));
  return { ofChannel: lists.map((list) => Int32Array.from(list)), channelsOf };
}

function chunksOf(view: View): Pick<Structure, "chunk" | "chunks"> {
  const held = Array.from({ length: view.ranks }, () => [] as number[]);
  const place = (stages: number[], stage: number): number => (stages.includes(stage) ? stages.indexOf(stage) : stages.push(stage) - 1);
  const chunk = view.copies.map((copy) => copy.map((rank, stage) => place(held[rank], stage)));
  return { chunk, chunks: Math.max(1, ...held.map((stages) => stages.length)) };
}
