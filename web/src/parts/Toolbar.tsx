import type { Signal } from "@preact/signals";
import { useStudio } from "../state/studio.ts";
import { toggleEditing } from "./keys.ts";
import { Segments } from "./Segments.tsx";
import type { Stage } from "./stage.ts";

const COLOURS = [["kind", "kind"], ["microbatch", "microbatch"]] as const;

/** How the timeline is shown. */
export function Toolbar({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const timed = studio.panels.value.some((shown) => shown.timed);
  return (
    <div class="toolbar" role="group" aria-label="Timeline">
      <button class="toggle strong" aria-pressed={studio.editing.mode.value} onClick={() => toggleEditing(studio)} title="Drag actions to change the schedule (e)">Edit</button>
      <span class="quiet" aria-hidden="true">Colour by</span>
      <Segments role="radiogroup" label="Colour by" choices={COLOURS} value={studio.colourBy.value} change={(by) => (studio.colourBy.value = by)} />
      {timed && <Toggle state={studio.messages} text="Messages" />}
      {timed && <Toggle state={studio.memory} text="Memory" />}
      {timed && <Toggle state={studio.path} text="Critical path" />}
      <span class="spring" />
      {timed && <Play />}
      <div class="segments" role="group" aria-label="Zoom">
        <button onClick={() => stage.zoomBy(1 / 2)} aria-label="Zoom out" title="Zoom out (− or S)">−</button>
        <button onClick={() => stage.zoomBy(2)} aria-label="Zoom in" title="Zoom in (+ or W)">+</button>
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

/** The step as an animation: a line runs through it in the time that the reader has, not in its own. */
function Play() {
  const studio = useStudio();
  const playing = studio.playing.value;
  return (
    <button class="toggle" aria-pressed={playing} onClick={() => studio.play()} title="Play the step (Space)">{playing ? "Pause" : "Play"}</button>
  );
}
