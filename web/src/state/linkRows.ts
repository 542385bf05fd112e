// Links that differ from rank to rank, as rows of a table.
import { perLink } from "../core/index.ts";
import type { Shown } from "./shown.ts";

/** Other links on a shared one that are named; of more, only their number. */
const NAMED = 2;

export interface LinkRow {
  name: string;
  latency: number;
  /** Unlimited where it is null. */
  bandwidth: number | null;
  messages: number;
  /** The other links of the table that its messages wait for. */
  shared: string;
}

/** One row per pair of ranks with messages, in the order of the ranks; none if all links are alike and none is shared. */
export function linkRows({ view, costs }: Shown): LinkRow[] {
  const { ranks, messages } = view;
  if (![costs.latency, costs.bandwidth, costs.lanes].some(Array.isArray)) return [];
  const [latency, bandwidth] = [perLink(costs.latency, ranks, "latency"), perLink(costs.bandwidth, ranks, "bandwidth")];
  const counts = new Map<number, number>();
  messages.source.forEach((from, k) => counts.set(from * ranks + messages.target[k], (counts.get(from * ranks + messages.target[k]) ?? 0) + 1));
  const pairs = [...counts.keys()].sort((one, other) => one - other).map((key) => [Math.floor(key / ranks), key % ranks]);
  const onLane = new Map<number, string[]>();
  for (const [from, to] of pairs) for (const lane of new Set(costs.lanes?.[from][to])) onLane.set(lane, [...(onLane.get(lane) ?? []), nameOf(from, to)]);
  return pairs.map(([from, to]) => {
    const name = nameOf(from, to);
    const others = [...new Set((costs.lanes?.[from][to] ?? []).flatMap((lane) => onLane.get(lane)!))].filter((other) => other !== name);
    const shared = others.length > NAMED ? `${others.length} others` : others.join(", ");
    return { name, latency: latency(from, to), bandwidth: bandwidth(from, to), messages: counts.get(from * ranks + to)!, shared };
  });
}

function nameOf(from: number, to: number): string {
  return `${from} → ${to}`;
}
