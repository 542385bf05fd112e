import { actionText, entryText } from "../core/index.ts";
import type { Link } from "../core/index.ts";
import { nodeTarget, type Target } from "../draw/target.ts";
import { makerOf, relatedOf } from "../state/related.ts";
import type { Shown } from "../state/shown.ts";
import { useStudio } from "../state/studio.ts";
import { describe } from "../state/words.ts";
import { EditTools } from "./EditTools.tsx";

const FEW = 12;

/** The card of what is selected, or what to do to select something. */
export function Details({ go }: { go: (target: Target) => void }) {
  const studio = useStudio();
  const selected = studio.selected.value;
  const shown = selected && studio.panels.value[selected.panel];
  return (
    <section class="card details" aria-labelledby="details-title" data-testid="details">
      <h2 id="details-title">Selection</h2>
      {selected && shown ? <Selected shown={shown} target={selected} go={go} /> : <Hint />}
    </section>
  );
}

function Hint() {
  return (
    <p class="quiet">
      Point at an action, a message or an idle time to see what it is; click to keep it and to see what it needs and what waits for it.
      With the keyboard: focus the timeline and use the arrows.
    </p>
  );
}

function Selected({ shown, target, go }: { shown: Shown; target: Target; go: (target: Target) => void }) {
  const studio = useStudio();
  const said = describe(shown, target);
  return (
    <>
      <div class="selected-head">
        <p class="selected-title">{said.title}</p>
        <button class="plain" onClick={() => (studio.selected.value = null)}>Clear</button>
      </div>
      <p class="what">{said.what}{studio.panels.value.length > 1 ? `, in ${shown.label}` : ""}</p>
      <dl class="facts">
        {said.facts.map(([name, value], k) => (
          <div key={k}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {target.what === "action" && target.panel === 0 && studio.editing.mode.value && <EditTools view={shown.view} node={target.index} />}
      {(target.what === "action" || target.what === "collective" || target.what === "wait") && shown.timed && <Relations shown={shown} panel={target.panel} node={target.index} go={go} />}
      {target.what === "message" && <Ends shown={shown} panel={target.panel} message={target.index} go={go} />}
    </>
  );
}

function Relations({ shown, panel, node, go }: { shown: Shown; panel: number; node: number; go: (target: Target) => void }) {
  const { needs, unblocks } = relatedOf(shown.view, node);
  return (
    <div class="relations">
      <Links title="Needs" class="needs" links={needs} shown={shown} panel={panel} go={go} />
      <Links title="Unblocks" class="unblocks" links={unblocks} shown={shown} panel={panel} go={go} />
    </div>
  );
}

interface LinksProps {
  title: string;
  class: string;
  links: Link[];
  shown: Shown;
  panel: number;
  go: (target: Target) => void;
}

function Links({ title, class: name, links, shown, panel, go }: LinksProps) {
  const { view, timing } = shown;
  return (
    <div class={name}>
      <h3>{title}</h3>
      {links.length === 0 && <p class="quiet">nothing</p>}
      <ul>
        {links.slice(0, FEW).map((link) => (
          <li key={`${link.node}/${link.message}`}>
            <button class="plain" onClick={() => go(nodeTarget(view, panel, link.node))}>{actionText(view, link.node)}</button>
            <span class="quiet">
              {link.message < 0 ? " on this rank" : ` on rank ${view.graph.rank[link.node]}, message ${shown.time(timing.depart[link.message])} to ${shown.time(timing.arrive[link.message])}`}
            </span>
          </li>
        ))}
        {links.length > FEW && <li class="quiet">and {links.length - FEW} more</li>}
      </ul>
    </div>
  );
}

function Ends({ shown, panel, message, go }: { shown: Shown; panel: number; message: number; go: (target: Target) => void }) {
  const { view } = shown;
  const [maker, user] = [makerOf(view, message), view.graph.user[message]];
  return (
    <p>
      <button class="plain" onClick={() => go({ what: "action", panel, index: maker })}>{entryText(view, view.messages.maker[message])}</button>
      {" → "}
      <button class="plain" onClick={() => go({ what: "action", panel, index: user })}>{entryText(view, view.messages.after[message])}</button>
    </p>
  );
}
