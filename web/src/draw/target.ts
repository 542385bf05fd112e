import { isWait, OFFLOAD, RELOAD } from "../core/kinds.ts";
import type { View } from "../core/types.ts";
import type { Shown } from "../state/shown.ts";
import { rowOf, type Layout, type Row, type Strip, partAt } from "./layout.ts";
import { optimizerSpan } from "./rows.ts";
import { toTime, toX, type Scale } from "./span.ts";
import { boxAt } from "./visible.ts";

/** Something on screen that can be pointed at; `panel` says in which timeline. */
export type Target =
  | { what: "action"; panel: number; index: number }
  | { what: "measured"; panel: number; index: number }
  | { what: "message"; panel: number; index: number }
  | { what: "collective"; panel: number; index: number }
  | { what: "wait"; panel: number; index: number }
  | { what: "finding"; panel: number; index: number }
  | { what: "optimizer"; panel: number; rank: number }
  | { what: "gap"; panel: number; rank: number; time: number }
  | { what: "memory"; panel: number; rank: number; time: number }
  | { what: "host"; panel: number; rank: number; time: number };

export interface Place {
  layout: Layout;
  scale: Scale;
  panels: Shown[];
}

/** How near a thin box the pointer must be, in pixels. */
const REACH = 3;

/** What is at a point of the content, in pixels below the axis. */
export function targetAt(place: Place, x: number, y: number): Target | null {
  const found = partAt(place.layout, y);
  if (!found || x < place.scale.left) return null;
  const { row, part } = found;
  const shown = place.panels[row.panel];
  const time = toTime(place.scale, x);
  const reach = (REACH * (place.scale.to - place.scale.from)) / place.scale.width;
  if (part.what === "memory" || part.what === "host") return time <= shown.length ? { what: part.what, panel: row.panel, rank: row.rank, time } : null;
  if (part.what === "measured") return shown.beside ? named("measured", row.panel, boxAt(shown.beside.computeLane(row.rank), time)) : null;
  if (part.what === "channel") return named("message", row.panel, boxAt(shown.channelLane(part.channel), time, reach));
  if (part.what === "waits") return named("wait", row.panel, boxAt(shown.waitLane(row.rank), time, reach));
  if (part.what !== "compute") return named("collective", row.panel, boxAt(shown.besideLane(part.what, row.rank), time, reach));
  return computeAt(shown, row, time);
}

function computeAt(shown: Shown, row: Row, time: number): Target | null {
  const finding = findingAt(shown, row.rank, Math.floor(time));
  if (!shown.timed && finding >= 0) return { what: "finding", panel: row.panel, index: finding };
  const node = boxAt(shown.computeLane(row.rank), time);
  if (node >= 0) return { what: "action", panel: row.panel, index: node };
  const step = optimizerSpan(shown, row.rank);
  if (shown.timing.optimizer[row.rank] > 0 && time >= step.start && time < step.end) {
    return { what: "optimizer", panel: row.panel, rank: row.rank };
  }
  return shown.gapAt(row.rank, time) ? { what: "gap", panel: row.panel, rank: row.rank, time } : null;
}

/** The verifier's finding at a step of a grid. */
export function findingAt(shown: Shown, rank: number, step: number): number {
  return shown.view.findings.findIndex((each) => each.rank === rank && each.step === step);
}

/** A node on screen: its action, or what it starts beside the computation. */
export function nodeTarget(view: View, panel: number, node: number): Target {
  const kind = view.entries.kind[view.entries.at[node]];
  const what = isWait(kind) ? "wait" : view.timed && view.graph.collective[node] ? "collective" : "action";
  return { what, panel, index: node };
}

function named(what: "measured" | "message" | "collective" | "wait", panel: number, index: number): Target | null {
  return index < 0 ? null : { what, panel, index };
}

export interface Box extends Strip {
  x: number;
  width: number;
}

/** Where a target is drawn. */
export function boxOf(place: Place, target: Target): Box {
  const shown = place.panels[target.panel];
  const { start, end, depart, arrive, collectiveStart, collectiveEnd } = shown.timing;
  const at = (strip: Strip, from: number, to: number): Box => {
    const x = toX(place.scale, from);
    return { x, width: Math.max(1.5, toX(place.scale, to) - x), top: strip.top, height: strip.height };
  };
  if (target.what === "message") {
    const lane = messageLane(place, target.panel, target.index);
    return at(lane, depart[target.index], arrive[target.index]);
  }
  if (target.what === "finding") {
    const { rank, step } = shown.view.findings[target.index];
    return at(rowOf(place.layout, target.panel, rank).compute, ...findingSpan(shown, rank, step));
  }
  const rank = "rank" in target ? target.rank : shown.view.graph.rank[target.index];
  const row = rowOf(place.layout, target.panel, rank);
  if (target.what === "measured" && shown.beside) return at(row.measured ?? row.compute, shown.beside.timing.start[target.index], shown.beside.timing.end[target.index]);
  if (target.what === "action") return at(row.compute, start[target.index], end[target.index]);
  if (target.what === "collective") return at(besideStrip(row, shown.view, target.index), collectiveStart[target.index], collectiveEnd[target.index]);
  if (target.what === "wait") return at(row.waits ?? row.compute, shown.waited[target.index], start[target.index]);
  if (target.what === "memory" || target.what === "host") return at(row[target.what] ?? row.compute, target.time, target.time);
  if (target.what === "measured") return at(row.compute, start[target.index], end[target.index]);
  if (target.what === "optimizer") {
    const step = optimizerSpan(shown, rank);
    return at(row.compute, step.start, step.end);
  }
  const gap = shown.gapAt(rank, target.time);
  return at(row.compute, gap?.start ?? target.time, gap?.end ?? target.time);
}

/** Where the collective or copy of a node runs; the end of its rank's row if such lanes are not shown. */
function besideStrip(row: Row, view: View, node: number): Strip {
  const kind = view.entries.kind[view.entries.at[node]];
  const strip = kind === OFFLOAD ? row.out : kind === RELOAD ? row.back : row.collectives;
  return strip ?? { top: row.compute.top + row.compute.height - 2, height: 4 };
}

/** A message's lane, or its sender's row if lanes are not shown. */
function messageLane(place: Place, panel: number, message: number): Strip {
  const { messages } = place.panels[panel].view;
  const row = rowOf(place.layout, panel, messages.source[message]);
  const lane = row.lanes.find((each) => each.channel === messages.channel[message]);
  return lane ?? { top: row.compute.top + row.compute.height - 2, height: 4 };
}

/** From when to when a finding is drawn: its action's times, or one step of a grid. */
export function findingSpan(shown: Shown, rank: number, step: number): [number, number] {
  if (!shown.timed) return [step, step + 1];
  const { bounds } = shown.view.graph;
  const node = Math.min(bounds[rank] + step, bounds[rank + 1] - 1);
  return [shown.timing.start[node], shown.timing.end[node]];
}
