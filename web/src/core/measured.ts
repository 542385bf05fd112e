import { finishedOf, indexOfMost } from "./figures.ts";
import { cut, tail } from "./gaps.ts";
import { isSend } from "./kinds.ts";
import { actionText, entryText } from "./text.ts";
import type { Gap, PathStep, Timing, View } from "./types.ts";
import { type Waits, waitsOf } from "./waits.ts";

type Piece = Parameters<typeof cut>[2][number];

/** The idle times of a measured rank: everything but computation and the optimizer's step. */
export function measuredGaps(view: View, timing: Timing, rank: number): Gap[] {
  const waits = waitsOf(view, timing);
  const found: Gap[] = [];
  let clock = 0;
  for (let place = 0; place < waits.node.length; place++) {
    if (waits.rank[place] !== rank) continue;
    const [start, end] = [timing.start[waits.node[place]], timing.end[waits.node[place]]];
    if (start > waits.free[place]) {
      const first = waits.before[place] < 0;
      if (first) found.push({ start: 0, end: start, cause: "fill", action: null, rank: null });
      else found.push(...cut(waits.free[place], start, causesOf(view, timing, waits, place)));
    }
    clock = Math.max(clock, end);
  }
  return [...found, ...tail(view, timing, rank, clock)];
}

/** What was waited for and until when, in the order in which a program comes to it. */
function causesOf(view: View, timing: Timing, waits: Waits, place: number): Piece[] {
  const [node, rank] = [waits.node[place], waits.rank[place]];
  return [
    ...ownSends(view, timing, waits, place),
    ...messageCauses(view, timing, waits, waits.message[place]),
    ...gatherCauses(view, timing, node),
    { until: timing.start[node], cause: "overhead", action: actionText(view, node), rank },
  ];
}

function ownSends(view: View, timing: Timing, waits: Waits, place: number): Piece[] {
  const found: Piece[] = [];
  for (let own = waits.node[place - 1] + 1; own < waits.node[place]; own++) {
    if (isSend(view.entries.kind[view.entries.at[own]])) found.push(...sending(view, timing, waits, own, timing.end[own - 1]));
  }
  return found;
}

function messageCauses(view: View, timing: Timing, waits: Waits, message: number): Piece[] {
  if (message < 0) return [];
  const { graph, messages } = view;
  const [sender, rank, made] = [graph.sender[message], messages.source[message], entryText(view, messages.maker[message])];
  const ended = timing.end[waits.node[makerOf(view, waits, message)]];
  return [
    { until: ended, cause: "waiting", action: made, rank },
    ...sending(view, timing, waits, sender, ended),
    { until: timing.arrive[message], cause: "communication", action: made, rank },
  ];
}

/** A send begins when it has a slot; what it takes from there on is its own. */
function sending(view: View, timing: Timing, waits: Waits, send: number, free: number): Piece[] {
  const [start, end, action, rank] = [timing.start[send], timing.end[send], actionText(view, send), view.graph.rank[send]];
  const found: Piece[] = [];
  if (start - free > waits.negligible) found.push({ until: start, cause: "memory", action, rank });
  if (end - Math.max(start, free) > waits.negligible) found.push({ until: end, cause: "overhead", action, rank });
  return found;
}

function gatherCauses(view: View, timing: Timing, node: number): Piece[] {
  const { gather, gather_at, rank } = view.graph;
  return Array.from(gather.subarray(gather_at[node], gather_at[node + 1]), (each) => ({
    until: timing.collectiveEnd[each],
    cause: "communication",
    action: actionText(view, each),
    rank: rank[node],
  }));
}

/** The computation that makes a message. */
function makerOf(view: View, waits: Waits, message: number): number {
  return waits.place[view.entries.node[view.messages.maker[message]]];
}

/** The chain from the start to the end: each piece began after the one before it, and would not have before. */
export function measuredPath(view: View, timing: Timing): PathStep[] {
  const waits = waitsOf(view, timing);
  const finished = finishedOf(view, timing);
  const rank = indexOfMost(finished);
  const found: PathStep[] = [optimizerStep(rank, finished[rank], timing.optimizer[rank])];
  const seen = new Set<number>(); // a file can hold an order that leads in a circle
  let place = waits.rank.lastIndexOf(rank);
  while (place >= 0 && !seen.has(place)) {
    seen.add(place);
    const node = waits.node[place];
    const here = { rank: waits.rank[place] };
    found.push({ what: "action", ...here, action: actionText(view, node), start: timing.start[node], end: timing.end[node], index: node });
    const message = waits.message[place];
    if (waitedForMessage(timing, waits, place)) {
      const action = entryText(view, view.messages.before[message]);
      found.push({ what: "message", ...here, action, start: timing.depart[message], end: timing.arrive[message], index: message });
      place = makerOf(view, waits, message);
    } else place = waits.before[place];
  }
  return found.reverse().filter((step) => step.end > step.start);
}

/** Whether a computation began so late for its message, and not for what its rank computed before. */
function waitedForMessage(timing: Timing, waits: Waits, place: number): boolean {
  const [message, free] = [waits.message[place], waits.free[place]];
  const waited = timing.start[waits.node[place]] - free > waits.negligible;
  return message >= 0 && waited && timing.arrive[message] > free;
}

export function optimizerStep(rank: number, finished: number, takes: number): PathStep {
  return { what: "optimizer", rank, action: null, start: finished - takes, end: finished, index: -1 };
}
