import { useState } from "preact/hooks";
import type { PerAction } from "../core/index.ts";
import { figure } from "../draw/span.ts";
import { isUnchanged, meanOf, UNCHANGED, type Adjust } from "../state/adjust.ts";
import type { Loader } from "../state/loader.ts";
import { useStudio } from "../state/studio.ts";
import { Slider } from "./fields.tsx";

const MOST_FACTOR = 4;
const NAMES = { f: "F", i: "I", w: "W", b: "B" } as const;

/** Costs that can be moved; the page times everything again while they move. */
export function Sliders({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const view = studio.first.value;
  if (!view || !view.timed) return null;
  const adjust = studio.adjust.value;
  const set = (patch: Partial<Adjust>): void => {
    studio.move({ ...adjust, ...patch });
    loader.reorderSoon();
  };
  const names = (["f", "i", "w", "b"] as const).filter((name) => view.costs[name] !== null);
  const latency = adjust.latency ?? view.costs.latency;
  const work = meanOf(view.costs.f) || 1;
  const mostLatency = Math.max(2 * work, 2 * view.costs.latency);
  return (
    <fieldset class="group">
      <legend>Costs</legend>
      {names.map((name) => (
        <Slider key={name} label={NAMES[name]} value={adjust[name]} most={MOST_FACTOR} step={0.01} said={said(view.costs[name] as PerAction, adjust[name])} change={(value) => set({ [name]: value })} />
      ))}
      <Slider label="Latency" value={latency} most={mostLatency} said={figure(latency)} change={(value) => set({ latency: value })} />
      <Skew stages={view.stages} skew={adjust.skew} change={(skew) => set({ skew })} />
      <OrderNote />
      <button class="plain" disabled={isUnchanged(adjust)} onClick={() => set(UNCHANGED)}>Back to the given costs</button>
    </fieldset>
  );
}

/** The cost itself where it is one number, else what it is multiplied by. */
function said(base: PerAction, factor: number): string {
  return Array.isArray(base) ? `× ${figure(factor)}` : figure(base * factor);
}

function Skew({ stages, skew, change }: { stages: number; skew: Record<number, number>; change: (skew: Record<number, number>) => void }) {
  const [chosen, setStage] = useState<number | null>(null);
  const skewed = Object.keys(skew).map(Number).filter((each) => each < stages && skew[each] !== 1);
  const stage = Math.min(chosen ?? skewed[0] ?? Math.floor(stages / 2), stages - 1);
  const factor = skew[stage] ?? 1;
  const set = (of: number, value: number): void => {
    const made = { ...skew, [of]: value };
    if (value === 1) delete made[of];
    change(made);
  };
  return (
    <div class="skew">
      <label class="field">
        <span>Skew stage</span>
        <select value={stage} onChange={(event) => setStage(Number(event.currentTarget.value))}>
          {Array.from({ length: stages }, (_, each) => <option key={each} value={each}>{each}{skew[each] !== undefined ? ` (× ${figure(skew[each])})` : ""}</option>)}
        </select>
      </label>
      <Slider label="by" value={factor} most={MOST_FACTOR} step={0.01} said={`× ${figure(factor)}`} change={(value) => set(stage, value)} />
      {skewed.length > 0 && (
        <ul class="chips" aria-label="Skewed stages">
          {skewed.map((each) => (
            <li key={each}>
              <button class="chip" onClick={() => set(each, 1)} title="Remove">stage {each} × {figure(skew[each])} ✕</button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

/** An order that was made for costs is no longer the best when they move and nobody can be asked. */
function OrderNote() {
  const studio = useStudio();
  const made = [studio.first.value, studio.second.value].some((view) => view?.dependsOnCosts);
  if (!made || isUnchanged(studio.adjust.value)) return null;
  return (
    <p class="quiet small">
      {studio.offline || !studio.choice.value
        ? "This order was made for the given costs; the studio makes a new one, this page only times it."
        : "This order follows the costs: the studio makes it anew when the sliders rest."}
    </p>
  );
}
