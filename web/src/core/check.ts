// What the verifier says of a schedule, as the page finds it: the same findings in the same words as `verifier/` gives for the
// rules placed, complete, order and deadlock. A test compares the two on random changes.
import type { Edit } from "./edits.ts";
import { B, F, I, W } from "./kinds.ts";
import { cellNumber, homeOf, kindOf, nameOf, type Order } from "./order.ts";
import { linkOrder, viewOf, type Linked } from "./rebuild.ts";
import type { CycleLink, Finding, View } from "./types.ts";

const MOST_FINDINGS = 1000;
const LINKS_SHOWN = 8;
const KINDS = [F, B, I, W];
const SEVERITIES = ["hang", "wrong", "memory", "untidy"];

export interface Walk {
  /** The step in which each node runs if every action takes one, -1 if it never can. */
  step: Int32Array;
  /** The node that each rank comes to. */
  reached: Int32Array;
}

/** Runs every rank as far as its waits allow. An entry that needs a missing action waits forever. */
export function walkOrder(linked: Linked, stopped: readonly number[] = []): Walk {
  const { entries, rank, bounds, data } = linked;
  const nodes = rank.length;
  const waiting = new Int32Array(nodes);
  const head = new Int32Array(nodes).fill(-1);
  const following = new Int32Array(data.before.length);
  for (let k = data.before.length - 1; k >= 0; k--) {
    const [before, after] = [entries.node[data.before[k]], entries.node[data.after[k]]];
    if (rank[before] === rank[after] && before < after) continue; // the row holds this
    waiting[after]++;
    following[k] = head[before];
    head[before] = k;
  }
  for (const entry of stopped) waiting[entries.node[entry]]++;
  const ranks = bounds.length - 1;
  const [at, clock, ready] = [bounds.slice(0, ranks), new Int32Array(ranks), new Int32Array(nodes)];
  const step = new Int32Array(nodes).fill(-1);
  const stack = Array.from({ length: ranks }, (_, k) => ranks - 1 - k);
  while (stack.length) {
    const here = stack.pop() as number;
    let [node, now] = [at[here], clock[here]];
    for (; node < bounds[here + 1] && !waiting[node]; node++) {
      now = Math.max(now, ready[node]);
      step[node] = now++;
      for (let edge = head[node]; edge >= 0; edge = following[edge]) {
        const other = entries.node[data.after[edge]];
        ready[other] = Math.max(ready[other], now);
        if (!--waiting[other] && rank[other] !== here && at[rank[other]] === other) stack.push(rank[other]);
      }
    }
    at[here] = node;
    clock[here] = now;
  }
  return { step, reached: at };
}

/** The view of an order, with everything that is wrong with it. */
export function checkedView(base: View, order: Order): View {
  const linked = linkOrder(order, base.table.edges);
  const checker = new Checker(order, linked);
  const findings = checker.findings();
  const view = viewOf(base, order, linked, findings.length === 0 || checker.runs());
  return { ...view, findings, numFindings: findings.length };
}

class Checker {
  private readonly never: { after: number; code: number }[];
  private readonly walk: Walk;

  constructor(
    private readonly order: Order,
    private readonly linked: Linked,
  ) {
    const { missing } = linked;
    this.never = missing.length ? missing.filter(({ after, code }) => this.homeOfCode(code) !== homeOf(order, this.stage(after), this.unit(after))) : [];
    this.walk = walkOrder(linked, this.never.map(({ after }) => after));
  }

  findings(): Finding[] {
    const findings = [this.placed(), this.complete(), this.misordered(), this.deadlocked()].flatMap((list) => list.slice(0, MOST_FINDINGS));
    return findings.sort((one, other) => SEVERITIES.indexOf(one.severity) - SEVERITIES.indexOf(other.severity));
  }

  /** Whether everything that is needed is there, comes in order and is reached. */
  runs(): boolean {
    const { local, missing, entries } = this.linked;
    if (missing.length || this.walk.step.some((step) => step < 0)) return false;
    for (let k = 0; k < local.before.length; k++) if (entries.node[local.before[k]] >= entries.node[local.after[k]]) return false;
    return true;
  }

  // Entries -----------------------------------------------------------------------------------------------------------

  private kind(entry: number): number {
    return this.linked.entries.kind[entry];
  }

  private stage(entry: number): number {
    return this.linked.entries.stage[entry];
  }

  private unit(entry: number): number {
    return this.linked.entries.unit[entry];
  }

  private node(entry: number): number {
    return this.linked.entries.node[entry];
  }

  private rank(entry: number): number {
    return this.linked.rank[this.node(entry)];
  }

  private step(entry: number): number {
    return this.node(entry) - this.linked.bounds[this.rank(entry)];
  }

  private cell(entry: number): number {
    return this.stage(entry) * this.order.units + this.unit(entry);
  }

  /** The stage and the unit of a cell. */
  private partsOf(cell: number): [stage: number, unit: number] {
    return [Math.floor(cell / this.order.units), cell % this.order.units];
  }

  private homeOfCode(code: number): number {
    return homeOf(this.order, ...this.partsOf(cellNumber(code)));
  }

  private name(entry: number): string {
    return nameOf(this.order, this.kind(entry), this.stage(entry), this.unit(entry));
  }

  /** `microbatch 3`, or `microbatch 3, slice 1`. */
  private unitName(unit: number): string {
    const { slices } = this.order;
    return slices > 1 ? `microbatch ${Math.floor(unit / slices)}, slice ${unit % slices}` : `microbatch ${unit}`;
  }

  /** `0..7`, or `0..7, slices 0..3`. */
  private get unitsName(): string {
    const { slices, units } = this.order;
    return `0..${units / slices - 1}${slices > 1 ? `, slices 0..${slices - 1}` : ""}`;
  }

  private action(entry: number): string {
    const { at } = this.linked.entries;
    const node = this.node(entry);
    const parts = Array.from({ length: at[node + 1] - at[node] }, (_, k) => this.name(at[node] + k));
    return parts.length > 1 ? `(${parts.join(";")})OVERLAP_F_B` : parts[0];
  }

  private where(entry: number): string {
    return `step ${this.step(entry)} of rank ${this.rank(entry)}`;
  }

  /** The place of an entry among the cells of its row. */
  private place(entry: number): number {
    return this.linked.place[this.node(entry)];
  }

  private alone(entry: number): boolean {
    const { at } = this.linked.entries;
    return at[this.node(entry) + 1] - at[this.node(entry)] === 1;
  }

  private finding(rule: string, entry: number, message: string, remedy: string, fix: Edit[] | null, severity: Finding["severity"] = "wrong"): Finding {
    return { rule, severity, rank: this.rank(entry), step: this.step(entry), action: this.action(entry), message, remedy, fix };
  }

  private drop(entry: number): Edit[] | null {
    return this.alone(entry) ? [{ what: "drop", rank: this.rank(entry), at: this.place(entry) }] : null;
  }

  // Rules -------------------------------------------------------------------------------------------------------------

  private placed(): Finding[] {
    const findings: Finding[] = [];
    const { order } = this;
    for (let entry = 0; entry < this.linked.entries.kind.length; entry++) {
      const home = homeOf(order, this.stage(entry), this.unit(entry));
      if (home === this.rank(entry)) continue;
      const which = order.copies.length > 1 ? ` for microbatch ${this.unit(entry)}` : "";
      const message = `${this.name(entry)} runs on rank ${this.rank(entry)}, but stage ${this.stage(entry)} is on rank ${home}${which}`;
      const added: Edit = { what: "add", rank: home, at: order.rows[home].length, kind: this.kind(entry), stage: this.stage(entry), unit: this.unit(entry) };
      const dropped = this.drop(entry);
      findings.push(this.finding("placed", entry, message, `Move it to rank ${home}, or change the placement`, dropped && [...dropped, added]));
    }
    return findings;
  }

  private complete(): Finding[] {
    const cells = this.order.stages * this.order.units;
    const first = KINDS.map(() => new Int32Array(cells).fill(-1));
    const counts = KINDS.map(() => new Int32Array(cells));
    for (let entry = this.linked.entries.kind.length - 1; entry >= 0; entry--) {
      first[this.kind(entry)][this.cell(entry)] = entry;
      counts[this.kind(entry)][this.cell(entry)]++;
    }
    const findings: Finding[] = [];
    for (let cell = 0; cell < cells; cell++) if (!counts[F][cell]) findings.push(this.withoutForward(cell, first));
    const training = [B, I, W].some((kind) => counts[kind].some((count) => count > 0));
    for (let cell = 0; training && cell < cells; cell++) {
      const [full, ofInput, ofWeights] = [B, I, W].map((kind) => counts[kind][cell] > 0);
      if (full ? ofInput || ofWeights : !(ofInput && ofWeights)) findings.push(full ? this.twofold(cell, first) : this.withoutBackward(cell, first));
    }
    for (const kind of KINDS) if (counts[kind].some((count) => count > 1)) findings.push(...this.repeats(kind, first[kind]));
    return findings;
  }

  private absence(cell: number, kinds: number[], message: string, remedy: string, beside: number): Finding {
    const { rows } = this.order;
    const [stage, unit] = this.partsOf(cell);
    const rank = homeOf(this.order, stage, unit);
    const near = beside >= 0 && this.rank(beside) === rank;
    const { bounds } = this.linked;
    const step = near ? this.step(beside) : Math.max(0, bounds[rank + 1] - bounds[rank] - 1);
    // A forward stands before the backward that needs it, a backward after what it needs.
    const at = near ? this.place(beside) + (kinds[0] === F || (kinds[0] === I && this.kind(beside) === W) ? 0 : 1) : rows[rank].length;
    const fix = kinds.map((kind, k): Edit => ({ what: "add", rank, at: at + k, kind, stage, unit }));
    return { rule: "complete", severity: "wrong", rank, step, action: nameOf(this.order, kinds[0], stage, unit), message, remedy, fix };
  }

  private withoutForward(cell: number, first: Int32Array[]): Finding {
    const [stage, unit] = this.partsOf(cell);
    const beside = [B, I, W].map((kind) => first[kind][cell]).filter((entry) => entry >= 0);
    const rank = homeOf(this.order, stage, unit);
    const message = `stage ${stage} has no F for ${this.unitName(unit)} of ${this.unitsName}`;
    return this.absence(cell, [F], message, `Run ${nameOf(this.order, F, stage, unit)} on rank ${rank}`, beside.length ? Math.min(...beside) : -1);
  }

  private twofold(cell: number, first: Int32Array[]): Finding {
    const full = first[B][cell];
    const part = first[I][cell] >= 0 ? first[I][cell] : first[W][cell];
    const message = `${this.name(part)} is a part of the backward that ${this.name(full)} (${this.where(full)}) runs as a whole`;
    return this.finding("complete", part, message, `Keep ${this.name(full)}, or the I and W in its place, not both`, this.drop(part));
  }

  private withoutBackward(cell: number, first: Int32Array[]): Finding {
    const [stage, unit] = this.partsOf(cell);
    const rank = homeOf(this.order, stage, unit);
    const [both, ofInput, ofWeights] = [B, I, W].map((kind) => nameOf(this.order, kind, stage, unit));
    const half = [I, W].find((kind) => first[kind][cell] >= 0);
    if (half === undefined) {
      const message = `stage ${stage} has no backward for ${this.unitName(unit)}, though other actions train`;
      return this.absence(cell, [B], message, `Run ${both}, or ${ofInput} and ${ofWeights}, on rank ${rank}`, first[F][cell]);
    }
    const other = half === I ? W : I;
    const name = nameOf(this.order, other, stage, unit);
    const message = `stage ${stage} runs ${this.name(first[half][cell])} but never ${name}: a split backward needs both I and W`;
    return this.absence(cell, [other], message, `Run ${name} on rank ${rank}, or ${both} in place of both`, first[half][cell]);
  }

  private repeats(kind: number, first: Int32Array): Finding[] {
    const again: number[] = [];
    for (let entry = 0; entry < this.linked.entries.kind.length; entry++) {
      if (this.kind(entry) === kind && first[this.cell(entry)] !== entry) again.push(entry);
    }
    again.sort((one, other) => this.cell(one) - this.cell(other) || one - other);
    return again.map((entry) => {
      const message = `${this.name(entry)} runs twice: it is also ${this.where(first[this.cell(entry)])}`;
      return this.finding("complete", entry, message, "Remove one of the two", this.drop(entry));
    });
  }

  private misordered(): Finding[] {
    const { before, after } = this.linked.local;
    const wrong: number[] = [];
    for (let k = 0; k < before.length; k++) {
      if (this.node(before[k]) >= this.node(after[k]) && this.rank(before[k]) === this.rank(after[k])) wrong.push(k);
    }
    wrong.sort((one, other) => after[one] - after[other] || one - other);
    return wrong.map((k) => this.misplaced(before[k], after[k]));
  }

  private misplaced(needed: number, entry: number): Finding {
    const [name, what, rank] = [this.name(entry), this.name(needed), this.rank(entry)];
    if (this.node(needed) === this.node(entry)) {
      return this.finding("order", entry, `${name} needs ${what}, but the two run together as parts of one overlap`, `Run ${what} in a step of its own before ${name}`, null);
    }
    const message = `${name} needs ${what}, which rank ${rank} runs only in step ${this.step(needed)}`;
    const remedy = `Move ${what} before step ${this.step(entry)} of rank ${rank}, or ${name} behind it`;
    const fix = this.moveBefore(needed, this.node(entry));
    return { ...this.finding("order", entry, message, remedy, fix), cycle: [this.link(entry, needed)] };
  }

  /** Moves an entry, and what it needs of its own rank, before a node of the rank. */
  private moveBefore(entry: number, stop: number): Edit[] {
    const { local, place } = this.linked;
    const moved = new Set<number>();
    const gather = (node: number): void => {
      if (node < stop || moved.has(node)) return;
      moved.add(node);
      const { at } = this.linked.entries;
      for (let k = 0; k < local.after.length; k++) {
        if (local.after[k] >= at[node] && local.after[k] < at[node + 1] && this.rank(local.before[k]) === this.linked.rank[node]) gather(this.node(local.before[k]));
      }
    };
    gather(this.node(entry));
    const rank = this.rank(entry);
    const nodes = [...moved].filter((node) => node !== stop).sort((one, other) => one - other);
    return nodes.map((node, k): Edit => ({ what: "move", rank, from: place[node], to: place[stop] + k }));
  }

  // Deadlock ----------------------------------------------------------------------------------------------------------

  private link(waits: number, needs: number): CycleLink {
    return [this.rank(waits), this.step(waits), this.rank(needs), this.step(needs)];
  }

  private deadlocked(): Finding[] {
    if (this.walk.step.every((step) => step >= 0)) return [];
    const { data } = this.linked;
    const heads = this.walk.reached;
    const isHead = (entry: number): boolean => this.node(entry) === heads[this.rank(entry)];
    const onward = new Map<number, { before: number; after: number }>();
    for (let k = 0; k < data.before.length; k++) {
      const [before, after] = [data.before[k], data.after[k]];
      if (this.walk.step[this.node(before)] < 0 && isHead(after) && !onward.has(this.rank(after))) onward.set(this.rank(after), { before, after });
    }
    const cycles = cyclesOf(onward, (wait) => this.rank(wait.before)).map((chain) => this.cycle(chain));
    const ends = this.never.filter(({ after }) => isHead(after)).sort((one, other) => this.rank(one.after) - this.rank(other.after));
    return [...cycles, ...ends.map(({ after, code }) => this.deadEnd(after, code))];
  }

  private describe(entry: number, what: string, where: string): string {
    return `rank ${this.rank(entry)} waits in step ${this.step(entry)} (${this.action(entry)}) for ${what}, ${where}`;
  }

  private cycle(chain: { before: number; after: number }[]): Finding {
    const describeLink = ({ before, after }: { before: number; after: number }): string => this.describe(after, this.name(before), `which is ${this.where(before)}`);
    const links = (chain.length <= LINKS_SHOWN ? chain : [...chain.slice(0, LINKS_SHOWN - 1), chain[chain.length - 1]]).map(describeLink);
    if (chain.length > LINKS_SHOWN) links.splice(-1, 0, `and so on over ${chain.length - LINKS_SHOWN} more ranks`);
    const message = chain.length > 1 ? `${chain.length} ranks wait for each other in a cycle: ${links.join("; ")}` : links[0];
    const steps = chain.map(({ before }, at) => ({ before, stop: chain[(at + 1) % chain.length].after }));
    const { before, stop } = steps.find((step) => this.couldRun(step.before, step.stop)) ?? steps[0];
    const also = this.couldRun(before, stop) ? "" : ", and what that needs,";
    const remedy = `Let rank ${this.rank(before)} run ${this.name(before)}${also} before its step ${this.step(stop)}`;
    const finding = this.finding("deadlock", chain[0].after, message, remedy, this.moveBefore(before, this.node(stop)), "hang");
    const ways = steps.map((step) => this.moveBefore(step.before, this.node(step.stop)));
    return { ...finding, ways, cycle: chain.map(({ before: needs, after }) => this.link(after, needs)) };
  }

  /** Whether everything that an entry needs of its own rank is done when the rank stops. */
  private couldRun(entry: number, stop: number): boolean {
    const { before, after } = this.linked.local;
    for (let k = 0; k < after.length; k++) if (after[k] === entry && before[k] >= stop) return false;
    return true;
  }

  /** As severe as the missing work, which the rule `complete` reports first. */
  private deadEnd(entry: number, code: number): Finding {
    const parts = this.partsOf(cellNumber(code));
    const name = kindOf(code) === I ? `${nameOf(this.order, I, ...parts)} (or ${nameOf(this.order, B, ...parts)})` : nameOf(this.order, kindOf(code), ...parts);
    return this.finding("deadlock", entry, this.describe(entry, name, "which nobody runs"), `Run ${name} on rank ${this.homeOfCode(code)}`, null);
  }
}

/** Each cycle of ranks once, from its lowest rank. */
function cyclesOf<Wait>(onward: Map<number, Wait>, awaited: (wait: Wait) => number): Wait[][] {
  const seen = new Map<number, number>();
  const cycles: Wait[][] = [];
  for (const start of [...onward.keys()].sort((one, other) => one - other)) {
    const path: number[] = [];
    let rank = start;
    while (onward.has(rank) && !seen.has(rank)) {
      seen.set(rank, start);
      path.push(rank);
      rank = awaited(onward.get(rank)!);
    }
    if (seen.get(rank) !== start || !path.includes(rank)) continue;
    const cycle = path.slice(path.indexOf(rank));
    const lowest = cycle.indexOf(Math.min(...cycle));
    cycles.push([...cycle.slice(lowest), ...cycle.slice(0, lowest)].map((member) => onward.get(member)!));
  }
  return cycles;
}
