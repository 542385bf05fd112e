import { useRef } from "preact/hooks";
import { useStudio } from "../state/studio.ts";
import type { Loader } from "../state/loader.ts";
import type { PlanState } from "../state/plan.ts";
import type { Themes } from "../state/theme.ts";
import { ExportMenu } from "./ExportMenu.tsx";
import { Segments } from "./Segments.tsx";
import type { Stage } from "./stage.ts";

interface Props {
  loader: Loader;
  themes: Themes;
  stage: Stage;
  plan: PlanState;
}

export function Header({ loader, themes, stage, plan }: Props) {
  const studio = useStudio();
  const title = studio.title.value;
  return (
    <header class="header">
      <a class="brand" href="#" onClick={(event) => event.preventDefault()} aria-label="Penstock studio">
        <Mark />
        <span class="name">Penstock</span>
        <span class="studio">studio</span>
      </a>
      <Tabs />
      <p class="document" title={title}>{title}</p>
      <nav class="actions" aria-label="Document">
        <OpenButton loader={loader} />
        <Share />
        <ExportMenu stage={stage} plan={plan} />
        <button class="icon text" onClick={() => (studio.help.value = true)} aria-label="Keys" title="Keys (?)">?</button>
        <button class="icon" onClick={() => themes.toggle()} aria-label={themes.dark.value ? "Light colours" : "Dark colours"} title={themes.dark.value ? "Light colours" : "Dark colours"}>
          <ThemeIcon dark={themes.dark.value} />
        </button>
      </nav>
    </header>
  );
}

const TABS = [["timeline", "Timeline"], ["plan", "Plan"]] as const;

function Tabs() {
  const studio = useStudio();
  if (studio.offline) return null;
  return <Segments role="tablist" label="Page" choices={TABS} value={studio.tab.value} change={(tab) => (studio.tab.value = tab)} />;
}

export function OpenButton({ loader, below = false, text = "Open" }: { loader: Loader; below?: boolean; text?: string }) {
  const input = useRef<HTMLInputElement>(null);
  const opened = (): void => {
    const file = input.current!.files?.[0];
    input.current!.value = "";
    if (file) void loader.open(file, below);
  };
  return (
    <>
      <button onClick={() => input.current!.click()} title="A CSV of a schedule, a timeline, a plan or a saved view">{text}</button>
      <input ref={input} type="file" class="unseen" tabIndex={-1} aria-label={below ? "File to compare with" : "File to open"} data-testid={below ? "file-below" : "file"} accept=".csv,.json,.txt" onChange={opened} />
    </>
  );
}

/** Lays the recorded run of a file, or of one file per rank, over what is shown. */
export function RecordButton({ loader }: { loader: Loader }) {
  const studio = useStudio();
  const input = useRef<HTMLInputElement>(null);
  const view = studio.first.value;
  const chosen = (): void => {
    const files = [...(input.current!.files ?? [])];
    input.current!.value = "";
    if (files.length) void loader.lay(files);
  };
  return (
    <>
      <button disabled={!view?.timed || view.measured !== null} onClick={() => input.current!.click()} title="A timeline that was recorded in training, or the traces of a profiler, one per rank: each action below its prediction">Lay a recorded run over it</button>
      <input ref={input} type="file" class="unseen" tabIndex={-1} aria-label="Recorded run" data-testid="file-recorded" accept=".json,.gz" multiple onChange={chosen} />
    </>
  );
}

function Share() {
  const studio = useStudio();
  const share = async (): Promise<void> => {
    try {
      await navigator.clipboard.writeText(location.href);
      studio.say(studio.holdsDocument ? "The link to what you see is copied." : "The link is copied. It holds how this is shown, but not the document or all changes: export a view.");
    } catch {
      studio.say("The address of this page is the link to what you see; copy it from the address bar.");
    }
  };
  return <button onClick={() => void share()} title="Copy a link to what you see">Share</button>;
}

function Mark() {
  return (
    <svg width="22" height="22" viewBox="0 0 22 22" aria-hidden="true">
      <rect x="1" y="2" width="12" height="5" rx="1.5" fill="#0072b2" />
      <rect x="5" y="8.5" width="12" height="5" rx="1.5" fill="#e69f00" />
      <rect x="9" y="15" width="12" height="5" rx="1.5" fill="#009e73" />
    </svg>
  );
}

function ThemeIcon({ dark }: { dark: boolean }) {
  return dark ? (
    <svg width="16" height="16" viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" aria-hidden="true">
      <circle cx="8" cy="8" r="3" />
      <path d="M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1" />
    </svg>
  ) : (
    <svg width="16" height="16" viewBox="0 0 16 16" fill="currentColor" aria-hidden="true">
      <path d="M6.2 1.6a6.5 6.5 0 1 0 8.2 8.2A5.3 5.3 0 0 1 6.2 1.6z" />
    </svg>
  );
}
