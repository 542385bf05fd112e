// The studio's server, on the page's own origin.
import { readDocument, type Costs, type Finding, type View } from "../core/index.ts";
import type { Choice } from "./url.ts";

export interface OptionInfo {
  name: string;
  type: string;
  default?: unknown;
}

export interface ScheduleInfo {
  name: string;
  summary: string;
  bubble: string;
  memory: string;
  options: OptionInfo[];
  chunks: { default: number; fixed: boolean; step: number };
  depends_on_costs: boolean;
}

export interface Candidate {
  index: number;
  /** A candidate with the place of an earlier one is a better version of it. */
  place: number;
  name: string;
  makespan: number | null;
  memory: number | null;
  fits: boolean;
  bound?: number | null;
  [more: string]: unknown;
}

/** What went wrong, in the server's words if it answered. */
export class ApiError extends Error {}

async function ask(path: string, body?: unknown, signal?: AbortSignal): Promise<unknown> {
  const method = body === undefined ? "GET" : "POST";
  const headers = body === undefined ? undefined : { "content-type": "application/json" };
  let response: Response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The studio does not answer. Is `penstock studio` still running?");
  }
  const text = await response.text();
  if (!response.ok) throw new ApiError(errorIn(text) ?? `The studio answered with status ${response.status}.`);
  return JSON.parse(text);
}

function errorIn(text: string): string | null {
  try {
    const found = (JSON.parse(text) as { error?: unknown }).error;
    return typeof found === "string" ? found : null;
  } catch {
    return null;
  }
}

export async function schedules(): Promise<ScheduleInfo[]> {
  return (await ask("/api/schedules")) as ScheduleInfo[];
}

export async function makeView(choice: Choice, costs: Partial<Costs>, limit: number | null, signal?: AbortSignal): Promise<View> {
  const body = {
    schedule: choice.schedule,
    ranks: choice.ranks,
    microbatches: choice.microbatches,
    ...(choice.chunks === null ? {} : { chunks: choice.chunks }),
    options: choice.options,
    lower: choice.form !== "schedule",
    fsdp: choice.form === "sharded",
    ...(choice.offload ? { offload: choice.offload } : {}),
    costs,
    ...(limit === null ? {} : { memory_limit: limit }),
  };
  return readDocument(await ask("/api/view", body, signal));
}

export async function openFile(name: string, content: string): Promise<View> {
  return readDocument(await ask("/api/open", { name, content }));
}

/** What the verifier says of a schedule: its proof and that of its program, or its findings. */
export interface Proved {
  proof: string | null;
  program: string | null;
  findings: Finding[];
  num_findings: number;
}

export async function verify(table: unknown, costs: Partial<Costs>, limit: number | number[] | null, signal?: AbortSignal): Promise<Proved> {
  return (await ask("/api/verify", { table, costs, ...(limit === null ? {} : { memory_limit: limit }) }, signal)) as Proved;
}

/** What a cluster's file says: its devices in words, and whether it has their memory. */
export interface ClusterInfo {
  ranks: number;
  summary: string;
  has_memory: boolean;
}

export async function readCluster(name: string, content: string): Promise<ClusterInfo> {
  return (await ask("/api/cluster", { name, content })) as ClusterInfo;
}

/** A plan that was started: its key, and what each rank may hold, without what the planner keeps free; null for no limit. */
export interface Started {
  job: string;
  limits: number[] | null;
}

export async function startPlan(request: unknown): Promise<Started> {
  return (await ask("/api/plan", request)) as Started;
}

/** The plan as the server keeps it, as text. */
export async function planFile(job: string): Promise<string> {
  return JSON.stringify(await ask(`/api/plan/${encodeURIComponent(job)}`));
}

export function planEvents(job: string): EventSource {
  return new EventSource(`/api/plan/${encodeURIComponent(job)}/events`);
}

export async function cancelPlan(job: string): Promise<void> {
  await fetch(`/api/plan/${encodeURIComponent(job)}`, { method: "DELETE" });
}

export async function openCandidate(job: string, index: number): Promise<View> {
  return readDocument(await ask(`/api/plan/${encodeURIComponent(job)}/candidates/${index}`));
}
