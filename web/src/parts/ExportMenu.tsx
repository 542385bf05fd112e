import { useEffect, useRef, useState } from "preact/hooks";
import { encodeEdits } from "../core/index.ts";
import { FORMATS, made, save, trainCommand, type Format } from "../state/exports.ts";
import { planExports } from "../state/planExports.ts";
import type { PlanState } from "../state/plan.ts";
import { useStudio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

/** Saves what is on screen: the timeline and what is behind it, or the plan and its candidates. */
export function ExportMenu({ stage, plan }: { stage: Stage; plan: PlanState }) {
  const studio = useStudio();
  const [open, setOpen] = useState(false);
  const holder = useRef<HTMLDivElement>(null);
  const planning = studio.tab.value === "plan";
  const ready = planning ? plan.candidates.value.length > 0 : studio.panels.value.length > 0;

  useEffect(() => {
    if (!open) return;
    const close = (event: Event): void => {
      if (event instanceof KeyboardEvent ? event.key === "Escape" : !holder.current!.contains(event.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", close);
    document.addEventListener("keydown", close);
    return () => {
      document.removeEventListener("pointerdown", close);
      document.removeEventListener("keydown", close);
    };
  }, [open]);

  const done = (body: () => unknown): void => {
    setOpen(false);
    Promise.resolve()
      .then(body)
      .catch((error: unknown) => studio.say((error as Error).message, "error"));
  };
  return (
    <div class="menu" ref={holder}>
      <button disabled={!ready} aria-expanded={open} aria-haspopup="true" onClick={() => setOpen(!open)}>Export</button>
      {open && (
        <div class="menu-list" role="menu" aria-label="Export">
          {planning ? (
            planExports(plan, studio).map(({ name, says, run }) => <Item key={name} name={name} says={says} run={() => done(run)} />)
          ) : (
            <TimelineItems stage={stage} done={done} />
          )}
        </div>
      )}
    </div>
  );
}

function TimelineItems({ stage, done }: { stage: Stage; done: (body: () => unknown) => void }) {
  const studio = useStudio();
  const [panel, setPanel] = useState(0);
  const panels = studio.panels.value;
  const chosen = Math.min(panel, panels.length - 1);
  const { editing } = studio;
  const run = async (format: Format): Promise<void> => {
    const pointed = { hovered: null, selected: studio.selected.value, path: studio.path.value };
    const isFirst = chosen === 0 && editing.active.value;
    const unchanged = isFirst ? editing.unchanged! : panels[chosen].view;
    save(await made(format, stage.scene(), pointed, chosen, unchanged, isFirst ? encodeEdits(editing.edits.value) : ""));
  };
  const command = async (): Promise<void> => {
    const isChanged = chosen > 0 || editing.edits.value.length > 0;
    await studio.copy(trainCommand(studio.choice.value, isChanged, panels[chosen].label), "The command is copied");
  };
  return (
    <>
      {panels.length > 1 && (
        <fieldset class="menu-choice">
          <legend class="unseen">What to export</legend>
          {panels.map((shown, k) => (
            <label key={k}>
              <input type="radio" name="exported" checked={k === chosen} onChange={() => setPanel(k)} />
              {shown.label}
            </label>
          ))}
        </fieldset>
      )}
      {FORMATS.map(({ format, name, says, timed }) => (
        <Item key={format} name={name} says={says} off={timed && !panels[chosen]?.timed} run={() => done(() => run(format))} />
      ))}
      <Item name="Command" says="train with it" run={() => done(command)} />
    </>
  );
}

function Item({ name, says, off = false, run }: { name: string; says: string; off?: boolean; run: () => void }) {
  return (
    <button role="menuitem" disabled={off} onClick={run}>
      <span>{name}</span>
      <span class="quiet">{says}</span>
    </button>
  );
}
