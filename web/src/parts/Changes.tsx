import { useEffect, useRef } from "preact/hooks";
import { useStudio } from "../state/studio.ts";

/** The changes to the first schedule: what was done, whether it is proved, and the way back. */
export function Changes() {
  const studio = useStudio();
  const { editing } = studio;
  const { list, edits, undone } = editing;
  const done = edits.value.length;
  const changes = useRef<HTMLOListElement>(null);
  useEffect(() => {
    const last = changes.current?.querySelector<HTMLElement>("[aria-current]");
    if (last) changes.current!.scrollTop = last.offsetTop - changes.current!.offsetTop - changes.current!.clientHeight / 2;
  }, [done]);
  if (!editing.active.value) return null;
  return (
    <section class="card changes" aria-labelledby="changes-title" data-testid="changes">
      <div class="card-head">
        <h2 id="changes-title">Changes</h2>
        <div class="row">
          <button disabled={!done} onClick={() => studio.step(true)} title="Undo (Ctrl+Z)">Undo</button>
          <button disabled={!undone.value.length} onClick={() => studio.step(false)} title="Redo (Ctrl+Shift+Z)">Redo</button>
        </div>
      </div>
      {list.value.length === 0 && <Hint />}
      {list.value.length > 0 && <Proof />}
      {list.value.length > 0 && (
        <ol class="change-list" ref={changes}>
          {list.value.map((text, k) => (
            <li key={k} class={k < done ? "" : "undone"}>
              <button class="plain" aria-current={k === done - 1 ? "step" : undefined} title={k < done ? "Go back to this change" : "Go forward to this change"} onClick={() => studio.keepSelected(() => editing.goTo(k + 1))}>
                {text}
              </button>
            </li>
          ))}
        </ol>
      )}
      {list.value.length > 0 && (
        <div class="row">
          <label class="check">
            <input type="checkbox" checked={editing.original.value} disabled={studio.second.value !== null} onChange={(event) => (editing.original.value = event.currentTarget.checked)} />
            original below
          </label>
          <button class="plain" disabled={!done} onClick={() => studio.keepSelected(() => editing.goTo(0))}>Undo all</button>
        </div>
      )}
      <Everywhere />
    </section>
  );
}

function Hint() {
  const studio = useStudio();
  return (
    <p class="quiet">
      Drag an action along its rank, or select it and use <kbd>[</kbd> and <kbd>]</kbd>. Every change is checked and timed at once.
      {studio.first.value?.lowered && " The computations are changed; communication is placed again when the schedule is lowered."}
    </p>
  );
}

/** Changes of the whole schedule at once. */
function Everywhere() {
  const studio = useStudio();
  const view = studio.editing.view.value;
  if (!view) return null;
  const [full, parts] = [view.entries.kind.includes(1), view.entries.kind.includes(2)];
  return (
    <div class="row">
      {full && <button onClick={() => studio.change({ what: "split", stage: null, unit: null })}>Split every B</button>}
      {parts && <button onClick={() => studio.change({ what: "merge", stage: null, unit: null })}>Merge every I and W</button>}
    </div>
  );
}

/** Whether the changed order is proved: by the verifier with a server, else by the page's own check. */
export function Proof() {
  const studio = useStudio();
  const { editing } = studio;
  const verdict = editing.verdict.value?.order === editing.order.value ? editing.verdict.value : null;
  const findings = editing.findings.value;
  const first = findings[0];
  if (first) {
    return (
      <p class="verdict bad" role="status" data-testid="verdict">
        {first.severity === "hang" ? "Hangs" : "Not proved"}: {findings.length === 1 ? "one finding" : `${findings.length} findings`}
      </p>
    );
  }
  if (studio.offline) {
    return (
      <p class="verdict good" role="status" data-testid="verdict">
        Checked: all work is there once, in an order that cannot hang. <span class="quiet">For the proof, run <code>penstock verify</code> on the exported file.</span>
      </p>
    );
  }
  if (!verdict) return <p class="verdict" role="status" data-testid="verdict">Checked by the page; the verifier is asked…</p>;
  return (
    <div>
      <p class="verdict good" role="status" data-testid="verdict">Proved by the verifier</p>
      <details class="proof" open={editing.proofOpen.value} onToggle={(event) => (editing.proofOpen.value = event.currentTarget.open)}>
        <summary>The proof</summary>
        <pre>{verdict.proof}</pre>
        <pre>{verdict.program}</pre>
      </details>
    </div>
  );
}
