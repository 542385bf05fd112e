interface Props<Value extends string> {
  role: "tablist" | "radiogroup";
  label: string;
  /** Values with what stands on their buttons. */
  choices: readonly (readonly [Value, string])[];
  value: Value;
  change: (value: Value) => void;
}

/** One of a few, as buttons side by side: one stop of the Tab key, arrows, Home and End go from one to the next. */
export function Segments<Value extends string>({ role, label, choices, value, change }: Props<Value>) {
  const press = (event: KeyboardEvent): void => {
    const place = goal(event.key, choices.findIndex(([each]) => each === value), choices.length);
    if (place === null) return;
    event.preventDefault();
    change(choices[place][0]);
    ((event.currentTarget as HTMLElement).children[place] as HTMLElement).focus();
  };
  return (
    <div class="segments" role={role} aria-label={label} onKeyDown={press}>
      {choices.map(([each, text]) => {
        const chosen = each === value;
        const said = role === "tablist" ? { role: "tab" as const, "aria-selected": chosen } : { role: "radio" as const, "aria-checked": chosen };
        return <button type="button" key={each} {...said} tabIndex={chosen ? 0 : -1} onClick={() => change(each)}>{text}</button>;
      })}
    </div>
  );
}

/** Where a key leads from a place among so many, around both ends; null for other keys. */
export function goal(key: string, place: number, count: number): number | null {
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
  return by === undefined ? null : (place + by + count) % count;
}
