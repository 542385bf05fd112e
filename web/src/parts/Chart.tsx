import { useEffect, useRef } from "preact/hooks";
import { describe, sentence } from "../state/words.ts";
import { useStudio } from "../state/studio.ts";
import { HELP } from "./Help.tsx";
import { pressed } from "./keys.ts";
import type { Stage } from "./stage.ts";
import { Tooltip } from "./Tooltip.tsx";

/** What stands above and below the timeline when it fills the window; on a narrow one it takes a share of the height. */
const BESIDE = 286;
const NARROW = 640;
const LEAST = 320;

export function Chart({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const holder = useRef<HTMLDivElement>(null);
  const scroller = useRef<HTMLDivElement>(null);
  const base = useRef<HTMLCanvasElement>(null);
  const overlay = useRef<HTMLCanvasElement>(null);

  useEffect(() => {
    const measure = (): void => {
      if (!holder.current) return; // the observer may speak once more when the chart is gone
      stage.width.value = holder.current.clientWidth;
      stage.room.value = Math.max(LEAST, Math.round(window.innerWidth < NARROW ? window.innerHeight * 0.6 : window.innerHeight - BESIDE));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(holder.current!);
    window.addEventListener("resize", measure);
    measure();
    stage.attach(base.current!, overlay.current!, scroller.current!);
    return () => {
      observer.disconnect();
      window.removeEventListener("resize", measure);
      stage.detach();
    };
  }, [stage]);

  const at = (event: PointerEvent | MouseEvent): [number, number] => [event.offsetX, event.offsetY];
  const dragged = useRef(false);
  /** A click selects, unless it was the end of a drag. */
  const clicked = (x: number, y: number): void => {
    if (!dragged.current) studio.selected.value = stage.under(x, y);
    dragged.current = false;
  };
  const { layout, height } = stage;
  const size = { width: `${stage.width.value}px`, height: `${height.value}px` };
  const summary = studio.panels.value.map((shown) => shown.label).join(" above ");
  return (
    <div class="chart" ref={holder}>
      <div class="scroller" ref={scroller} style={{ height: size.height }} onScroll={() => (stage.scroll.value = scroller.current!.scrollTop)}>
        <div class="content" style={{ height: `${layout.value.height + layout.value.axis}px` }}>
          <div class="sticky" style={size}>
            <canvas ref={base} style={size} aria-hidden="true" />
            <canvas
              ref={overlay}
              style={size}
              tabIndex={0}
              role="application"
              aria-label={`Timeline of ${summary}`}
              aria-describedby="chart-help chart-selected"
              data-testid="timeline"
              data-editing={studio.editing.mode.value}
              onPointerDown={(event) => event.button === 0 && stage.drag.take(...at(event)) && overlay.current!.setPointerCapture(event.pointerId)}
              onPointerMove={(event) => (stage.drag.active ? stage.drag.move(event.offsetX) : event.pointerType !== "touch" && stage.point(...at(event)))}
              onPointerUp={(event) => (dragged.current = stage.drag.drop(event.offsetX))}
              onPointerCancel={() => stage.drag.cancel()}
              onPointerLeave={() => stage.leave()}
              onClick={(event) => clicked(...at(event))}
              onKeyDown={(event) => pressed(event, studio, stage, scroller.current!) && event.preventDefault()}
            />
          </div>
        </div>
      </div>
      <Tooltip stage={stage} />
      <p id="chart-help" class="unseen">{HELP}</p>
      <Announced />
    </div>
  );
}

/** What is selected, for screen readers. */
function Announced() {
  const studio = useStudio();
  const selected = studio.selected.value;
  const shown = selected && studio.panels.value[selected.panel];
  return (
    <p id="chart-selected" class="unseen" aria-live="polite" data-testid="announced">
      {selected && shown ? sentence(describe(shown, selected)) : ""}
    </p>
  );
}
