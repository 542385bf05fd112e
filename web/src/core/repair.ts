import { checkedView } from "./check.ts";
import { applyEdit, applyEdits, type Edit } from "./edits.ts";
import { IDLE, type Order } from "./order.ts";
import { linkOrder, type Linked } from "./rebuild.ts";
import type { Finding, View } from "./types.ts";

/** Missing, repeated and misplaced actions that are put right one by one. */
const MOST = 2000;
/** Actions that are looked at to find the repair with the fewest moves, and remedies that are followed one after the other; beyond that, any repair will do. */
const WORK = 1_000_000;
const MOST_REMEDIES = 30;

/** The changes after which an order has no finding, or null if there are none that the page can make. */
export function repair(base: View, order: Order): Edit[] | null {
  const edits: Edit[] = [];
  let now = order;
  for (let k = 0; k < MOST; k++) {
    const { findings } = checkedView(base, now);
    if (!findings.length) return edits;
    const lacking = findings.find((finding) => finding.rule === "complete" || finding.rule === "placed");
    const fix = lacking ? (lacking.fix ?? null) : sort(base, now, findings);
    if (!fix?.length) return null;
    edits.push(...fix);
    now = applyEdits(now, fix, base.table.edges);
  }
  return null;
}

/** Moves after which all actions come after what they need: the fewest that are found, moving actions of one rank of a hang if possible. */
function sort(base: View, order: Order, findings: Finding[]): Edit[] | null {
  const ranks = new Set(findings.flatMap((finding) => (finding.cycle ?? []).map(([rank]) => rank)));
  const tries = Math.max(1, Math.floor(WORK / Math.max(1, base.nodes)));
  let best: Edit[] | null = null;
  for (const rank of [...ranks].slice(0, tries)) {
    const edits = followRemedies(base, order, rank, Math.min(MOST_REMEDIES, Math.ceil(tries / ranks.size)));
    if (edits && (!best || edits.length < best.length)) best = edits;
  }
  return best ?? hoist(order, linkOrder(order, base.table.edges));
}

/** Remedies one after the other, on one rank wherever they leave a choice; null if they come to no end. */
function followRemedies(base: View, order: Order, rank: number, most: number): Edit[] | null {
  const edits: Edit[] = [];
  let now = order;
  for (let k = 0; k <= most; k++) {
    const [finding] = checkedView(base, now).findings;
    if (!finding) return edits;
    const fix = finding.ways?.find(([edit]) => edit?.what === "move" && edit.rank === rank) ?? finding.fix;
    if (!fix?.length) return null;
    edits.push(...fix);
    now = applyEdits(now, fix, base.table.edges);
  }
  return null;
}

/** Moves forward what a rank could run whenever no rank can go on: the action that is the fewest steps away. Null if there is none. */
function hoist(order: Order, linked: Linked): Edit[] | null {
  const { bounds, rank, place, local, data, entries } = linked;
  const nodes = rank.length;
  const waiting = new Int32Array(nodes);
  const readers: number[][] = Array.from({ length: nodes }, () => []);
  for (const { before, after } of [local, data]) {
    before.forEach((entry, k) => {
      waiting[entries.node[after[k]]]++;
      readers[entries.node[entry]].push(entries.node[after[k]]);
    });
  }
  const left = Array.from({ length: bounds.length - 1 }, (_, r) => Array.from({ length: bounds[r + 1] - bounds[r] }, (_, k) => bounds[r] + k));
  const at = left.map(() => 0);
  const edits: Edit[] = [];
  let cells = order.rows.map((_, r) => left[r].map((node) => place[node]));
  const advance = (): void => {
    for (let moved = true; moved; ) {
      moved = false;
      left.forEach((row, r) => {
        for (; at[r] < row.length && !waiting[row[at[r]]]; at[r]++) {
          readers[row[at[r]]].forEach((node) => waiting[node]--);
          moved = true;
        }
      });
    }
  };
  for (advance(); left.some((row, r) => at[r] < row.length); advance()) {
    let best: { rank: number; from: number } | null = null;
    left.forEach((row, r) => {
      const from = row.findIndex((node, k) => k > at[r] && !waiting[node]);
      if (from >= 0 && (!best || from - at[r] < best.from - at[best.rank])) best = { rank: r, from };
    });
    if (!best) return null; // what it needs is needed by itself
    const { rank: r, from } = best as { rank: number; from: number };
    const edit: Edit = { what: "move", rank: r, from: cells[r][from], to: cells[r][at[r]] };
    edits.push(edit);
    left[r].splice(at[r], 0, ...left[r].splice(from, 1));
    order = applyEdit(order, edit, []);
    cells = cells.map((old, other) => (other === r ? order.rows[r].flatMap((cell, k) => (cell === IDLE ? [] : [k])) : old));
  }
  return edits;
}
