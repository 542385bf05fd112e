import { describe } from "../state/words.ts";
import { useStudio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

const WIDTH = 250;

/** What is under the pointer, in a few words beside it. */
export function Tooltip({ stage }: { stage: Stage }) {
  const studio = useStudio();
  const [pointer, hovered] = [stage.pointer.value, studio.hovered.value];
  const shown = hovered && studio.panels.value[hovered.panel];
  if (!pointer || !hovered || !shown) return null;
  const said = describe(shown, hovered);
  const left = Math.max(4, Math.min(pointer.x + 14, stage.width.value - WIDTH - 4));
  const below = pointer.y < stage.height.value * 0.6;
  const place = below ? { top: `${pointer.y + 18}px` } : { bottom: `calc(100% - ${pointer.y - 12}px)` };
  return (
    <div class="tooltip" style={{ left: `${left}px`, maxWidth: `${WIDTH}px`, ...place }} data-testid="tooltip">
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
