import type { ScheduleInfo } from "../state/api.ts";
import type { Loader } from "../state/loader.ts";
import { useStudio } from "../state/studio.ts";
import { FORMS, type Choice, type Form, type Option, type Other } from "../state/url.ts";
import { Field, NumberField } from "./fields.tsx";
import { OpenButton, RecordButton } from "./Header.tsx";
import { Limit } from "./Limit.tsx";
import { Sliders } from "./Sliders.tsx";

const FORM_NAMES: Record<Form, string> = { schedule: "schedule", program: "program", sharded: "sharded program" };

/** Everything that changes what is shown. */
export function Controls({ loader }: { loader: Loader }) {
  const studio = useStudio();
  return (
    <aside class="controls" aria-label="Controls">
      <Schedule loader={loader} />
      <Sliders loader={loader} />
      <Compare loader={loader} />
      {studio.offline && (
        <p class="quiet small">
          This page is one file: it times and draws by itself. To choose another schedule or to plan, run <code>penstock studio</code>.
        </p>
      )}
    </aside>
  );
}

function Schedule({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const { schedules, choice, other, first, offline } = studio;
  const view = first.value;
  const shown: Choice = choice.value ?? {
    schedule: "",
    ranks: view?.ranks ?? 4,
    microbatches: view?.microbatches ?? 8,
    chunks: null,
    options: {},
    form: view?.lowered ? "program" : "schedule",
    offload: "",
  };
  const info = schedules.value.find((each) => each.name === shown.schedule);
  const change = (patch: Partial<Choice>): void => void loader.choose({ ...shown, ...patch }, other.value);
  const fixed = offline || !choice.value;
  return (
    <fieldset class="group">
      <legend>Schedule</legend>
      <Field label="Name" wide>
        <select value={shown.schedule} disabled={offline} onChange={(event) => change({ schedule: event.currentTarget.value, chunks: null, options: {} })}>
          {!choice.value && <option value="">{view?.source.name ?? ""}</option>}
          {schedules.value.map((each) => <option key={each.name} value={each.name}>{each.name}</option>)}
        </select>
      </Field>
      {info && <p class="quiet small">{info.summary}</p>}
      <NumberField label="Ranks" value={shown.ranks} disabled={fixed} change={(ranks) => change({ ranks })} />
      <NumberField label="Microbatches" value={shown.microbatches} disabled={fixed} change={(microbatches) => change({ microbatches })} />
      {fixed && view && view.slices > 1 && <NumberField label="Slices" value={view.slices} disabled change={() => undefined} />}
      {info && !info.chunks.fixed && (
        <NumberField label="Chunks per rank" value={shown.chunks ?? info.chunks.default} least={info.chunks.step} step={info.chunks.step} change={(chunks) => change({ chunks })} />
      )}
      {info && <Options info={info} options={shown.options} change={(options) => change({ options })} />}
      <Field label="As a" wide>
        <select value={shown.form} disabled={fixed} onChange={(event) => change(ofForm(event.currentTarget.value as Form))}>
          {FORMS.map((form) => <option key={form} value={form}>{FORM_NAMES[form]}</option>)}
        </select>
      </Field>
      {!fixed && shown.form !== "schedule" && (
        <Field label="Offload, %">
          <input value={shown.offload} placeholder="none" title="The share of each rank's activations that is moved to host memory until their backward; 100+50+0 for one per rank" onChange={(event) => change({ offload: event.currentTarget.value.trim() })} />
        </Field>
      )}
      <Limit loader={loader} />
      {fixed && view && !offline && <p class="quiet small">Opened from {view.source.kind === "plan" ? "a plan" : view.source.name}. Choose a schedule to make a new one.</p>}
    </fieldset>
  );
}

/** A schedule that is not lowered moves nothing. */
function ofForm(form: Form): Partial<Choice> {
  return form === "schedule" ? { form, offload: "" } : { form };
}

function Options({ info, options, change }: { info: ScheduleInfo; options: Record<string, Option>; change: (options: Record<string, Option>) => void }) {
  const set = (name: string, value: Option | null): void => {
    const made = { ...options };
    if (value === null) delete made[name];
    else made[name] = value;
    change(made);
  };
  return (
    <>
      {info.options.filter(({ name }) => name !== "memory_limit").map(({ name, type, default: usual }) => (
        <Field key={name} label={labelOf(name)}>
          {type === "bool" ? (
            <input type="checkbox" checked={Boolean(options[name] ?? usual)} onChange={(event) => set(name, event.currentTarget.checked)} />
          ) : (
            <input value={String(options[name] ?? "")} placeholder={usual === null || usual === undefined ? "auto" : String(usual)} onChange={(event) => set(name, read(event.currentTarget.value, type))} />
          )}
        </Field>
      ))}
    </>
  );
}

/** An option's name as a label: `group_size` is Group size. */
function labelOf(name: string): string {
  const words = name.replace(/_/g, " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

function read(text: string, type: string): Option | null {
  if (text.trim() === "") return null;
  return type === "text" || !Number.isFinite(Number(text)) ? text.trim() : Number(text);
}

function Compare({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const { schedules, other, second, first, offline } = studio;
  if (!first.value) return null;
  if (offline && studio.given.value.length > 1) return <Given loader={loader} />;
  const info = schedules.value.find((each) => each.name === other.value?.schedule);
  const change = (made: Other | null): void => void loader.compareWith(made);
  const named = (name: string): void => change(name === "" ? null : { schedule: name, chunks: null, options: {} });
  return (
    <fieldset class="group">
      <legend>Compare</legend>
      {!offline && (
        <Field label="With" wide>
          <select value={other.value?.schedule ?? (second.value ? "*" : "")} data-testid="compare" onChange={(event) => named(event.currentTarget.value)}>
            <option value="">nothing</option>
            {second.value && !other.value && <option value="*">{second.value.title}</option>}
            {schedules.value.map((each) => <option key={each.name} value={each.name}>{each.name}</option>)}
          </select>
        </Field>
      )}
      {info && other.value && !info.chunks.fixed && (
        <NumberField label="Chunks per rank" value={other.value.chunks ?? info.chunks.default} least={info.chunks.step} step={info.chunks.step} change={(chunks) => change({ ...other.value!, chunks })} />
      )}
      {info && other.value && <Options info={info} options={other.value.options} change={(options) => change({ ...other.value!, options })} />}
      <div class="row">
        <OpenButton loader={loader} below text="Compare with a file" />
        <RecordButton loader={loader} />
        {second.value && <button onClick={() => change(null)}>Stop</button>}
        {studio.recording.value && <button onClick={() => (studio.recording.value = null)}>Remove the run</button>}
      </div>
      {second.value && second.value.stages !== first.value.stages && (
        <p class="quiet small">Both do the same work: what a rank computes and holds is divided among its stages.</p>
      )}
    </fieldset>
  );
}

/** The names that titles begin with, if these tell them apart. */
export function toldApart(titles: string[]): string[] {
  const names = titles.map((title) => title.split(",")[0]);
  return new Set(names).size === titles.length ? names : titles;
}

/** The documents that the page came with, two at a time. */
function Given({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const { given, first, second } = studio;
  const list = toldApart(given.value.map((view) => view.title)).map((title, index) => <option key={index} value={index}>{title}</option>);
  const chosen = (index: number): typeof first.value => given.value[index] ?? null;
  return (
    <fieldset class="group">
      <legend>Compare</legend>
      <RecordButton loader={loader} />
      <Field label="Above" wide>
        <select title={first.value?.title} value={given.value.indexOf(first.value!)} onChange={(event) => loader.show(chosen(Number(event.currentTarget.value))!, second.value, null)}>{list}</select>
      </Field>
      <Field label="Below" wide>
        <select title={second.value?.title} data-testid="compare" value={second.value ? given.value.indexOf(second.value) : -1} onChange={(event) => loader.show(first.value!, chosen(Number(event.currentTarget.value)), null)}>
          <option value={-1}>nothing</option>
          {list}
        </select>
      </Field>
    </fieldset>
  );
}
