import { useRef, useState } from "preact/hooks";
import { transformerOf, whole, type PlanState, type Shape, type Wanted } from "../state/plan.ts";
import { readSize } from "../state/sizes.ts";
import { Field } from "./fields.tsx";
import { Segments } from "./Segments.tsx";

const MODELS = [["transformer", "transformer"], ["profile", "profile"]] as const;

const EXAMPLE = '{"layers": [{"f": 1, "i": 1, "w": 1, "activation": 1, "count": 16}], "latency": 0.1}';

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
    setProblem(startPlan(plan));
  };
  const text = (name: "ranks" | "microbatches" | "limit" | "seconds", label: string) => (
    <Field label={label}>
      <input value={wanted[name]} name={name} onInput={(event) => set({ [name]: event.currentTarget.value })} />
    </Field>
  );
  return (
    <form class="controls plan-form" aria-label="What to plan" onSubmit={submit} noValidate>
      <fieldset class="group">
        <legend>Pipeline</legend>
        {text("ranks", "Ranks")}
        {text("microbatches", "Microbatches")}
        {text("limit", "Memory per rank")}
        {text("seconds", "Seconds to search")}
        <Field label="Recompute if needed">
          <input type="checkbox" checked={wanted.recompute} onChange={(event) => set({ recompute: event.currentTarget.checked })} />
        </Field>
      </fieldset>
      <fieldset class="group">
        <legend>Model</legend>
        <Segments role="radiogroup" label="Model given as" choices={MODELS} value={wanted.model} change={(model) => set({ model })} />
        {wanted.model === "transformer" ? <ShapeFields shape={wanted.shape} change={(shape) => set({ shape })} /> : <ProfileField text={wanted.profile} change={(profile) => set({ profile })} />}
      </fieldset>
      <div class="submit">
        {problem && <p class="problem" role="alert">{problem}</p>}
        <button class="primary" type="submit" disabled={plan.status.value === "running"}>Plan</button>
      </div>
    </form>
  );
}

function ShapeFields({ shape, change }: { shape: Shape; change: (shape: Shape) => void }) {
  return (
    <>
      {FIELDS.map(([name, label]) => (
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
  const input = useRef<HTMLInputElement>(null);
  const read = async (): Promise<void> => {
    const file = input.current!.files?.[0];
    if (file) change(await file.text());
  };
  return (
    <>
      <label class="block">
        <span>A profile as JSON, as <code>penstock profile</code> writes it</span>
        <textarea rows={9} spellcheck={false} placeholder={EXAMPLE} value={text} name="profile" onInput={(event) => change(event.currentTarget.value)} />
      </label>
      <button type="button" onClick={() => input.current!.click()}>Read it from a file</button>
      <input ref={input} type="file" class="unseen" tabIndex={-1} accept=".json" aria-label="Profile file" onChange={() => void read()} />
    </>
  );
}

/** Starts what the form asks for; what is wrong with it, in words. */
export function startPlan(plan: PlanState): string | null {
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
  const model = wanted.model === "transformer" ? { transformer: transformerOf(wanted.shape) } : { profile: profileOf(wanted.profile) };
  const seconds = Number(wanted.seconds);
  if (!(seconds > 0)) throw new Error(`the seconds to search must be more than 0, got ${wanted.seconds || "nothing"}`);
  const counts = { ranks: whole("ranks", wanted.ranks), microbatches: whole("microbatches", wanted.microbatches) };
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
