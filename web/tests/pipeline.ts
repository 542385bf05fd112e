// Documents of GPipe pipelines, made here by hand: all forwards, then all backwards, a stage a rank.
import { readDocument, type View } from "../src/core/index.ts";

export interface Wanted {
  ranks: number;
  microbatches: number;
  costs?: Record<string, unknown>;
  more?: Record<string, unknown>;
}

const KINDS = ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B", "WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"];

/** Node of F or B of a microbatch on a rank. */
function node(microbatches: number, rank: number, kind: 0 | 1, microbatch: number): number {
  return rank * 2 * microbatches + kind * microbatches + microbatch;
}

export function gpipeDocument({ ranks, microbatches, costs = {}, more = {} }: Wanted): Record<string, unknown> {
  const nodes = 2 * ranks * microbatches;
  const place = (rank: number, kind: 0 | 1, microbatch: number): number => node(microbatches, rank, kind, microbatch);
  const all = Array.from({ length: nodes }, (_, each) => each);
  const rankOf = (each: number): number => Math.floor(each / (2 * microbatches));
  const kindOf = (each: number): 0 | 1 => (Math.floor(each / microbatches) % 2 ? 1 : 0);
  const microbatchOf = (each: number): number => each % microbatches;
  const messages = all.flatMap((each) => {
    const to = rankOf(each) + (kindOf(each) ? -1 : 1);
    return to < 0 || to >= ranks ? [] : [{ from: each, to: place(to, kindOf(each), microbatchOf(each)) }];
  });
  const channels: [number, number, string][] = [];
  for (let rank = 0; rank + 1 < ranks; rank++) channels.push([rank, rank + 1, "SEND_F"], [rank + 1, rank, "SEND_B"]);
  const channelOf = (message: { from: number; to: number }): number =>
    channels.findIndex(([from, to]) => from === rankOf(message.from) && to === rankOf(message.to));
  const need = messages.map((_, k) => k).sort((one, other) => messages[one].to - messages[other].to || one - other);
  const starts = (ends: number[]): number[] => Array.from({ length: nodes + 1 }, (_, each) => ends.filter((end) => end < each).length);
  const none = all.map(() => -1);
  const locals = all.filter((each) => kindOf(each)).map((each) => ({ before: each - microbatches, after: each }));
  return {
    format: "penstock",
    type: "view",
    version: 1,
    title: `gpipe, ${ranks} ranks, ${microbatches} microbatches`,
    source: { kind: "schedule", name: "gpipe", ranks, microbatches, chunks: 1, options: {} },
    depends_on_costs: false,
    ranks,
    stages: ranks,
    microbatches,
    copies: [Array.from({ length: ranks }, (_, rank) => rank)],
    lowered: false,
    table: { type: "schedule", name: "gpipe", placement: "linear", edges: Array.from({ length: ranks - 1 }, (_, k) => [k, k + 1]) },
    kinds: KINDS,
    entries: { kind: all.map(kindOf), stage: all.map(rankOf), microbatch: all.map(microbatchOf), peer: none, at: [...all, nodes] },
    timed: true,
    graph: {
      bounds: Array.from({ length: ranks + 1 }, (_, rank) => rank * 2 * microbatches),
      need_at: starts(messages.map(({ to }) => to)),
      need,
      send_at: starts(messages.map(({ from }) => from)),
      gather_at: [...none.map(() => 0), 0],
      gather: [],
      received: none,
      sender: messages.map(({ from }) => from),
      user: messages.map(({ to }) => to),
      receive: messages.map(() => -1),
      slot: messages.map(() => -1),
      collective: all.map(() => 0),
    },
    local: { after: locals.map(({ after }) => after), before: locals.map(({ before }) => before) },
    messages: {
      before: messages.map(({ from }) => from),
      after: messages.map(({ to }) => to),
      maker: messages.map(({ from }) => from),
      begun: messages.map(({ from }) => from),
      last: messages.map(({ to }) => to),
      source: messages.map(({ from }) => rankOf(from)),
      target: messages.map(({ to }) => rankOf(to)),
      channel: messages.map(channelOf),
    },
    channels,
    costs,
    memory_limit: null,
    measured: null,
    findings: [],
    num_findings: 0,
    ...more,
  };
}

export function gpipe(wanted: Wanted): View {
  return readDocument(gpipeDocument(wanted));
}

/** Numbers from 0 to 1 that are the same in every run. */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
