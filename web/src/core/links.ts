import type { View } from "./types.ts";

export interface Link {
  /** The node at the other end. */
  node: number;
  /** The message that leads there, -1 on the same rank and if another action of the rank has taken it before. */
  message: number;
}

/** What a node needs: on its own rank, and by message from others. */
export function needsOf(view: View, node: number): Link[] {
  const { graph, local } = view;
  const own: Link[] = [];
  for (let k = firstAt(local.after, node); k < local.after.length && local.after[k] === node; k++) {
    if (local.before[k] !== node) own.push({ node: local.before[k], message: -1 });
  }
  const far = view.timed ? graph.need.subarray(graph.need_at[node], graph.need_at[node + 1]) : [];
  return [...own, ...Array.from(far, (message) => ({ node: graph.sender[message], message }))];
}

/** What needs a node: on its own rank, and by message on others. */
export function unblocksOf(view: View, node: number): Link[] {
  if (!view.timed) return [];
  const { graph } = view;
  const { at, order } = afterTable(view);
  const own = Array.from(order.subarray(at[node], at[node + 1]), (k) => ({ node: view.local.after[k], message: -1 }));
  const found = own.filter((link) => link.node !== node);
  for (let message = graph.send_at[node]; message < graph.send_at[node + 1]; message++) {
    found.push({ node: graph.user[message], message });
  }
  return found;
}

interface Table {
  at: Int32Array;
  order: Int32Array;
}

const tables = new WeakMap<View, Table>();

/** The pairs of one rank by what comes before; made once for a view. */
function afterTable(view: View): Table {
  const known = tables.get(view);
  if (known) return known;
  const { before } = view.local;
  const at = new Int32Array(view.nodes + 1);
  for (const node of before) at[node + 1]++;
  for (let node = 0; node < view.nodes; node++) at[node + 1] += at[node];
  const next = at.slice();
  const order = new Int32Array(before.length);
  before.forEach((node, k) => (order[next[node]++] = k));
  tables.set(view, { at, order });
  return { at, order };
}

function firstAt(sorted: Int32Array, wanted: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
