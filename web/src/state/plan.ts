import { batch, computed, signal } from "@preact/signals";
import { unitFor } from "../draw/span.ts";
import * as api from "./api.ts";
import type { Candidate } from "./api.ts";

export interface Progress {
  phase: string;
  done: number;
  total: number;
  what: string;
}

export interface Result {
  best: number | null;
  cancelled: boolean;
  name?: string;
  makespan?: number;
  memory?: number;
  /** The bound of this placement and partition, and of every plan, each with the gap to it. */
  bound?: number | null;
  gap?: number | null;
  overall_bound?: number | null;
  overall_gap?: number | null;
  report?: string;
  units?: { time: string; size: string };
}

export type PlanStatus = "idle" | "running" | "done" | "failed";

/** The fields of a transformer, as the form has them. */
export interface Shape {
  layers: string;
  hidden: string;
  heads: string;
  kv_heads: string;
  ffn: string;
  sequence: string;
  vocabulary: string;
  microbatch: string;
  tflops: string;
  bandwidth: string;
  latency: string;
  gated: boolean;
}

export const SHAPE: Shape = {
  layers: "32",
  hidden: "4096",
  heads: "32",
  kv_heads: "",
  ffn: "11008",
  sequence: "4096",
  vocabulary: "32000",
  microbatch: "1",
  tflops: "400",
  bandwidth: "50GB",
  latency: "10",
  gated: true,
};

/** What is to be planned, as the form has it. */
export interface Wanted {
  model: "transformer" | "profile";
  shape: Shape;
  profile: string;
  ranks: string;
  microbatches: string;
  limit: string;
  seconds: string;
  recompute: boolean;
  /** The text of a cluster's file, empty without one; its devices then are the ranks. */
  cluster: string;
}

export const USUAL: Wanted = { model: "transformer", shape: SHAPE, profile: "", ranks: "8", microbatches: "32", limit: "80GiB", seconds: "10", recompute: false, cluster: "" };

/** A cluster that is read by the server: being read, read, or refused with the reason. */
export interface ClusterState {
  text: string;
  info: api.ClusterInfo | null;
  problem: string | null;
}

/** A plan that is being made: its candidates arrive one by one. */
export class PlanState {
  readonly wanted = signal<Wanted>(USUAL);
  /** What the server says of the cluster in the form; null without one. */
  readonly cluster = signal<ClusterState | null>(null);
  readonly job = signal<string | null>(null);
  readonly status = signal<PlanStatus>("idle");
  readonly cancelling = signal(false);
  readonly candidates = signal<Candidate[]>([]);
  readonly progress = signal<Progress | null>(null);
  readonly result = signal<Result | null>(null);
  readonly error = signal<string | null>(null);
  /** What each rank may hold, as it was typed, and without what the planner keeps free: the limit that candidates are judged by. */
  readonly asked = signal<number | null>(null);
  readonly limit = signal<number | null>(null);
  /** The units of what is asked for: times and sizes. */
  readonly units = signal({ time: "", size: "" });

  /** All times are told in one unit: that of the slowest candidate. */
  readonly timeUnit = computed(() => unitFor(Math.max(0, ...this.candidates.value.map((each) => each.makespan ?? 0)), this.units.value.time));

  /** The plan that was asked for last, once the server has named it. */
  private started: Promise<api.Started> | null = null;

  /** The planner's choice once it has chosen, else the fastest so far of those that fit. */
  readonly best = computed(() => {
    const result = this.result.value;
    if (result && !result.cancelled) return this.candidates.value.find((each) => each.index === result.best) ?? null;
    const fitting = this.candidates.value.filter((each) => each.fits && each.makespan !== null);
    return fitting.reduce<Candidate | null>((best, each) => (best === null || each.makespan! < best.makespan! ? each : best), null);
  });

  /** Puts a cluster into the form, or takes it out. Its devices have their own memory, so a limit that nobody typed makes room for it. */
  async takeCluster(text: string, name = ""): Promise<void> {
    const { limit } = this.wanted.value;
    const gone = text.trim() === "";
    this.wanted.value = { ...this.wanted.value, cluster: gone ? "" : text, limit: gone && limit === "" ? USUAL.limit : limit };
    await this.readCluster(name);
    const { wanted, cluster } = this;
    if (wanted.value.cluster === text && cluster.value?.info?.has_memory && wanted.value.limit === USUAL.limit) wanted.value = { ...wanted.value, limit: "" };
  }

  /** Asks the server about the cluster in the form, unless it has read it before. */
  async readCluster(name = ""): Promise<ClusterState | null> {
    const text = this.wanted.value.cluster;
    if (text === "") return (this.cluster.value = null);
    const known = this.cluster.value;
    if (known?.text === text && known.info) return known;
    this.cluster.value = { text, info: null, problem: null };
    let read: ClusterState;
    try {
      read = { text, info: await api.readCluster(name, text), problem: null };
    } catch (error) {
      read = { text, info: null, problem: (error as Error).message };
    }
    if (this.wanted.value.cluster === text) this.cluster.value = read;
    return read;
  }

  async start(request: unknown, limit: number | null, units: { time: string; size: string }): Promise<void> {
    batch(() => {
      this.status.value = "running";
      this.cancelling.value = false;
      this.job.value = null;
      this.candidates.value = [];
      this.progress.value = null;
      this.result.value = null;
      this.error.value = null;
      this.asked.value = this.limit.value = limit;
      this.units.value = units;
    });
    try {
      this.started = api.startPlan(request);
      const { job, limits } = await this.started;
      batch(() => {
        this.job.value = job;
        if (limits?.length) this.limit.value = limits.every((each) => each === limits[0]) ? limits[0] : null;
      });
      this.listen(job);
    } catch (error) {
      this.fail((error as Error).message);
    }
  }

  /** Candidates come in bursts; a burst is shown at once. */
  private listen(job: string): void {
    const events = api.planEvents(job);
    const waiting: Candidate[] = [];
    const flush = (): void => {
      if (waiting.length) this.candidates.value = withLatest(this.candidates.value, waiting.splice(0));
    };
    const timer = setInterval(flush, 100);
    const end = (): void => {
      clearInterval(timer);
      flush();
      events.close();
    };
    const on = <Data>(name: string, body: (data: Data) => void): void =>
      events.addEventListener(name, (event) => body(JSON.parse((event as MessageEvent<string>).data) as Data));
    on<Candidate>("candidate", (found) => waiting.push(found));
    on<Progress>("progress", (progress) => (this.progress.value = progress));
    on<Result>("done", (result) => {
      end();
      batch(() => {
        this.result.value = result;
        this.status.value = "done";
        if (result.units) this.units.value = result.units;
      });
    });
    on<{ error: string }>("failed", ({ error }) => {
      end();
      this.fail(error);
    });
    events.onerror = () => {
      end();
      if (this.status.value === "running") this.fail("The studio stopped answering. Is `penstock studio` still running?");
    };
  }

  private fail(message: string): void {
    this.error.value = message;
    this.status.value = "failed";
  }

  /** Whether there is a plan to save. */
  readonly isSaved = computed(() => this.status.value === "done" && this.result.value?.cancelled === false);

  /** The plan as a file: the text that `penstock train --schedule` reads. */
  async file(): Promise<string> {
    if (!this.job.value || !this.isSaved.value) throw new Error("There is no plan yet: it is still being made, or was cancelled.");
    return api.planFile(this.job.value);
  }

  /** Ends the plan, also one whose key is still under way; the listener hears of it. */
  async cancel(): Promise<void> {
    this.cancelling.value = true;
    try {
      if (this.started) await api.cancelPlan((await this.started).job);
    } catch {
      this.cancelling.value = false; // a plan that did not start has said why; one that cannot be reached is heard of by its listener
    }
  }
}

/** Candidates with newer versions in the places of the older ones. */
export function withLatest(candidates: readonly Candidate[], found: readonly Candidate[]): Candidate[] {
  const latest = new Map(candidates.map((each) => [each.place, each]));
  for (const each of found) latest.set(each.place, each);
  return [...latest.values()];
}

/** Something that would fit: what a button that plans it says, what the planner says of it, and the change to the form that asks for it. */
export interface Remedy {
  text: string;
  why: string;
  change: (wanted: Wanted) => Wanted;
}

type Made = Pick<Remedy, "text" | "change">;

const REMEDIES: [RegExp, (found: RegExpExecArray) => Made][] = [
  [/^a memory limit of (\S+)$/, ([, limit]) => ({ text: `Plan with ${limit} per rank`, change: (wanted) => ({ ...wanted, limit }) })],
  [
    /^microbatches of (\d+), (\d+) of them/,
    ([, size, count]) => ({
      text: `Plan with ${count} microbatches of ${size}`,
      change: (wanted) => ({ ...wanted, microbatches: count, shape: { ...wanted.shape, microbatch: size } }),
    }),
  ],
  [/^(\d+) ranks$/, ([, ranks]) => ({ text: `Plan with ${ranks} ranks`, change: (wanted) => ({ ...wanted, ranks }) })],
  [/^recompute=True$/, () => ({ text: "Plan with recompute", change: (wanted) => ({ ...wanted, recompute: true }) })],
];

/** What the planner's refusal says would fit: the lines below "what would fit", each something that the planner has tried. */
export function remediesIn(error: string): Remedy[] {
  const lines = error.split("\n");
  const at = lines.findIndex((line) => line.startsWith("what would fit"));
  return (at < 0 ? [] : lines.slice(at + 1)).flatMap((line) => {
    const [, what, why] = /^\s*(.+?)(?:: (.*))?$/.exec(line) ?? [];
    for (const [pattern, make] of REMEDIES) {
      const found = pattern.exec(what ?? "");
      if (found) return [{ ...make(found), why: why ?? "" }];
    }
    return [];
  });
}

/** What a refusal says besides what would fit, which stands on buttons. */
export function reasonIn(error: string): string {
  return remediesIn(error).length ? error.slice(0, error.indexOf("\nwhat would fit")) : error;
}

/** The candidates that no other beats in both time and memory, the fastest first. */
export function paretoFront(candidates: Candidate[]): Candidate[] {
  const timed = candidates.filter((each) => each.makespan !== null && each.memory !== null);
  const sorted = timed.sort((one, other) => one.makespan! - other.makespan! || one.memory! - other.memory!);
  let least = Infinity;
  return sorted.filter((each) => each.memory! < least && ((least = each.memory!), true));
}

/** A transformer as the server reads it; throws what is wrong with a field. */
export function transformerOf(shape: Shape): Record<string, unknown> {
  const made: Record<string, unknown> = { gated: shape.gated, flops: positive("TFLOP/s", shape.tflops) * 1e12 };
  for (const name of ["layers", "hidden", "heads", "sequence", "vocabulary"] as const) made[name] = whole(name, shape[name]);
  for (const name of ["kv_heads", "ffn"] as const) if (shape[name].trim()) made[name] = whole(name.replace("_", " "), shape[name]);
  const sizes = shape.microbatch.split(",").map((text) => whole("samples per microbatch", text));
  made.microbatch = sizes.length === 1 ? sizes[0] : sizes;
  if (shape.bandwidth.trim()) made.bandwidth = shape.bandwidth.trim();
  if (shape.latency.trim()) made.latency = positive("latency", shape.latency, true) * 1e-6;
  return made;
}

export function whole(name: string, text: string): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isInteger(value) || value < 1) throw new Error(`${name} must be a whole number of at least 1, got ${text || "nothing"}`);
  return value;
}

function positive(name: string, text: string, zero = false): number {
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value) || value < 0 || (!zero && value === 0)) throw new Error(`${name} must be a number above 0, got ${text || "nothing"}`);
  return value;
}
