import { computes } from "../core/figures.ts";
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
  /** The nodes that start a collective, a list a rank. */
  collectives: Int32Array[];
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
  const collectives: Int32Array[] = [];
  for (let rank = 0; rank < view.ranks; rank++) {
    const started: number[] = [];
    for (let node = view.graph.bounds[rank]; node < view.graph.bounds[rank + 1]; node++) {
      if (computes(view, node) || !view.timed) compute.push(node);
      if (view.timed && view.graph.collective[node]) started.push(node);
    }
    computeAt[rank + 1] = compute.length;
    collectives.push(Int32Array.from(started));
  }
  const kinds = new Set<string>();
  new Set(view.entries.kind).forEach((kind) => kinds.add(view.kinds[kind]));
  return { compute: Int32Array.from(compute), computeAt, ...channels(view), collectives, ...chunksOf(view), kinds };
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
