// Links that differ from rank to rank, as rows of a table.
import { perLink } from "../core/index.ts";
import type { Shown } from "./shown.ts";

/** Other links on a shared one that are named; of more, only their number. */
const NAMED = 2;
/** How many times as long as on the fastest link a message takes on a slow one. */
const SLOW = 2;

export interface LinkRow {
  name: string;
  latency: number;
  /** Unlimited where it is null. */
  bandwidth: number | null;
  messages: number;
  /** The other links of the table that its messages wait for. */
  shared: string;
  /** Whether a message takes at least twice as long as on the fastest link of the table. */
  slow: boolean;
}

/** One row per pair of ranks with messages, in the order of the ranks; none if all links are alike and none is shared. */
export function linkRows(shown: Shown): LinkRow[] {
  const { view, costs } = shown;
  const { ranks, messages } = view;
  if (![costs.latency, costs.bandwidth, costs.lanes].some(Array.isArray)) return [];
  const [latency, bandwidth] = [perLink(costs.latency, ranks, "latency"), perLink(costs.bandwidth, ranks, "bandwidth")];
  const counts = new Map<number, number>();
  messages.source.forEach((from, k) => counts.set(from * ranks + messages.target[k], (counts.get(from * ranks + messages.target[k]) ?? 0) + 1));
  const pairs = [...counts.keys()].sort((one, other) => one - other).map((key) => [Math.floor(key / ranks), key % ranks]);
  const onLane = new Map<number, string[]>();
  for (const [from, to] of pairs) for (const lane of new Set(costs.lanes?.[from][to])) onLane.set(lane, [...(onLane.get(lane) ?? []), nameOf(from, to)]);
  const slow = slowLinks(shown);
  return pairs.map(([from, to]) => {
    const name = nameOf(from, to);
    const others = [...new Set((costs.lanes?.[from][to] ?? []).flatMap((lane) => onLane.get(lane)!))].filter((other) => other !== name);
    const shared = others.length > NAMED ? `${others.length} others` : others.join(", ");
    return { name, latency: latency(from, to), bandwidth: bandwidth(from, to), messages: counts.get(from * ranks + to)!, shared, slow: slow.has(from * ranks + to) };
  });
}

const known = new WeakMap<Shown, Set<number>>();

/** The links, as sender times ranks plus receiver, on which a message of the mean size takes far longer than on the fastest that is used. */
export function slowLinks(shown: Shown): Set<number> {
  let found = known.get(shown);
  if (!found) known.set(shown, (found = findSlow(shown)));
  return found;
}

function findSlow({ view, costs, sizes }: Shown): Set<number> {
  const { ranks, messages } = view;
  if (![costs.latency, costs.bandwidth].some(Array.isArray) || !sizes.length) return new Set();
  const [latency, bandwidth] = [perLink(costs.latency, ranks, "latency"), perLink(costs.bandwidth, ranks, "bandwidth")];
  const size = sizes.reduce((sum, each) => sum + each, 0) / sizes.length;
  const takes = new Map<number, number>();
  messages.source.forEach((from, k) => takes.set(from * ranks + messages.target[k], latency(from, messages.target[k]) + size / (bandwidth(from, messages.target[k]) ?? Infinity)));
  const least = Math.min(...takes.values());
  return new Set([...takes].filter(([, time]) => time > 0 && time >= SLOW * least).map(([link]) => link));
}

function nameOf(from: number, to: number): string {
  return `${from} → ${to}`;
}
