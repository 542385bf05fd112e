import { useLayoutEffect, useRef } from "preact/hooks";
import { footprint } from "../draw/overlay.ts";
import type { Box } from "../draw/target.ts";
import { describe } from "../state/words.ts";
import { useStudio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

const WIDTH = 250;
const APART = 14;
/** The page's header, which stays on top. */
const HEADER = 60;

/** What is under the pointer, in a few words beside it and beside the arrows that it explains. */
export function Tooltip({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const box = useRef<HTMLDivElement>(null);
  const [pointer, hovered] = [stage.pointer.value, studio.ghost.value ? null : studio.hovered.value];
  const shown = hovered && studio.panels.value[hovered.panel];
  useLayoutEffect(() => {
    if (!box.current || !pointer || !hovered || !shown) return;
    const place = { layout: stage.layout.value, scale: stage.scale.value, panels: studio.panels.value };
    const by = stage.layout.value.axis - stage.scroll.value;
    const taken = footprint(place, hovered).map((each) => ({ ...each, top: each.top + by }));
    const { offsetWidth: width, offsetHeight: height, offsetParent } = box.current;
    const above = offsetParent?.getBoundingClientRect().top ?? 0;
    const room = { width: stage.width.value, top: HEADER - above, bottom: window.innerHeight - above };
    const [left, top] = freePlace(pointer, { width, height }, room, taken);
    box.current.style.left = `${left}px`;
    box.current.style.top = `${top}px`;
  });
  if (!pointer || !hovered || !shown) return null;
  const said = describe(shown, hovered);
  return (
    <div class="tooltip" ref={box} style={{ maxWidth: `${WIDTH}px` }} data-testid="tooltip">
      <strong>{said.title}</strong>
      {said.what && <span class="what">{said.what}</span>}
      <dl>
        {said.facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}

interface Size {
  width: number;
  height: number;
}

/** Where a note may stand, in pixels of the chart. */
interface Room {
  width: number;
  top: number;
  bottom: number;
}

/** The place nearest to the pointer at which a note covers nothing of what is taken, or else the least of it. */
export function freePlace(pointer: { x: number; y: number }, note: Size, room: Room, taken: Box[]): [left: number, top: number] {
  const most = Math.max(4, room.width - note.width - 4);
  const lowest = Math.max(room.top, room.bottom - note.height - 4);
  const lows = [pointer.y + APART, pointer.y - APART - note.height, ...steps(room.top, lowest)].map((top) => Math.min(Math.max(top, room.top), lowest));
  const lefts = [pointer.x + APART, pointer.x - APART - note.width, ...steps(4, most)].map((left) => Math.min(Math.max(left, 4), most));
  let best: [number, number] = [lefts[0], lows[0]];
  let least = [Infinity, Infinity];
  for (const top of lows) {
    for (const left of lefts) {
      const cost = [covered(left, top, note, taken), Math.hypot(left + note.width / 2 - pointer.x, top + note.height / 2 - pointer.y)];
      if (cost[0] < least[0] || (cost[0] === least[0] && cost[1] < least[1])) [best, least] = [[left, top], cost];
    }
  }
  return best;
}

function steps(from: number, to: number): number[] {
  const count = 12;
  return Array.from({ length: count + 1 }, (_, k) => from + (k / count) * (to - from));
}

function covered(left: number, top: number, note: Size, taken: Box[]): number {
  let sum = 0;
  for (const box of taken) {
    const [across, down] = [Math.min(left + note.width, box.x + box.width) - Math.max(left, box.x), Math.min(top + note.height, box.top + box.height) - Math.max(top, box.top)];
    if (across > 0 && down > 0) sum += across * down;
  }
  return sum;
}
