import { useRef, useState } from "preact/hooks";
import { transformerOf, whole, type PlanState, type Shape, type Wanted } from "../state/plan.ts";
import { readSize } from "../state/sizes.ts";
import { useStudio } from "../state/studio.ts";
import { Field } from "./fields.tsx";
import { Segments } from "./Segments.tsx";

const MODELS = [["transformer", "transformer"], ["profile", "profile"]] as const;

const EXAMPLE = '{"layers": [{"f": 1, "i": 1, "w": 1, "activation": 1, "count": 16}], "latency": 0.1}';

const CLUSTER_EXAMPLE = '[[devices]]\nspeed = 0.5\ncount = 2';

/** Milliseconds without a key after which a typed cluster is read. */
const PAUSE = 400;

/** Fields of a transformer that a cluster has for each pair of devices. */
const LINKS: string[] = ["bandwidth", "latency"];

const FIELDS: [keyof Shape & string, string][] = [
  ["layers", "Layers"],
  ["hidden", "Hidden width"],
  ["heads", "Heads"],
  ["kv_heads", "Key-value heads"],
  ["ffn", "Feed-forward width"],
  ["sequence", "Sequence length"],
  ["vocabulary", "Vocabulary"],
  ["microbatch", "Samples per microbatch"],
  ["tflops", "TFLOP/s per device"],
  ["bandwidth", "Link, bytes per second"],
  ["latency", "Link latency, µs"],
];

/** What is to be planned. */
export function PlanForm({ plan }: { plan: PlanState }) {
  const wanted = plan.wanted.value;
  const [problem, setProblem] = useState<string | null>(null);
  const set = (patch: Partial<Wanted>): void => void (plan.wanted.value = { ...wanted, ...patch });
  const submit = (event: Event): void => {
    event.preventDefault();
    void startPlan(plan).then(setProblem);
  };
  const devices = plan.cluster.value?.info ?? null;
  const text = (name: "ranks" | "microbatches" | "seconds", label: string) => (
    <Field label={label}>
      <input value={wanted[name]} name={name} onInput={(event) => set({ [name]: event.currentTarget.value })} />
    </Field>
  );
  return (
    <form class="controls plan-form" aria-label="What to plan" onSubmit={submit} noValidate>
      <fieldset class="group">
        <legend>Pipeline</legend>
        {devices ? (
          <Field label="Ranks">
            <input value={devices.ranks} name="ranks" disabled title="One rank per device of the cluster" />
          </Field>
        ) : (
          text("ranks", "Ranks")
        )}
        {text("microbatches", "Microbatches")}
        <Field label="Memory per rank">
          <input value={wanted.limit} name="limit" placeholder={devices?.has_memory ? "per device" : "unlimited"} onInput={(event) => set({ limit: event.currentTarget.value })} />
        </Field>
        {text("seconds", "Seconds to search")}
        <Field label="Recompute if needed">
          <input type="checkbox" checked={wanted.recompute} onChange={(event) => set({ recompute: event.currentTarget.checked })} />
        </Field>
      </fieldset>
      <ClusterField plan={plan} />
      <fieldset class="group">
        <legend>Model</legend>
        <Segments role="radiogroup" label="Model given as" choices={MODELS} value={wanted.model} change={(model) => set({ model })} />
        {wanted.model === "transformer" ? <ShapeFields shape={wanted.shape} linked={wanted.cluster !== ""} change={(shape) => set({ shape })} /> : <ProfileField text={wanted.profile} change={(profile) => set({ profile })} />}
      </fieldset>
      <div class="submit">
        {problem && <p class="problem" role="alert">{problem}</p>}
        <button class="primary" type="submit" disabled={plan.status.value === "running"}>Plan</button>
      </div>
    </form>
  );
}

/** The devices to plan for, if they differ: as text, from a file, or those of what is shown. */
function ClusterField({ plan }: { plan: PlanState }) {
  const studio = useStudio();
  const [name, setName] = useState("");
  const typing = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  const text = plan.wanted.value.cluster;
  const read = plan.cluster.value;
  const take = (taken: string, file: string): void => {
    clearTimeout(typing.current);
    setName(file);
    void plan.takeCluster(taken, file);
  };
  const type = (typed: string): void => {
    plan.wanted.value = { ...plan.wanted.value, cluster: typed };
    clearTimeout(typing.current);
    typing.current = setTimeout(() => void plan.takeCluster(typed, name), PAUSE);
  };
  const shown = studio.first.value?.cluster ?? null;
  return (
    <fieldset class="group">
      <legend>Cluster</legend>
      <label class="block">
        <span>Devices and links, as TOML or JSON; empty if all are equal</span>
        <textarea rows={text ? 9 : 3} spellcheck={false} placeholder={CLUSTER_EXAMPLE} value={text} name="cluster" aria-invalid={Boolean(read?.problem)} aria-describedby="cluster-says" onInput={(event) => type(event.currentTarget.value)} />
      </label>
      <div id="cluster-says" data-testid="cluster-says">
        {read?.problem && <p class="problem" role="alert">{read.problem}</p>}
        {read?.info && <p class="quiet small">{read.info.summary}</p>}
      </div>
      <div class="row">
        <FileButton label="Cluster file" accept=".toml,.json" read={take} />
        {shown !== null && shown !== text && <button type="button" onClick={() => take(shown, "")}>Take that of {studio.first.value!.title}</button>}
        {text !== "" && <button type="button" onClick={() => take("", "")}>Remove it</button>}
      </div>
    </fieldset>
  );
}

function ShapeFields({ shape, linked, change }: { shape: Shape; linked: boolean; change: (shape: Shape) => void }) {
  return (
    <>
      {FIELDS.filter(([name]) => !linked || !LINKS.includes(name)).map(([name, label]) => (
        <Field key={name} label={label}>
          <input value={String(shape[name])} name={name} onInput={(event) => change({ ...shape, [name]: event.currentTarget.value })} />
        </Field>
      ))}
      <Field label="Gated feed-forward">
        <input type="checkbox" checked={shape.gated} onChange={(event) => change({ ...shape, gated: event.currentTarget.checked })} />
      </Field>
    </>
  );
}

function ProfileField({ text, change }: { text: string; change: (text: string) => void }) {
  return (
    <>
      <label class="block">
        <span>A profile as JSON, as <code>penstock profile</code> writes it</span>
        <textarea rows={9} spellcheck={false} placeholder={EXAMPLE} value={text} name="profile" onInput={(event) => change(event.currentTarget.value)} />
      </label>
      <FileButton label="Profile file" accept=".json" read={change} />
    </>
  );
}

/** A button that reads a file: its text and its name. */
function FileButton({ label, accept, read }: { label: string; accept: string; read: (text: string, name: string) => void }) {
  const input = useRef<HTMLInputElement>(null);
  const take = async (): Promise<void> => {
    const file = input.current!.files?.[0];
    input.current!.value = ""; // so that the same file can be read again after a change
    if (file) read(await file.text(), file.name);
  };
  return (
    <>
      <button type="button" onClick={() => input.current!.click()}>Read it from a file</button>
      <input ref={input} type="file" class="unseen" tabIndex={-1} accept={accept} aria-label={label} onChange={() => void take()} />
    </>
  );
}

/** Starts what the form asks for; what is wrong with it, in words. A cluster that cannot be read says so beside its field. */
export async function startPlan(plan: PlanState): Promise<string | null> {
  if ((await plan.readCluster())?.problem) return "the cluster cannot be read: see what is said of it";
  const wanted = plan.wanted.value;
  try {
    const { request, limit } = requestOf(wanted);
    void plan.start(request, limit, wanted.model === "transformer" ? { time: "s", size: "B" } : { time: "", size: "" });
    return null;
  } catch (error) {
    return (error as Error).message;
  }
}

/** The request, or an error that names the field. */
export function requestOf(wanted: Wanted): { request: Record<string, unknown>; limit: number | null } {
  const limit = wanted.limit.trim() === "" ? null : readSize(wanted.limit);
  if (limit === undefined) throw new Error(`${wanted.limit} is not a size: write a number, or one like 80GiB`);
  const model = wanted.model === "transformer" ? { transformer: transformerOf(wanted.cluster ? { ...wanted.shape, bandwidth: "", latency: "" } : wanted.shape) } : { profile: profileOf(wanted.profile) };
  const seconds = Number(wanted.seconds);
  if (!(seconds > 0)) throw new Error(`the seconds to search must be more than 0, got ${wanted.seconds || "nothing"}`);
  const ranks = wanted.cluster ? { cluster: wanted.cluster } : { ranks: whole("ranks", wanted.ranks) };
  const counts = { ...ranks, microbatches: whole("microbatches", wanted.microbatches) };
  const recompute = wanted.recompute ? { recompute: true } : {};
  const request = { ...model, ...counts, ...recompute, ...(limit === null ? {} : { memory_limit: wanted.limit.trim() === String(limit) ? limit : wanted.limit.trim() }), seconds };
  return { request, limit };
}

function profileOf(text: string): unknown {
  try {
    return JSON.parse(text || EXAMPLE);
  } catch (error) {
    throw new Error(`the profile is not JSON: ${(error as Error).message}`);
  }
}
