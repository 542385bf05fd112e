import { finishedOf, indexOfMost } from "./figures.ts";
import { lanesOf } from "./lanes.ts";
import { measuredPath, optimizerStep } from "./measured.ts";
import { actionText, entryText } from "./text.ts";
import type { Costs, PathStep, Timing, View } from "./types.ts";

type Place = [what: "action" | "message" | "collective", index: number];

/** A chain of actions and messages from the start to the makespan. */
export function criticalPath(view: View, timing: Timing, costs: Costs): PathStep[] {
  return timing.source === "simulated" ? new Walk(view, timing, costs).path() : measuredPath(view, timing);
}

/** Walks back from the end: each piece starts when the one before it ends. */
class Walk {
  private ahead: Int32Array | null = null;
  private lanes: { of: Int32Array; nodes: number[][] } | null = null;

  constructor(
    private readonly view: View,
    private readonly timing: Timing,
    private readonly costs: Costs,
  ) {}

  path(): PathStep[] {
    const finished = finishedOf(this.view, this.timing);
    const rank = indexOfMost(finished);
    const steps: PathStep[] = [];
    if (this.timing.optimizer[rank] > 0) steps.push(optimizerStep(rank, finished[rank], this.timing.optimizer[rank]));
    const seen = new Set<string>();
    for (let here = this.last(rank); here && !seen.has(here.join()); here = this.before(here)) {
      seen.add(here.join());
      steps.push(this.step(here));
    }
    return steps.reverse().filter((step) => step.end > step.start);
  }

  private last(rank: number): Place | null {
    const { end, collectiveEnd } = this.timing;
    const [low, high] = [this.view.graph.bounds[rank], this.view.graph.bounds[rank + 1]];
    if (low === high) return null;
    const [ends, collectives] = [end.subarray(low, high), collectiveEnd.subarray(low, high)];
    const latest = indexOfMost(collectives);
    return collectives[latest] > ends[indexOfMost(ends)] ? ["collective", low + latest] : ["action", high - 1];
  }

  private step([what, index]: Place): PathStep {
    const { view, timing } = this;
    if (what === "message") {
      const action = entryText(view, view.messages.before[index]);
      return { what, rank: view.messages.target[index], action, start: timing.depart[index], end: timing.arrive[index], index };
    }
    const [start, end] = what === "action" ? [timing.start, timing.end] : [timing.collectiveStart, timing.collectiveEnd];
    return { what, rank: view.graph.rank[index], action: actionText(view, index), start: start[index], end: end[index], index };
  }

  /** What ended when this began. */
  private before([what, index]: Place): Place | null {
    if (what === "action") return this.beforeAction(index);
    return what === "message" ? this.beforeMessage(index) : this.beforeCollective(index);
  }

  private beforeAction(node: number): Place | null {
    const { graph } = this.view;
    const { start, end, arrive, collectiveEnd } = this.timing;
    const begin = start[node];
    if (node > graph.bounds[graph.rank[node]] && end[node - 1] === begin) return ["action", node - 1];
    for (let k = graph.need_at[node]; k < graph.need_at[node + 1]; k++) if (arrive[graph.need[k]] === begin) return ["message", graph.need[k]];
    for (let k = graph.gather_at[node]; k < graph.gather_at[node + 1]; k++) {
      if (collectiveEnd[graph.gather[k]] === begin) return ["collective", graph.gather[k]];
    }
    for (let message = graph.send_at[node]; message < graph.send_at[node + 1]; message++) {
      const before = this.takenAt(graph.slot[message], begin);
      if (before) return before;
    }
    if (this.view.slots?.[node] && node > graph.bounds[graph.rank[node]]) return ["action", node - 1];
    return this.takenAt(graph.retire[node], begin);
  }

  /** What made this the time at which a message was taken: its arrival or its receive. */
  private takenAt(message: number, time: number): Place | null {
    if (message < 0) return null;
    if (this.timing.arrive[message] === time) return ["message", message];
    const receive = this.view.graph.receive[message];
    return this.timing.start[receive] === time ? ["action", receive] : null;
  }

  private beforeMessage(message: number): Place {
    const { depart, end, heldBy } = this.timing;
    const sender = this.view.graph.sender[message];
    if (depart[message] === end[sender]) return ["action", sender];
    return ["message", heldBy.length ? heldBy[message] : this.aheadOf(message)];
  }

  /** The message before this one on its channel. */
  private aheadOf(message: number): number {
    if (!this.ahead) {
      const last = new Int32Array(this.view.channels.length).fill(-1);
      this.ahead = this.view.messages.channel.map((channel, k) => {
        const before = last[channel];
        last[channel] = k;
        return before;
      });
    }
    return this.ahead[message];
  }

  private beforeCollective(node: number): Place {
    const { end, collectiveStart, collectiveEnd } = this.timing;
    const { meet, meet_at, join } = this.view.graph;
    const joins = meet[node] < 0 ? [node] : [...join.subarray(meet_at[meet[node]], meet_at[meet[node] + 1])];
    const joined = joins.find((each) => end[each] === collectiveStart[node]);
    if (joined !== undefined) return ["action", joined];
    let earlier = -1;
    for (const other of this.besideOf(node)) {
      if (joins.includes(other) || collectiveEnd[other] !== collectiveStart[node]) continue;
      if (earlier < 0 || collectiveStart[other] < collectiveStart[earlier]) earlier = other;
    }
    return earlier < 0 ? ["action", node] : ["collective", earlier];
  }

  /** The nodes whose collectives or copies share a lane with that of a node. */
  private besideOf(node: number): number[] {
    this.lanes ??= this.listLanes();
    return this.lanes.nodes[this.lanes.of[node]];
  }

  private listLanes(): { of: Int32Array; nodes: number[][] } {
    const { of, count } = lanesOf(this.view, this.costs);
    const nodes: number[][] = Array.from({ length: count }, () => []);
    of.forEach((lane, node) => void (lane >= 0 && nodes[lane].push(node)));
    return { of, nodes };
  }
}
