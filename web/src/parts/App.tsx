import { useEffect, useRef, useState } from "preact/hooks";
import type { Target } from "../draw/target.ts";
import type { Loader } from "../state/loader.ts";
import type { PlanState } from "../state/plan.ts";
import { useStudio } from "../state/studio.ts";
import type { Themes } from "../state/theme.ts";
import { Changes } from "./Changes.tsx";
import { Chart } from "./Chart.tsx";
import { Controls } from "./Controls.tsx";
import { Details } from "./Details.tsx";
import { Findings } from "./Findings.tsx";
import { Header } from "./Header.tsx";
import { Help } from "./Help.tsx";
import { pressedAnywhere, reveal } from "./keys.ts";
import { Legend } from "./Legend.tsx";
import { NumbersCard } from "./NumbersCard.tsx";
import { PlanPart } from "./PlanPart.tsx";
import type { Stage } from "./stage.ts";
import { Tiles } from "./Tiles.tsx";
import { Toolbar } from "./Toolbar.tsx";

interface Props {
  loader: Loader;
  themes: Themes;
  stage: Stage;
  plan: PlanState;
}

export function App({ loader, themes, stage, plan }: Props) {
  const studio = useStudio();
  const dropping = useDrop((files, onChart) => void loader.drop(files, onChart));
  useEffect(() => {
    document.documentElement.dataset.theme = themes.dark.value ? "dark" : "light";
  }, [themes.dark.value]);
  useEffect(() => {
    const title = studio.title.value;
    document.title = title ? `${title} · Penstock` : "Penstock studio";
  }, [studio.title.value]);
  useEffect(() => {
    const press = (event: KeyboardEvent): void => void (pressedAnywhere(event, studio, stage) && event.preventDefault());
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
  return (
    <>
      <a class="skip" href="#timeline" onClick={(event) => (event.preventDefault(), document.querySelector<HTMLElement>("[data-testid=timeline]")?.focus())}>Skip to the timeline</a>
      <Header loader={loader} themes={themes} stage={stage} plan={plan} />
      <Notice />
      {studio.tab.value === "plan" && !studio.offline ? <PlanPart plan={plan} loader={loader} /> : <TimelinePart loader={loader} stage={stage} themes={themes} />}
      <Help />
      {dropping && <div class="drop" aria-hidden="true"><p>Drop a CSV, a timeline, a plan or a saved view to open it. On the chart, a recorded run, or one profiler trace per rank, is laid over what is shown.</p></div>}
    </>
  );
}

function TimelinePart({ loader, stage, themes }: { loader: Loader; stage: Stage; themes: Themes }) {
  const studio = useStudio();
  const frame = useRef<HTMLDivElement>(null);
  const go = (target: Target): void => {
    studio.selected.value = target;
    const scroller = frame.current?.querySelector<HTMLElement>(".scroller");
    if (scroller) reveal(studio, stage, scroller, target);
    frame.current?.scrollIntoView({ block: "nearest" });
  };
  const ready = studio.panels.value.length > 0;
  return (
    <main class="timeline">
      <Controls loader={loader} />
      <div class="stage">
        {ready && <Tiles />}
        <section class="card frame" ref={frame} aria-label="Timeline" aria-busy={studio.busy.value > 0}>
          {ready ? (
            <>
              <Toolbar stage={stage} />
              <Chart stage={stage} />
              <Legend themes={themes} stage={stage} />
            </>
          ) : (
            <Waiting />
          )}
          {studio.busy.value > 0 && <div class="busy" role="status"><span class="unseen">loading</span></div>}
        </section>
      </div>
      {ready && (
        <aside class="dock" aria-label="Selection and numbers">
          <Findings go={go} />
          <Changes />
          <Details go={go} />
          <NumbersCard go={go} />
        </aside>
      )}
    </main>
  );
}

function Waiting() {
  const studio = useStudio();
  return (
    <div class="empty" data-testid="empty">
      {studio.busy.value > 0 ? <p>Building the schedule…</p> : <p>Nothing is shown. Choose a schedule, or open a file: a CSV, a timeline, a plan.</p>}
    </div>
  );
}

function Notice() {
  const studio = useStudio();
  const notice = studio.notice.value;
  useEffect(() => {
    if (notice?.kind !== "note") return;
    const timer = setTimeout(() => (studio.notice.value = null), 6000);
    return () => clearTimeout(timer);
  }, [notice]);
  return (
    <div class="notices" aria-live="assertive">
      {notice && (
        <div class={`notice ${notice.kind}`} data-testid="notice">
          <p>{notice.text}</p>
          <button class="plain" onClick={() => (studio.notice.value = null)} aria-label="Close">✕</button>
        </div>
      )}
    </div>
  );
}

/** Whether files are held over the page; what is dropped is opened, or laid over the chart. */
function useDrop(open: (files: File[], onChart: boolean) => void): boolean {
  const [over, setOver] = useState(false);
  useEffect(() => {
    const drag = (event: DragEvent): void => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (event: DragEvent): void => void (event.relatedTarget === null && setOver(false));
    const drop = (event: DragEvent): void => {
      event.preventDefault();
      setOver(false);
      const files = [...(event.dataTransfer?.files ?? [])];
      if (files.length) open(files, event.target instanceof Element && event.target.closest(".frame") !== null);
    };
    window.addEventListener("dragover", drag);
    window.addEventListener("dragleave", leave);
    window.addEventListener("drop", drop);
    return () => {
      window.removeEventListener("dragover", drag);
      window.removeEventListener("dragleave", leave);
      window.removeEventListener("drop", drop);
    };
  }, []);
  return over;
}
