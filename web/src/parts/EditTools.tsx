import type { ComponentChildren } from "preact";
import { kinds, type View } from "../core/index.ts";
import { useStudio } from "../state/studio.ts";

/** What can be done with an action of the first schedule. */
export function EditTools({ view, node }: { view: View; node: number }) {
  const studio = useStudio();
  const { entries, graph } = view;
  const order = studio.editing.order.value;
  if (!order || !view.place) return null;
  const rank = graph.rank[node];
  const at = view.place[node];
  const row = order.rows[rank];
  const first = entries.at[node];
  const alone = entries.at[node + 1] - first === 1;
  const [kind, stage, unit] = [entries.kind[first], entries.stage[first], entries.unit[first]];
  const idle = (view.slots?.[node] ?? 0) > 0;
  const move = (to: number): void => studio.change({ what: "move", rank, from: at, to });
  /** A refused move leaves the stage where it is, and the choice too. */
  const place = (select: HTMLSelectElement): void => {
    const wanted = Number(select.value);
    select.value = String(rank);
    studio.change({ what: "place", stage, rank: wanted });
  };
  return (
    <div class="edit-tools" role="group" aria-label="Change this action">
      <Tool text="◂ Earlier" keys="[" off={at === 0} run={() => move(at - 1)} />
      <Tool text="Later ▸" keys="]" off={at === row.length - 1} run={() => move(at + 1)} />
      {alone && kind === kinds.B && <Tool text="Split into I and W" keys="x" run={() => studio.change({ what: "split", stage, unit })} />}
      {alone && (kind === kinds.I || kind === kinds.W) && <Tool text="Merge I and W" keys="x" run={() => studio.change({ what: "merge", stage, unit })} />}
      <Tool text="Idle slot before" keys="i" run={() => studio.change({ what: "idle", rank, at })} />
      {idle && <Tool text="Remove idle slot" keys="Delete" run={() => studio.change({ what: "drop", rank, at: at - 1 })} />}
      {alone && view.copies.length === 1 && (
        <label class="tool-field">
          Stage {stage} to
          <select value={rank} aria-label={`Rank of stage ${stage}`} onChange={(event) => place(event.currentTarget)}>
            {Array.from({ length: view.ranks }, (_, other) => <option key={other} value={other}>rank {other}</option>)}
          </select>
        </label>
      )}
    </div>
  );
}

function Tool({ text, keys, off = false, run }: { text: ComponentChildren; keys: string; off?: boolean; run: () => void }) {
  return (
    <button disabled={off} onClick={run} title={`Key ${keys}`}>{text}</button>
  );
}
