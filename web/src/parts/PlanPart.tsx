import { useState } from "preact/hooks";
import { percent, sizeText, timeText } from "../draw/span.ts";
import * as api from "../state/api.ts";
import type { Candidate } from "../state/api.ts";
import type { Loader } from "../state/loader.ts";
import type { PlanState } from "../state/plan.ts";
import { PlanForm } from "./PlanForm.tsx";
import { PLACEMENTS, plotted, Tradeoff } from "./Tradeoff.tsx";

const FEW = 40;

/** A model and its limits on one side, what the planner finds on the other. */
export function PlanPart({ plan, loader }: { plan: PlanState; loader: Loader }) {
  const open = (candidate: Candidate): void =>
    void loader.guarded(async () => {
      const view = await api.openCandidate(plan.job.value!, candidate.index);
      loader.show(view, null, null);
      loader.say("The address does not hold a candidate: export it to keep it.");
    });
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
            <Tradeoff plan={plan} open={open} />
            <PlacementLegend plan={plan} />
            <Summary plan={plan} open={open} />
            <CandidateTable plan={plan} open={open} />
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
  if (plan.error.value) return <p class="problem" role="alert">{plan.error.value}</p>;
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
    </ul>
  );
}

function Summary({ plan, open }: { plan: PlanState; open: (candidate: Candidate) => void }) {
  const best = plan.best.value;
  const { time, size } = plan.units.value;
  const result = plan.result.value;
  if (plan.error.value) return <p class="problem" role="alert">{plan.error.value}</p>;
  if (!best) return <p>Nothing that was tried fits so far.</p>;
  return (
    <p class="best-line">
      The best is <strong>{best.name}</strong>: time {timeText(best.makespan!, time)}, memory {sizeText(best.memory!, size)}
      {result?.gap != null && `, at most ${percent(result.gap)} above what any schedule can reach`}.{" "}
      <button class="primary" onClick={() => open(best)}>Open it</button>
    </p>
  );
}

function CandidateTable({ plan, open }: { plan: PlanState; open: (candidate: Candidate) => void }) {
  const [all, setAll] = useState(false);
  const { time, size } = plan.units.value;
  const rows = plotted(plan.candidates.value).sort((one, other) => Number(other.fits) - Number(one.fits) || one.makespan! - other.makespan!);
  const shown = all ? rows : rows.slice(0, FEW);
  return (
    <div class="wide">
      <table data-testid="candidates">
        <caption class="unseen">Candidates, the best first</caption>
        <thead>
          <tr>{["schedule", "chunks", "time", "bubble", "memory", "fits", ""].map((name) => <th key={name} scope="col">{name}</th>)}</tr>
        </thead>
        <tbody>
          {shown.map((each) => (
            <tr key={each.index}>
              <th scope="row">{each.name}</th>
              <td>{String(each.chunks ?? "")}</td>
              <td>{timeText(each.makespan!, time)}</td>
              <td>{typeof each.bubble === "number" ? percent(each.bubble) : "–"}</td>
              <td>{sizeText(each.memory!, size)}</td>
              <td>{each.fits ? "yes" : "no"}</td>
              <td><button class="plain" onClick={() => open(each)} aria-label={`Open ${each.name}`}>Open</button></td>
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
