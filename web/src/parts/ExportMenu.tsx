import { useEffect, useRef, useState } from "preact/hooks";
import { FORMATS, made, save, type Format } from "../state/exports.ts";
import { useStudio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

/** Saves what is on screen, or the timeline behind it. */
export function ExportMenu({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const [open, setOpen] = useState(false);
  const [panel, setPanel] = useState(0);
  const holder = useRef<HTMLDivElement>(null);
  const panels = studio.panels.value;

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

  const run = async (format: Format): Promise<void> => {
    setOpen(false);
    try {
      const pointed = { hovered: null, selected: studio.selected.value, path: studio.path.value };
      save(await made(format, stage.scene(), pointed, Math.min(panel, panels.length - 1)));
    } catch (error) {
      studio.say((error as Error).message, "error");
    }
  };
  return (
    <div class="menu" ref={holder}>
      <button disabled={!panels.length} aria-expanded={open} aria-haspopup="true" onClick={() => setOpen(!open)}>Export</button>
      {open && (
        <div class="menu-list" role="menu" aria-label="Export">
          {panels.length > 1 && (
            <label class="menu-choice">
              of
              <select value={panel} onChange={(event) => setPanel(Number(event.currentTarget.value))}>
                {panels.map((shown, k) => <option key={k} value={k}>{shown.label}</option>)}
              </select>
            </label>
          )}
          {FORMATS.map(({ format, name, says, timed }) => (
            <button key={format} role="menuitem" disabled={timed && !panels[Math.min(panel, panels.length - 1)]?.timed} onClick={() => void run(format)}>
              <span>{name}</span>
              <span class="quiet">{says}</span>
            </button>
          ))}
        </div>
      )}
    </div>
  );
}
