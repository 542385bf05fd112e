// What a document holds once it is read, and what follows from it. A node is one action of one rank (an overlapped action
// is one node with several entries); a message is what crosses from one rank to another.

import type { Edit } from "./edits.ts";

export type PerAction = number | (number | number[])[];
export type PerStage = number | number[];
/** A pair is for the embedding and the head. */
export type PerRank = number | (number | [number, number])[];
export type Contention = "independent" | "pair" | "duplex" | "rank" | "links";
/** One number, or a table with one row per sending rank and one value per receiving rank. */
export type PerLink<Value> = Value | Value[][];

/** What actions take, hold and send: one number, one per stage, or one per stage and microbatch, or slice of one. */
export interface Costs {
  f: PerAction;
  i: PerAction;
  w: PerAction;
  /** Full backward; i + w where it is null. */
  b: PerAction | null;
  latency: PerLink<number>;
  activation: PerAction;
  weight_stash: PerAction;
  /** What a slice keeps for later slices of its microbatch, and the sum of its gradients. */
  kept: PerAction;
  kept_gradients: PerAction;
  overlap: number;
  output: PerAction;
  /** Unlimited where it is null. */
  bandwidth: PerLink<number | null>;
  contention: Contention;
  /** With contention "links": the out lane and the in lane of each sending and receiving rank. */
  lanes: [number, number][][] | null;
  parameters: PerStage;
  shard: PerStage;
  unshard: PerStage;
  reduce: PerStage;
  optimizer: PerStage;
  /** Copies of activations to host memory and back: the time of one without size, size per time, and how many ranks share a link. */
  host_latency: number;
  host_bandwidth: number | null;
  host_link_shared: number;
  /** A vocabulary on all ranks: each rank's share of the embedding (stage 0) or head (the last stage), the collectives around it, and what it holds from S to T. */
  s: PerAction;
  t: PerAction;
  broadcast: PerAction;
  combine: PerAction;
  logits: PerAction;
  /** How many times `s`, `t` and `logits` each rank takes or holds, if their shares differ. */
  rank_s: PerRank;
  rank_t: PerRank;
  rank_logits: PerRank;
}

/** What a rank runs on. */
export interface Device {
  name: string;
  /** How many times as fast as the costs of the model, in words: one number, or one per kind of action. */
  speed: string;
  /** The same as one number; null in views that were saved without it. */
  rate: number | null;
  node: string;
}

export interface Source {
  kind: "schedule" | "file" | "plan" | "measured";
  name: string;
  ranks?: number;
  microbatches?: number;
  chunks?: number;
  options?: Record<string, unknown>;
  lower?: boolean;
  [other: string]: unknown;
}

export interface Finding {
  rule: string;
  severity: "hang" | "wrong" | "memory" | "untidy";
  rank: number;
  step: number;
  action: string;
  message: string;
  remedy: string;
  /** The waits of a deadlock in the order in which the message tells them, or the two ends of a wrong order. */
  cycle?: CycleLink[];
  /** The changes that the remedy names, if the page can make them. */
  fix?: Edit[] | null;
  /** Of a cycle: the changes that each of its waits would need to end. */
  ways?: Edit[][];
}

/** Where an action waits, and where the action stands that it waits for: rank and step of each. */
export type CycleLink = [rank: number, step: number, neededRank: number, neededStep: number];

export interface Graph {
  /** Each rank's first node, and the number of nodes. */
  bounds: Int32Array;
  /** The rank of each node. */
  rank: Int32Array;
  need_at: Int32Array;
  need: Int32Array;
  send_at: Int32Array;
  gather_at: Int32Array;
  gather: Int32Array;
  received: Int32Array;
  sender: Int32Array;
  user: Int32Array;
  receive: Int32Array;
  slot: Int32Array;
  /** The message that a node waits to be taken, -1 for none. */
  retire: Int32Array;
  collective: Int8Array;
  /** The collective of all ranks that a node joins, -1 for other nodes; collective k is joined by the nodes join[meet_at[k]] up to join[meet_at[k + 1]]. */
  meet: Int32Array;
  meet_at: Int32Array;
  join: Int32Array;
}

export interface Entries {
  kind: Int8Array;
  stage: Int32Array;
  /** The microbatch; with slices, the number of the slice among those of all microbatches. */
  unit: Int32Array;
  /** The stage at the other end of a message that skips stages, else -1. */
  peer: Int32Array;
  /** Node n is made of the entries from at[n] up to at[n + 1]. */
  at: Int32Array;
  /** The node of each entry. */
  node: Int32Array;
}

export interface Messages {
  /** Entries: what sends it, what uses it first, what computes it. */
  before: Int32Array;
  after: Int32Array;
  maker: Int32Array;
  /** Entries: the first that adds to a sum of gradients, which the maker completes; and the last that uses it. */
  begun: Int32Array;
  last: Int32Array;
  /** Ranks. */
  source: Int32Array;
  target: Int32Array;
  channel: Int32Array;
}

/** From rank, to rank, and the kind of its sends: SEND_F activations, SEND_B gradients. */
export type Channel = [from: number, to: number, kind: string];

export interface TableInfo {
  type: "schedule" | "program";
  name: string;
  placement: string;
  edges: [number, number][];
  passes?: string;
  buffers?: unknown;
}

export interface View {
  title: string;
  source: Source;
  dependsOnCosts: boolean;
  ranks: number;
  stages: number;
  microbatches: number;
  /** How many slices each microbatch's sequences are cut into; 1 if they are not cut. */
  slices: number;
  /** Microbatches times slices: how many values per stage a table of costs has. */
  unitCount: number;
  copies: number[][];
  lowered: boolean;
  table: TableInfo;
  kinds: string[];
  entries: Entries;
  nodes: number;
  graph: Graph;
  /** Pairs of nodes that no message stands for, mostly of one rank: before must come before after. Sorted by after. */
  local: { before: Int32Array; after: Int32Array };
  messages: Messages;
  channels: Channel[];
  costs: Costs;
  /** What times and sizes are counted in, as "s" and "B"; empty if it is not known. */
  units: { time: string; size: string };
  memoryLimit: number | number[] | null;
  /** The device of each rank; null if they are not known. */
  devices: Device[] | null;
  /** The cluster that they are from, as the text of a file that the planner reads; null if it is not known. */
  cluster: string | null;
  measured: Timing | null;
  findings: Finding[];
  numFindings: number;
  /** False if the order cannot run: there is a grid and findings, and no times. */
  timed: boolean;
  /** The idle slots before each node; null without any. */
  slots: Uint16Array | null;
  /** Each node's place among the cells of its row, idle slots included; null if it is its step. */
  place: Int32Array | null;
}

/** When everything happens: one value per node or message, -1 for nodes without a collective. */
export interface Timing {
  start: Float64Array;
  end: Float64Array;
  depart: Float64Array;
  arrive: Float64Array;
  collectiveStart: Float64Array;
  collectiveEnd: Float64Array;
  /** For each message that waited for a shared link, the message that held it, else -1; empty if no link is shared. */
  heldBy: Int32Array;
  /** "simulated", or what was measured. */
  source: string;
  /** How long each rank's optimizer takes. */
  optimizer: Float64Array;
}

export type Cause = "fill" | "waiting" | "communication" | "memory" | "drain" | "overhead" | "slot";

export interface Gap {
  start: number;
  end: number;
  cause: Cause;
  /** The text of the action that was waited for, and its rank. */
  action: string | null;
  rank: number | null;
}

export interface PathStep {
  what: "action" | "message" | "collective" | "optimizer";
  rank: number;
  action: string | null;
  start: number;
  end: number;
  /** The node of an action or collective, the message of a message, -1 for the optimizer. */
  index: number;
}

export const CATEGORIES = ["activations", "weight stash", "receive buffers", "parameters"] as const;
export type Category = (typeof CATEGORIES)[number];

/** From times[k] on the rank holds held[category][k], on top of what it always keeps. */
export interface Curve {
  times: Float64Array;
  held: Record<Category, Float64Array>;
  total: Float64Array;
  fixed: number;
  peak: number;
  peakTime: number;
}

export interface Memory {
  ranks: Curve[];
  /** What the host holds of each rank's activations; null if none are moved there. */
  host: Curve[] | null;
}

export interface Numbers {
  makespan: number;
  bubble: number;
  spanBubble: number;
  peaks: number[];
  peak: number;
  messages: number;
  /** The size of all messages together. */
  bytes: number;
  idle: Record<Cause, number>;
  busy: number[];
}
