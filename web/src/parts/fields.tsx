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

/** A whole number with buttons beside it; it counts when it is complete, and says what is wrong with it. */
export function NumberField({ label, value, least = 1, step = 1, disabled, change }: NumberFieldProps) {
  const [text, setText] = useState(String(value));
  const [wrong, setWrong] = useState<string | null>(null);
  const show = (): void => {
    setText(String(value));
    setWrong(null);
  };
  useLayoutEffect(show, [value]); // at once: what is typed next is not to be lost
  const commit = (wanted: string): void => {
    const read = Number(wanted);
    if (wanted.trim() === "" || !Number.isInteger(read) || read < least) return setWrong(`must be a whole number of at least ${least}`);
    setWrong(null);
    if (read !== value) change(read);
  };
  return (
    <label class="field">
      <span>{label}</span>
      <span class="stepper">
        <button type="button" tabIndex={-1} aria-hidden="true" disabled={disabled || value - step < least} onClick={() => change(value - step)}>−</button>
        <input aria-label={label} aria-invalid={wrong !== null} inputMode="numeric" value={text} disabled={disabled} onInput={(event) => setText(event.currentTarget.value)} onBlur={(event) => commit(event.currentTarget.value)} onKeyDown={(event) => stepped(event, commit, value, step)} />
        <button type="button" tabIndex={-1} aria-hidden="true" disabled={disabled} onClick={() => change(value + step)}>+</button>
      </span>
      {wrong && <small class="wrong" role="alert">{label} {wrong}</small>}
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
  /** What stands in the field beside it. */
  said: string;
  step?: number;
  /** The value that a text in the field means; undefined if it means none. */
  read: (text: string) => number | undefined;
  change: (value: number) => void;
}

/** A value to slide or to type. */
export function Slider({ label, value, most, said, step, read, change }: SliderProps) {
  const [draft, setDraft] = useState<string | null>(null);
  const [wrong, setWrong] = useState(false);
  const commit = (): void => {
    if (draft === null) return;
    const typed = draft === said ? value : read(draft);
    setWrong(typed === undefined);
    if (typed === undefined) return;
    setDraft(null);
    if (typed !== value) change(typed);
  };
  const slide = (to: number): void => {
    setDraft(null);
    setWrong(false);
    change(to);
  };
  return (
    <div class="slider">
      <span>{label}</span>
      <input type="range" aria-label={label} min={0} max={Math.max(most, value)} step={step ?? most / 200} value={value} aria-valuetext={said} onInput={(event) => slide(Number(event.currentTarget.value))} />
      <input aria-label={`${label}, typed`} aria-invalid={wrong} value={draft ?? said} onInput={(event) => setDraft(event.currentTarget.value)} onBlur={commit} onKeyDown={(event) => event.key === "Enter" && commit()} />
      {wrong && <small class="wrong" role="alert">{label}: write a number of at least 0</small>}
    </div>
  );
}

/** A label and what it is of, beside each other, or one below the other where names may be long. */
export function Field({ label, wide = false, children }: { label: string; wide?: boolean; children: ComponentChildren }) {
  return (
    <label class={wide ? "field wide-field" : "field"}>
      <span>{label}</span>
      {children}
    </label>
  );
}
