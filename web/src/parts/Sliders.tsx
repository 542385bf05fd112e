import { useState } from "preact/hooks";
import { isSpreadView, type PerAction, type View } from "../core/index.ts";
import { figure, timeText } from "../draw/span.ts";
import { isUnchanged, meanOf, SPREAD, UNCHANGED, type Adjust } from "../state/adjust.ts";
import type { Loader } from "../state/loader.ts";
import { useStudio } from "../state/studio.ts";
import { Slider } from "./fields.tsx";

const MOST_FACTOR = 4;
const MOST_TYPED = 1e6;
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
  const latency = adjust.latency ?? meanOf(view.costs.latency);
  const work = meanOf(view.costs.f) || 1;
  const mostLatency = Math.max(2 * work, 2 * meanOf(view.costs.latency));
  return (
    <fieldset class="group">
      <legend>Costs</legend>
      {names.map((name) => (
        <Slider key={name} label={NAMES[name]} value={adjust[name]} most={MOST_FACTOR} step={0.01} said={said(view.costs[name] as PerAction, adjust[name])} read={(text) => factorIn(text, view.costs[name] as PerAction)} change={(value) => set({ [name]: value })} />
      ))}
      {/* Links of different latencies are a table, which one number would flatten. */}
      {Array.isArray(view.costs.latency) ? null : <Slider label="Latency" value={latency} most={mostLatency} said={timeText(latency, view.units.time)} read={(text) => timeFrom(text, view.units.time)} change={(value) => set({ latency: value })} />}
      {isSpreadView(view) && SPREAD.map((name) => <SpreadSlider key={name} view={view} name={name} value={adjust[name]} change={(value) => set({ [name]: value })} />)}
      <Skew stages={view.stages} skew={adjust.skew} change={(skew) => set({ skew })} />
      <OrderNote />
      <button class="plain" disabled={isUnchanged(adjust)} onClick={() => set(UNCHANGED)}>Back to the given costs</button>
    </fieldset>
  );
}

const SPREAD_NAMES = { s: "S", t: "T", broadcast: "Broadcast", combine: "Combine", logits: "Logits" } as const;

/** A cost of a spread vocabulary: itself, or its factor where it is given stage by stage. */
function SpreadSlider({ view, name, value, change }: { view: View; name: (typeof SPREAD)[number]; value: number | null; change: (value: number) => void }) {
  const base = view.costs[name];
  if (Array.isArray(base)) return <Slider label={SPREAD_NAMES[name]} value={value ?? 1} most={MOST_FACTOR} step={0.01} said={`× ${figure(value ?? 1)}`} read={numberIn} change={change} />;
  const now = value ?? base;
  const most = Math.max(2 * (meanOf(name === "logits" ? view.costs.activation : view.costs.f) || 1), 2 * base);
  return <Slider label={SPREAD_NAMES[name]} value={now} most={most} said={figure(now)} read={numberIn} change={change} />;
}

/** The cost itself where it is one number, else what it is multiplied by. */
function said(base: PerAction, factor: number): string {
  return Array.isArray(base) ? `× ${figure(factor)}` : figure(base * factor);
}

/** A number of at least 0, after a multiplication sign or not. */
function numberIn(text: string): number | undefined {
  const value = Number(text.replace(/^\s*[×x*]/, ""));
  return text.trim() !== "" && Number.isFinite(value) && value >= 0 && value <= MOST_TYPED ? value : undefined;
}

/** The factor that makes a cost the typed one; for a cost per stage, the factor itself. */
function factorIn(text: string, base: PerAction): number | undefined {
  const value = numberIn(text);
  return value === undefined || Array.isArray(base) ? value : base === 0 ? (value === 0 ? 1 : undefined) : value / base;
}

const SECONDS: Record<string, number> = { s: 1, ms: 1e-3, µs: 1e-6, us: 1e-6, ns: 1e-9 };

/** A time in the costs' unit; one in seconds with any part of a second, as 150 µs. */
function timeFrom(text: string, unit: string): number | undefined {
  const match = /^([^a-zµ]*)\s*([a-zµ]*)$/i.exec(text.trim());
  const value = match ? numberIn(match[1]) : undefined;
  if (value === undefined || !match![2] || match![2] === unit) return value;
  return unit === "s" && match![2] in SECONDS ? value * SECONDS[match![2]] : undefined;
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
      <Slider label="by" value={factor} most={MOST_FACTOR} step={0.01} said={`× ${figure(factor)}`} read={numberIn} change={(value) => set(stage, value)} />
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

/** An order that was made for costs is no longer the best when they move and there is no server to ask. */
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
