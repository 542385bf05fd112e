import { useEffect, useRef } from "preact/hooks";
import { useStudio } from "../state/studio.ts";

const KEYS: [string, [keys: string, means: string][]][] = [
  ["Move around", [
    ["wheel", "scroll"],
    ["Ctrl + wheel, W / S, + / −", "zoom in and out"],
    ["A / D, Shift + ← / →", "move left and right"],
    ["0", "show everything"],
    ["f", "frame the selection"],
    ["Home, End", "go to the start or the end"],
  ]],
  ["Select", [
    ["← →", "the action before or after on the rank"],
    ["↑ ↓", "the action on the rank above or below"],
    ["c", "show the critical path"],
    ["Space", "play the step"],
    ["Escape", "clear the selection"],
  ]],
  ["Change", [
    ["e", "start or end editing: dragging moves actions"],
    ["[ ]", "move the selected action earlier or later"],
    ["x", "split B into I and W, or merge them"],
    ["i, Delete", "insert or remove an idle slot before the action"],
    ["Ctrl + Z, Ctrl + Shift + Z", "undo, redo"],
  ]],
  ["Page", [["?", "show these keys"]]],
];

/** Every key in words, for screen readers on the timeline. */
export const HELP = KEYS.flatMap(([, keys]) => keys.map(([key, means]) => `${key}: ${means}`)).join("; ");

/** All keys, in a window over the page. */
export function Help() {
  const studio = useStudio();
  const box = useRef<HTMLDialogElement>(null);
  const open = studio.help.value;
  useEffect(() => {
    if (open && !box.current!.open) box.current!.showModal();
    else if (!open && box.current?.open) box.current.close();
  }, [open]);
  return (
    <dialog ref={box} class="help" aria-label="Keys" data-testid="help" onClose={() => (studio.help.value = false)} onClick={(event) => event.target === box.current && (studio.help.value = false)}>
      <div class="card-head">
        <h2>Keys</h2>
        <button onClick={() => (studio.help.value = false)}>Close</button>
      </div>
      <div class="help-groups">
        {KEYS.map(([title, keys]) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {keys.map(([key, means]) => (
                <div key={key}>
                  <dt>{key.split(", ").map((each) => <kbd key={each}>{each}</kbd>)}</dt>
                  <dd>{means}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </dialog>
  );
}
