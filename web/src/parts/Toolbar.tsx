import type { Signal } from "@preact/signals";
import { useStudio } from "../state/studio.ts";
import { Segments } from "./Segments.tsx";
import type { Stage } from "./stage.ts";

const COLOURS = [["kind", "kind"], ["microbatch", "microbatch"]] as const;

/** How the timeline is shown. */
export function Toolbar({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const timed = studio.panels.value.some((shown) => shown.timed);
  return (
    <div class="toolbar" role="group" aria-label="Timeline">
      <span class="quiet" aria-hidden="true">Colour by</span>
      <Segments role="radiogroup" label="Colour by" choices={COLOURS} value={studio.colourBy.value} change={(by) => (studio.colourBy.value = by)} />
      {timed && <Toggle state={studio.messages} text="Messages" />}
      {timed && <Toggle state={studio.memory} text="Memory" />}
      {timed && <Toggle state={studio.path} text="Critical path" />}
      <span class="spring" />
      <div class="segments" role="group" aria-label="Zoom">
        <button onClick={() => stage.zoomBy(1 / 2)} aria-label="Zoom out" title="Zoom out (−)">−</button>
        <button onClick={() => stage.zoomBy(2)} aria-label="Zoom in" title="Zoom in (+)">+</button>
        <button onClick={() => studio.setSpan(0, 1)} title="Show everything (0)">Fit</button>
      </div>
    </div>
  );
}

function Toggle({ state, text }: { state: Signal<boolean>; text: string }) {
  return (
    <button class="toggle" aria-pressed={state.value} onClick={() => (state.value = !state.value)}>
      {text}
    </button>
  );
}
