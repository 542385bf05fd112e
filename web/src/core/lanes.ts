import { isCopy, isJoin, OFFLOAD, RELOAD } from "./kinds.ts";
import type { Costs, View } from "./types.ts";

/** Where collectives and copies run beside the computation: one after the other on each lane. */
export interface Lanes {
  /** The lane on which a node starts a collective or a copy, -1 for other nodes. */
  of: Int32Array;
  count: number;
  /** Whether several ranks start copies on one lane. */
  shared: boolean;
}

/** One lane per rank for collectives, then one per link to the host out, and one back, and one for the collectives that all ranks join. */
export function lanesOf(view: View, costs: Costs): Lanes {
  const { entries, graph, ranks, nodes } = view;
  const among = costs.host_link_shared;
  const links = Math.ceil(ranks / among);
  const of = new Int32Array(nodes).fill(-1);
  let copies = false;
  for (let node = 0; node < nodes; node++) {
    if (!graph.collective[node]) continue;
    const [kind, rank] = [entries.kind[entries.at[node]], graph.rank[node]];
    of[node] = isJoin(kind) ? ranks + 2 * links : isCopy(kind) ? ranks + (kind === RELOAD ? links : 0) + Math.floor(rank / among) : rank;
    copies ||= isCopy(kind);
  }
  return { of, count: ranks + 2 * links + 1, shared: copies && among > 1 };
}

/** Whether a view moves activations to host memory. */
export function hasCopies(view: View): boolean {
  return view.entries.kind.includes(OFFLOAD) || view.entries.kind.includes(RELOAD);
}
