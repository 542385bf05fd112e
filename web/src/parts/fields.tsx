import type { ComponentChildren } from "preact";
import { useLayoutEffect, useState } from "preact/hooks";

interface NumberFieldProps {
  label: string;
  value: number;
  least?: number;
  step?: number;
  disabled?: boolean;
  change: (value: number) => void;
}

/** A whole number with buttons beside it; it counts when it is complete. */
export function NumberField({ label, value, least = 1, step = 1, disabled, change }: NumberFieldProps) {
  const [text, setText] = useState(String(value));
  useLayoutEffect(() => setText(String(value)), [value]); // at once: what is typed next is not to be lost
  const commit = (wanted: string): void => {
    const read = Math.round(Number(wanted));
    if (wanted.trim() !== "" && Number.isFinite(read) && read >= least) {
      if (read !== value) change(read);
    } else setText(String(value));
  };
  return (
    <label class="field">
      <span>{label}</span>
      <span class="stepper">
        <button type="button" tabIndex={-1} aria-hidden="true" disabled={disabled || value - step < least} onClick={() => change(value - step)}>−</button>
        <input aria-label={label} inputMode="numeric" value={text} disabled={disabled} onInput={(event) => setText(event.currentTarget.value)} onBlur={(event) => commit(event.currentTarget.value)} onKeyDown={(event) => stepped(event, commit, value, step)} />
        <button type="button" tabIndex={-1} aria-hidden="true" disabled={disabled} onClick={() => change(value + step)}>+</button>
      </span>
    </label>
  );
}

function stepped(event: KeyboardEvent, commit: (text: string) => void, value: number, step: number): void {
  const by = { ArrowUp: step, ArrowDown: -step }[event.key];
  if (event.key === "Enter") commit((event.currentTarget as HTMLInputElement).value);
  else if (by) {
    event.preventDefault();
    commit(String(value + by));
  }
}

interface SliderProps {
  label: string;
  value: number;
  most: number;
  /** What stands beside it. */
  said: string;
  step?: number;
  change: (value: number) => void;
}

export function Slider({ label, value, most, said, step, change }: SliderProps) {
  return (
    <label class="slider">
      <span>{label}</span>
      <input type="range" min={0} max={most} step={step ?? most / 200} value={value} aria-valuetext={said} onInput={(event) => change(Number(event.currentTarget.value))} />
      <output>{said}</output>
    </label>
  );
}

export function Field({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <label class="field">
      <span>{label}</span>
      {children}
    </label>
  );
}
