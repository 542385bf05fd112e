import type { Signal } from "@preact/signals";
import { useStudio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

/** How the timeline is shown. */
export function Toolbar({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const timed = studio.panels.value.some((shown) => shown.timed);
  return (
    <div class="toolbar" role="toolbar" aria-label="Timeline">
      <span class="quiet" aria-hidden="true">Colour by</span>
      <div class="segments" role="radiogroup" aria-label="Colour by">
        {(["kind", "microbatch"] as const).map((by) => (
          <button key={by} role="radio" aria-checked={studio.colourBy.value === by} onClick={() => (studio.colourBy.value = by)}>
            {by}
          </button>
        ))}
      </div>
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
