import { useState } from "preact/hooks";
import { percent, sizeText, timeIn, type TimeUnit } from "../draw/span.ts";
import * as api from "../state/api.ts";
import type { Candidate } from "../state/api.ts";
import type { Loader } from "../state/loader.ts";
import { paretoFront, reasonIn, remediesIn, type PlanState, type Remedy } from "../state/plan.ts";
import { PLAN_COMMAND, savePlan } from "../state/planExports.ts";
import { useStudio } from "../state/studio.ts";
import { PlanForm, startPlan } from "./PlanForm.tsx";
import { PLACEMENTS, plotted, timedOf, Tradeoff } from "./Tradeoff.tsx";

const FEW = 40;

/** What a candidate can be opened as: in place of what is shown, or below it. */
interface Opens {
  open: (candidate: Candidate) => void;
  beside: ((candidate: Candidate) => void) | null;
}

/** A model and its limits on one side, what the planner finds on the other. */
export function PlanPart({ plan, loader }: { plan: PlanState; loader: Loader }) {
  const studio = useStudio();
  const load = (candidate: Candidate, beside: boolean): void =>
    void loader.guarded(async () => {
      const view = await api.openCandidate(plan.job.value!, candidate.index);
      const first = studio.first.value;
      if (beside && first) loader.show(first, view, studio.file.value);
      else loader.show(view, null, null);
      loader.say("The address does not hold a candidate: export it to keep it.");
    });
  const opens: Opens = { open: (candidate) => load(candidate, false), beside: studio.first.value ? (candidate) => load(candidate, true) : null };
  return (
    <main class="plan">
      <PlanForm plan={plan} />
      <section class="card found" aria-labelledby="found-title">
        <div class="found-head">
          <h2 id="found-title">Candidates</h2>
          <Status plan={plan} />
        </div>
        {plan.candidates.value.length ? (
          <>
            {plan.error.value && <Refusal plan={plan} />}
            {timedOf(plan.candidates.value).length > 0 && (
              <>
                <Tradeoff plan={plan} open={opens.open} />
                <PlacementLegend plan={plan} />
                {!plan.error.value && <Summary plan={plan} opens={opens} />}
                <CandidateTable plan={plan} opens={opens} />
              </>
            )}
            <NotTimed plan={plan} />
          </>
        ) : (
          <Empty plan={plan} />
        )}
      </section>
    </main>
  );
}

function Status({ plan }: { plan: PlanState }) {
  const progress = plan.progress.value;
  const running = plan.status.value === "running";
  return (
    <div class="status" role="status" data-testid="plan-status">
      {running && <progress {...(progress && progress.total > 1 ? { value: progress.done, max: progress.total } : {})} />}
      {running && <span>{progress ? `${progress.phase}${progress.what ? `: ${progress.what}` : ""}` : "starting"}</span>}
      {plan.status.value === "done" && <span>{plan.result.value?.cancelled ? "cancelled" : "done"}, {plan.candidates.value.length} considered, {plan.candidates.value.filter((each) => each.makespan !== null).length} timed</span>}
      {running && <button disabled={plan.cancelling.value} onClick={() => void plan.cancel()}>Cancel</button>}
    </div>
  );
}

function Empty({ plan }: { plan: PlanState }) {
  if (plan.error.value) return <Refusal plan={plan} />;
  return (
    <p class="empty">
      {plan.status.value === "running"
        ? "The planner is starting; candidates appear here as they are timed."
        : "Describe the model and press Plan. Every schedule that is tried appears as a mark: time against memory. Click one to see it run."}
    </p>
  );
}

function PlacementLegend({ plan }: { plan: PlanState }) {
  const used = new Set(plan.candidates.value.map((each) => String(each.placement)));
  return (
    <ul class="legend" aria-label="Colours">
      {Object.entries(PLACEMENTS).filter(([name]) => used.has(name)).map(([name, fill]) => (
        <li key={name}>
          <span class="swatches" aria-hidden="true"><i class="round" style={{ background: fill }} /></span>
          {name}
        </li>
      ))}
      <li class="quiet">hollow: does not fit</li>
      <li class="front-line">best of both: time and memory</li>
    </ul>
  );
}

function Summary({ plan, opens }: { plan: PlanState; opens: Opens }) {
  const studio = useStudio();
  const best = plan.best.value;
  const { size } = plan.units.value;
  const result = plan.result.value;
  const running = plan.status.value === "running";
  if (!best && result?.name === undefined) return <p>Nothing that was tried fits{running ? " so far" : ""}.</p>;
  const [name, makespan, memory] = best ? [best.name, best.makespan!, best.memory!] : [result!.name!, result!.makespan!, result!.memory!];
  return (
    <div class="best-line" data-testid="best">
      <p>
        {plan.isSaved.value ? "The planner chose " : "The best so far is "}
        <strong>{name}</strong>: time {timeIn(makespan, plan.timeUnit.value)}, memory {sizeText(memory, size)}.
        {result?.gap != null && (
          <>
            {" "}At most {percent(result.gap)} above what any order of this placement and partition can reach
            {result.overall_gap != null && `, and ${percent(result.overall_gap)} above what any plan can`}.
          </>
        )}
      </p>
      <div class="row">
        {best && <button class="primary" onClick={() => opens.open(best)}>Open it</button>}
        {best && opens.beside && <button onClick={() => opens.beside!(best)}>Open it beside {studio.title.value}</button>}
        <button disabled={!plan.isSaved.value} onClick={() => void savePlan(plan).catch((error: unknown) => studio.say((error as Error).message, "error"))}>Save plan.json</button>
        <button disabled={!plan.isSaved.value} onClick={() => void studio.copy(PLAN_COMMAND, "The command is copied; save plan.json beside it")}>Copy <code>penstock train</code></button>
      </div>
    </div>
  );
}

/** Why there is no plan, with what would fit as buttons. */
function Refusal({ plan }: { plan: PlanState }) {
  const error = plan.error.value!;
  const take = (remedy: Remedy): void => {
    plan.wanted.value = remedy.change(plan.wanted.value);
    void startPlan(plan).then((problem) => {
      if (problem) plan.error.value = problem;
    });
  };
  const remedies = remediesIn(error);
  return (
    <div class="refusal">
      <p class="problem" role="alert">{reasonIn(error)}</p>
      {remedies.length > 0 && (
        <ul class="remedies" aria-label="What would fit">
          {remedies.map((remedy) => (
            <li key={remedy.text}>
              <button class="remedy" onClick={() => take(remedy)}>{remedy.text}</button>
              {remedy.why && <span class="quiet small">{remedy.why}</span>}
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

interface Column {
  name: string;
  of: (candidate: Candidate) => number | string;
  text: (candidate: Candidate, units: { time: TimeUnit; size: string }) => string;
}

/** The schedule, and its slices if sequences are cut. */
function nameOf(each: Candidate): string {
  return Number(each.slices ?? 1) > 1 ? `${each.name}, ${String(each.slices)} slices` : each.name;
}

const COLUMNS: Column[] = [
  { name: "schedule", of: (each) => each.name, text: nameOf },
  { name: "placement", of: (each) => String(each.placement ?? ""), text: (each) => String(each.placement ?? "") },
  { name: "chunks", of: (each) => Number(each.chunks ?? 0), text: (each) => String(each.chunks ?? "") },
  { name: "time", of: (each) => each.makespan!, text: (each, units) => timeIn(each.makespan!, units.time) },
  { name: "bubble", of: (each) => (typeof each.bubble === "number" ? each.bubble : Infinity), text: (each) => (typeof each.bubble === "number" ? percent(each.bubble) : "–") },
  { name: "memory", of: (each) => each.memory!, text: (each, units) => sizeText(each.memory!, units.size) },
  { name: "fits", of: (each) => (each.fits ? 0 : 1), text: (each) => (each.fits ? "yes" : "no") },
];

/** The candidates in the order of a column; those that fit first unless a column was chosen. */
export function sortCandidates(candidates: Candidate[], column: string | null, down: boolean): Candidate[] {
  const key = COLUMNS.find(({ name }) => name === column)?.of;
  if (!key) return [...candidates].sort((one, other) => Number(other.fits) - Number(one.fits) || one.makespan! - other.makespan!);
  const compare = (one: Candidate, other: Candidate): number => {
    const [a, b] = [key(one), key(other)];
    return (typeof a === "string" ? a.localeCompare(String(b)) : a - Number(b)) || one.makespan! - other.makespan!;
  };
  return [...candidates].sort((one, other) => (down ? -1 : 1) * compare(one, other));
}

function CandidateTable({ plan, opens }: { plan: PlanState; opens: Opens }) {
  const [all, setAll] = useState(false);
  const [sorted, setSorted] = useState<{ column: string; down: boolean } | null>(null);
  const rows = sortCandidates(timedOf(plan.candidates.value), sorted?.column ?? null, sorted?.down ?? false);
  const front = new Set(paretoFront(plotted(plan.candidates.value, plan.best.value)).map((each) => each.index));
  const shown = all ? rows : rows.slice(0, FEW);
  const units = { time: plan.timeUnit.value, size: plan.units.value.size };
  const sort = (column: string): void => setSorted({ column, down: sorted?.column === column && !sorted.down });
  return (
    <div class="wide">
      <table class="candidates" data-testid="candidates">
        <caption class="unseen">Candidates</caption>
        <thead>
          <tr>
            {COLUMNS.map(({ name }) => (
              <th key={name} scope="col" aria-sort={sorted?.column === name ? (sorted.down ? "descending" : "ascending") : "none"}>
                <button class="plain" onClick={() => sort(name)}>{name}{sorted?.column === name ? (sorted.down ? " ▾" : " ▴") : ""}</button>
              </th>
            ))}
            <th scope="col"><span class="unseen">open</span></th>
          </tr>
        </thead>
        <tbody>
          {shown.map((each) => (
            <tr key={each.index} class={each.index === plan.best.value?.index ? "chosen" : ""}>
              {COLUMNS.map(({ name, text }, k) => {
                const said = text(each, units);
                return k === 0 ? <th key={name} scope="row">{said}{front.has(each.index) && <span class="front" title="No other is better in both time and memory"> ◆</span>}</th> : <td key={name} data-name={name}>{said}</td>;
              })}
              <td class="opens">
                <button class="plain" onClick={() => opens.open(each)} aria-label={`Open ${each.name}`}>Open</button>
                {opens.beside && <button class="plain" onClick={() => opens.beside!(each)} aria-label={`Open ${each.name} beside the current schedule`}>Beside</button>}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > FEW && <button class="plain" onClick={() => setAll(!all)}>{all ? "Fewer" : `All ${rows.length}`}</button>}
    </div>
  );
}

/** What was ruled out before it was timed, and why. */
function NotTimed({ plan }: { plan: PlanState }) {
  const rest = plan.candidates.value.filter((each) => each.makespan === null);
  if (!rest.length) return null;
  return (
    <details class="not-timed">
      <summary>{rest.length} were ruled out without being timed</summary>
      <ul>
        {rest.map((each) => (
          <li key={each.index}>
            {each.name}: <span class="quiet">{String(each.verdict)}{each.reason ? `, ${String(each.reason)}` : ""}</span>
          </li>
        ))}
      </ul>
    </details>
  );
}
