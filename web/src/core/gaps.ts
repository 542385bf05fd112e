import { computes, finishedOf } from "./figures.ts";
import { measuredGaps } from "./measured.ts";
import { actionText, entryText } from "./text.ts";
import type { Gap, Timing, View } from "./types.ts";

/** The rank's idle times in order, from 0 to the makespan, each with its cause. */
export function gapsOf(view: View, timing: Timing, rank: number): Gap[] {
  return timing.source === "simulated" ? simulatedGaps(view, timing, rank) : measuredGaps(view, timing, rank);
}

function simulatedGaps(view: View, timing: Timing, rank: number): Gap[] {
  const { bounds } = view.graph;
  const found: Gap[] = [];
  let clock = 0;
  let begun = false;
  for (let node = bounds[rank]; node < bounds[rank + 1]; node++) {
    const start = timing.start[node];
    if (!begun && computes(view, node)) {
      if (start > 0) found.push({ start: 0, end: start, cause: "fill", action: null, rank: null });
      begun = true;
      clock = start;
    }
    if (begun && start > clock) found.push(...waitsOf(view, timing, node, clock, start));
    clock = Math.max(clock, timing.end[node]);
  }
  return [...found, ...tail(view, timing, rank, clock)];
}

/** What follows the last action: the optimizer's step is work, the rest drains. */
export function tail(view: View, timing: Timing, rank: number, clock: number): Gap[] {
  const finished = finishedOnce(view, timing);
  const [ended, step] = [finished[rank], timing.optimizer[rank]];
  const makespan = finished.reduce((most, time) => Math.max(most, time), 0);
  const pieces = [
    [clock, step ? ended - step : clock],
    [step ? ended : clock, makespan],
  ];
  return pieces.filter(([start, end]) => end > start).map(([start, end]) => ({ start, end, cause: "drain", action: null, rank: null }));
}

const known = new WeakMap<Timing, Float64Array>();

/** Every rank asks for the ends of all. */
function finishedOnce(view: View, timing: Timing): Float64Array {
  const found = known.get(timing) ?? finishedOf(view, timing);
  known.set(timing, found);
  return found;
}

/** One idle time before a node: for another rank to act, for a slot to send what it made, and for that to arrive. */
function waitsOf(view: View, timing: Timing, node: number, clock: number, start: number): Gap[] {
  const { graph, messages } = view;
  const gathers = graph.gather_at[node] < graph.gather_at[node + 1];
  if (!computes(view, node) && !gathers) return [{ start: clock, end: start, cause: "memory", action: actionText(view, node), rank: graph.rank[node] }];
  const message = graph.need.subarray(graph.need_at[node], graph.need_at[node + 1]).find((each) => timing.arrive[each] === start);
  if (message === undefined && view.slots?.[node]) return [{ start: clock, end: start, cause: "slot", action: actionText(view, node), rank: graph.rank[node] }];
  if (message === undefined) {
    const last = lastGather(view, timing, node);
    return cut(clock, start, [...lateJoin(view, timing, last), { until: start, cause: "communication", action: actionText(view, last), rank: graph.rank[last] }]);
  }
  const sender = graph.sender[message];
  let computed = sender; // from its end on the sender waits for slots and its sends
  while (!computes(view, computed)) computed--;
  let blocked = sender;
  while (blocked > computed && timing.start[blocked] <= timing.end[blocked - 1]) blocked--;
  if (blocked === computed) blocked = sender;
  const made = entryText(view, messages.maker[message]);
  const pieces: [number, Gap["cause"], string][] = [
    [timing.end[computed], "waiting", made],
    [timing.end[sender], "memory", actionText(view, blocked)],
    [start, "communication", made],
  ];
  return cut(
    clock,
    start,
    pieces.map(([until, cause, action]) => ({ until, cause, action, rank: messages.source[message] })),
  );
}

interface Piece {
  until: number;
  cause: Gap["cause"];
  action: string;
  rank: number;
}

/** Until the last rank has joined the collective of all ranks that a node joins, if it does: the computation that kept it. */
function lateJoin(view: View, timing: Timing, node: number): Piece[] {
  const { meet, meet_at, join, rank, bounds } = view.graph;
  if (meet[node] < 0) return [];
  const joins = join.subarray(meet_at[meet[node]], meet_at[meet[node] + 1]);
  const latest = joins.reduce((found, each) => (timing.end[each] > timing.end[found] ? each : found), joins[0]);
  if (rank[latest] === rank[node]) return [];
  let kept = latest;
  while (kept >= bounds[rank[latest]] && !computes(view, kept)) kept--;
  return kept < bounds[rank[latest]] ? [] : [{ until: timing.end[latest], cause: "waiting", action: actionText(view, kept), rank: rank[latest] }];
}

/** One idle time in pieces: each lasts until what it waited for, and none beyond the end. */
export function cut(clock: number, end: number, pieces: Piece[]): Gap[] {
  const found: Gap[] = [];
  for (const { until, cause, action, rank } of pieces) {
    const stop = Math.min(until, end);
    if (stop > clock) {
      found.push({ start: clock, end: stop, cause, action, rank });
      clock = stop;
    }
  }
  return found;
}

/** The gather that ended last of those that a node waits for. */
function lastGather(view: View, timing: Timing, node: number): number {
  const { graph } = view;
  let last = -1;
  for (const each of graph.gather.subarray(graph.gather_at[node], graph.gather_at[node + 1])) {
    if (last < 0 || timing.collectiveEnd[each] > timing.collectiveEnd[last]) last = each;
  }
  return last < 0 ? node : last;
}

const SAID: Record<Gap["cause"], (gap: Gap) => string> = {
  fill: () => "the pipeline fills",
  drain: () => "the pipeline drains",
  waiting: (gap) => `waits for ${gap.action} on rank ${gap.rank}`,
  communication: (gap) => isJoinText(gap.action) ? `waits for ${gap.action} of all ranks` : `waits for the ${isCopyText(gap.action) ? "copy" : "message"} of ${gap.action} from rank ${gap.rank}`,
  memory: (gap) => `waits ${gap.action?.includes("WAIT_") ? "in" : "for a slot to send"} ${gap.action}`,
  slot: (gap) => `an idle slot before ${gap.action}`,
  overhead: (gap) => `has all that ${gap.action} needs`,
};

/** Whether an action, as it is written, moves an activation to host memory or back. */
function isCopyText(action: string | null): boolean {
  return /^\d+(OFFLOAD|RELOAD)/.test(action ?? "");
}

/** Whether an action, as it is written, joins a collective of all ranks. */
export function isJoinText(action: string | null): boolean {
  return /^\d+(BROADCAST|COMBINE)/.test(action ?? "");
}

/** Why a rank stands idle, in words. */
export function gapText(gap: Gap): string {
  return SAID[gap.cause](gap);
}
