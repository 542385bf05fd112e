import { actionText, entryText, gapText, isJoinText, kinds, perShare, type Gap, type PerAction } from "../core/index.ts";
import { optimizerSpan } from "../draw/rows.ts";
import type { Target } from "../draw/target.ts";
import { signed } from "../draw/span.ts";
import { lastAt } from "../draw/visible.ts";
import type { Shown } from "./shown.ts";
import { slowLinks } from "./linkRows.ts";
import { makerOf } from "./related.ts";

export type Fact = [name: string, value: string];

/** Something on screen in words. */
export interface Said {
  title: string;
  what: string;
  facts: Fact[];
}

const KINDS: Record<string, string> = {
  F: "forward",
  B: "full backward",
  I: "backward for the input",
  W: "backward for the weights",
  SEND_F: "send of an activation",
  RECV_F: "receive of an activation",
  SEND_B: "send of a gradient",
  RECV_B: "receive of a gradient",
  UNSHARD: "gather of parameters",
  RESHARD: "freeing of parameters",
  REDUCE_GRAD: "reduction of gradients",
  WAIT_SEND_F: "wait until an activation is sent",
  WAIT_SEND_B: "wait until a gradient is sent",
  WAIT_REDUCE_GRAD: "wait until gradients are reduced",
  OFFLOAD: "copy of an activation to host memory",
  RELOAD: "copy of an activation back from host memory",
  S: "share of the vocabulary: logits or embeddings",
  T: "weight gradients of the share of the vocabulary",
  BROADCAST: "broadcast of what the shares need, joined by all ranks",
  COMBINE: "what the shares have made, put together by all ranks",
};

export const CAUSES: Record<Gap["cause"], string> = {
  fill: "filling the pipeline",
  waiting: "waiting for another rank",
  communication: "waiting for communication",
  memory: "waiting for a free slot or buffer",
  drain: "draining the pipeline",
  overhead: "overhead",
  slot: "idle slots of the order",
};

/** A target in words, for the tooltip, the card and the screen reader. */
export function describe(shown: Shown, target: Target): Said {
  switch (target.what) {
    case "action":
      return describeAction(shown, target.index);
    case "measured":
      return describeMeasured(shown, target.index);
    case "message":
      return describeMessage(shown, target.index);
    case "collective":
      return describeCollective(shown, target.index);
    case "wait":
      return describeWait(shown, target.index);
    case "finding":
      return describeFinding(shown, target.index);
    case "optimizer":
      return describeOptimizer(shown, target.rank);
    case "gap":
      return describeGap(shown, target.rank, target.time);
    case "memory":
      return describeMemory(shown, target.rank, target.time);
    case "host":
      return describeHost(shown, target.rank, target.time);
  }
}

export function sentence(said: Said): string {
  return `${said.title}, ${said.what}. ${said.facts.map(([name, value]) => `${name} ${value}`).join(", ")}.`;
}

function times(shown: Shown, start: number, end: number): Fact[] {
  return [["start", shown.time(start)], ["end", shown.time(end)], ["takes", shown.time(end - start)]];
}

function describeAction(shown: Shown, node: number): Said {
  const { view, timing } = shown;
  const { at, kind, stage, unit } = view.entries;
  const parts = Array.from({ length: at[node + 1] - at[node] }, (_, k) => at[node] + k);
  const rank = view.graph.rank[node];
  const facts: Fact[] = [
    ["rank", String(rank)],
    ["stage", parts.map((entry) => stage[entry]).join(" & ")],
    ["microbatch", parts.map((entry) => Math.floor(unit[entry] / view.slices)).join(" & ")],
    ...(view.slices > 1 ? [["slice", parts.map((entry) => unit[entry] % view.slices).join(" & ")] as Fact] : []),
  ];
  if (shown.timed) facts.push(...times(shown, timing.start[node], timing.end[node]), ...heldBy(shown, parts), ...sentBy(shown, node));
  else facts.push(["step", String(node - view.graph.bounds[rank])]);
  const what = parts.map((entry) => KINDS[view.kinds[kind[entry]]]).join(" together with ");
  return { title: parts.length > 1 ? parts.map((entry) => entryText(view, entry)).join(" & ") : actionText(view, node), what, facts };
}

/** One action of a recorded run beside what was predicted of it. */
function describeMeasured(shown: Shown, node: number): Said {
  const run = shown.beside ?? shown;
  const [planned, ran] = [shown.timing, run.timing];
  const late = (one: number, other: number): string => signed(other - one, run.time);
  return {
    title: `${actionText(run.view, node)}, measured`,
    what: "beside what was predicted",
    facts: [
      ["rank", String(run.view.graph.rank[node])],
      ["starts", `${run.time(ran.start[node])} (${late(planned.start[node], ran.start[node])})`],
      ["ends", `${run.time(ran.end[node])} (${late(planned.end[node], ran.end[node])})`],
      ["takes", `${run.time(ran.end[node] - ran.start[node])} (${late(planned.end[node] - planned.start[node], ran.end[node] - ran.start[node])})`],
    ],
  };
}

function heldBy(shown: Shown, parts: number[]): Fact[] {
  const { entries, kinds } = shown.view;
  const size = (name: "activation" | "weight_stash" | "kept" | "logits", entry: number): number =>
    valueAt(shown.costs[name], entries.stage[entry], entries.unit[entry]);
  const logits = (kind: string, held: number): Fact[] => (held > 0 ? [[kind === "S" ? "holds until T" : "frees", shown.size(held)]] : []);
  const multiple = perShare(shown.costs.rank_logits, shown.view.ranks, "rank_logits");
  return parts.flatMap((entry): Fact[] => {
    const kind = kinds[entries.kind[entry]];
    const kept: Fact[] = size("kept", entry) > 0 ? [["keeps for later slices", shown.size(size("kept", entry))]] : [];
    if (kind === "F") return [["holds from now on", shown.size(size("activation", entry))], ...kept];
    if (kind === "B") return [["frees", shown.size(size("activation", entry))]];
    if (kind === "I") return [["frees", shown.size(size("activation", entry))], ["keeps for W", shown.size(size("weight_stash", entry))]];
    if (kind === "S" || kind === "T") return logits(kind, size("logits", entry) * multiple(shown.view.graph.rank[entries.node[entry]], entries.stage[entry]));
    return kind === "W" ? [["frees", shown.size(size("weight_stash", entry))]] : [];
  });
}

function sentBy(shown: Shown, node: number): Fact[] {
  const { send_at } = shown.view.graph;
  let sum = 0;
  for (let message = send_at[node]; message < send_at[node + 1]; message++) sum += shown.sizes[message];
  return sum > 0 ? [["sends", shown.size(sum)]] : [];
}

export function valueAt(value: PerAction, stage: number, unit: number): number {
  if (!Array.isArray(value)) return value;
  const row = value[stage];
  return Array.isArray(row) ? row[unit] : row;
}

function describeMessage(shown: Shown, message: number): Said {
  const { view, timing } = shown;
  const { source, target, after, channel } = view.messages;
  const carries = view.channels[channel[message]][2] === "SEND_F" ? "activations" : "gradients";
  const made = timing.end[makerOf(view, message)];
  const waited = timing.depart[message] - made;
  return {
    title: `message of ${entryText(view, view.messages.maker[message])}`,
    what: `${carries} from rank ${source[message]} to rank ${target[message]}${slowLinks(shown).has(source[message] * view.ranks + target[message]) ? ", over a slow link" : ""}`,
    facts: [
      ["leaves", shown.time(timing.depart[message])],
      ["arrives", shown.time(timing.arrive[message])],
      ["travels", shown.time(timing.arrive[message] - timing.depart[message])],
      ...(waited > 0 ? [["waited for its link", shown.time(waited)] as Fact] : []),
      ["size", shown.size(shown.sizes[message])],
      ["used by", entryText(view, after[message])],
    ],
  };
}

/** A collective or a copy: what an action starts beside the computation. */
function describeCollective(shown: Shown, node: number): Said {
  const { view, timing } = shown;
  const entry = view.entries.at[node];
  const waited = timing.collectiveStart[node] - timing.end[node];
  const copied: Fact[] = kinds.isCopy(view.entries.kind[entry]) ? [["size", shown.size(valueAt(shown.costs.activation, view.entries.stage[entry], view.entries.unit[entry]))]] : [];
  return {
    title: actionText(view, node),
    what: KINDS[view.kinds[view.entries.kind[entry]]],
    facts: [
      ["rank", String(view.graph.rank[node])],
      ...times(shown, timing.collectiveStart[node], timing.collectiveEnd[node]),
      ...(waited > 0 ? [[view.graph.meet[node] < 0 ? "waited for its link" : "waited for all ranks", shown.time(waited)] as Fact] : []),
      ...lastJoin(shown, node),
      ...copied,
      ...awaitedBy(shown, node),
    ],
  };
}

/** The rank that joined a collective of all ranks last. */
function lastJoin({ view, timing }: Shown, node: number): Fact[] {
  const { meet, meet_at, join, rank } = view.graph;
  if (meet[node] < 0) return [];
  const joins = join.subarray(meet_at[meet[node]], meet_at[meet[node] + 1]);
  return [["joined last by", `rank ${rank[joins.reduce((last, each) => (timing.end[each] > timing.end[last] ? each : last), joins[0])]}`]];
}

/** The action that waits for the end of a copy or collective last, and how long. */
function awaitedBy({ view, timing, freeAt, time }: Shown, node: number): Fact[] {
  const { gather, gather_at, rank, bounds } = view.graph;
  for (let user = node + 1; user < bounds[rank[node] + 1]; user++) {
    if (!gather.subarray(gather_at[user], gather_at[user + 1]).includes(node)) continue;
    const held = timing.start[user] === timing.collectiveEnd[node] ? timing.start[user] - freeAt(user) : 0;
    return [["needed by", actionText(view, user)], ...(held > 0 ? [["held it up for", time(held)] as Fact] : [])];
  }
  return [];
}

/** A wait for a send or a reduction of the rank's own. */
function describeWait(shown: Shown, node: number): Said {
  const { view, timing } = shown;
  const entry = view.entries.at[node];
  const sent = view.graph.retire[node];
  const waited = timing.start[node] - shown.waited[node];
  const received = sent < 0 ? -1 : view.graph.receive[sent];
  return {
    title: actionText(view, node),
    what: KINDS[view.kinds[view.entries.kind[entry]]],
    facts: [
      ["rank", String(view.graph.rank[node])],
      ["reached at", shown.time(shown.waited[node])],
      ["goes on at", shown.time(timing.start[node])],
      ["waits", waited > 0 ? shown.time(waited) : "not at all"],
      ...(received < 0 ? [] : [["taken by", `${actionText(view, received)} on rank ${view.graph.rank[received]}`] as Fact, ["message arrives", shown.time(timing.arrive[sent])] as Fact]),
    ],
  };
}

function describeFinding(shown: Shown, index: number): Said {
  const finding = shown.view.findings[index];
  return {
    title: finding.action || finding.rule,
    what: `${finding.message}. ${finding.remedy}`,
    facts: [["rule", finding.rule], ["rank", String(finding.rank)], ["step", String(finding.step)]],
  };
}

function describeOptimizer(shown: Shown, rank: number): Said {
  const { start, end } = optimizerSpan(shown, rank);
  return { title: "optimizer's step", what: "after everything else on its rank", facts: [["rank", String(rank)], ...times(shown, start, end)] };
}

function describeGap(shown: Shown, rank: number, time: number): Said {
  const gap = shown.gapAt(rank, time);
  if (!gap) return { title: "idle", what: "", facts: [] };
  return {
    title: `idle: ${gap.cause === "communication" && isJoinText(gap.action) ? "waiting for a collective" : CAUSES[gap.cause]}`,
    what: gapText(gap),
    facts: [["rank", String(rank)], ["from", shown.time(gap.start)], ["to", shown.time(gap.end)], ["lasts", shown.time(gap.end - gap.start)]],
  };
}

function describeHost(shown: Shown, rank: number, time: number): Said {
  const curve = shown.memory.host![rank];
  const place = lastAt(curve.times, time);
  return {
    title: `the host holds ${shown.size(place < 0 ? 0 : curve.total[place])} of rank ${rank}`,
    what: `at ${shown.time(time)}; its peak is ${shown.size(curve.peak)} at ${shown.time(curve.peakTime)}`,
    facts: [],
  };
}

function describeMemory(shown: Shown, rank: number, time: number): Said {
  const curve = shown.memory.ranks[rank];
  const place = lastAt(curve.times, time);
  const used = Object.entries(curve.held).filter(([, held]) => place >= 0 && held[place] !== 0);
  const parts = used.map(([name, held]): Fact => [name, shown.size(held[place])]);
  const fixed: Fact[] = curve.fixed > 0 ? [["always", shown.size(curve.fixed)]] : [];
  const total = curve.fixed + (place < 0 ? 0 : curve.total[place]);
  return {
    title: `rank ${rank} holds ${shown.size(total)}`,
    what: `at ${shown.time(time)}; its peak is ${shown.size(curve.peak)} at ${shown.time(curve.peakTime)}`,
    facts: [...fixed, ...parts],
  };
}
