import { chunkFill, rampFill, TONES } from "../draw/colours.ts";
import { memoryTop } from "../draw/memory.ts";
import { useStudio } from "../state/studio.ts";
import type { Themes } from "../state/theme.ts";

const KINDS = ["F", "B", "I", "W"] as const;

/** What the colours mean, of what is there. */
export function Legend({ themes }: { themes: Themes }) {
  const studio = useStudio();
  const panels = studio.panels.value;
  const kinds = new Set(panels.flatMap((shown) => [...shown.structure.kinds]));
  const chunks = Math.max(1, ...panels.map((shown) => shown.structure.chunks));
  const timed = panels.some((shown) => shown.timed && shown.view.channels.length > 0);
  const messages = studio.messages.value && timed && panels.some((shown) => shown.travels);
  const paper = themes.paper.value;
  return (
    <ul class="legend" aria-label="Colours">
      {studio.colourBy.value === "microbatch" ? (
        <Ramp count={Math.max(...panels.map((shown) => shown.view.microbatches))} />
      ) : (
        KINDS.filter((kind) => kinds.has(kind)).map((kind) => (
          <Item key={kind} fills={Array.from({ length: chunks }, (_, chunk) => chunkFill(kind, chunk, chunks))} text={`${kind} ${TONES[kind].means}`} />
        ))
      )}
      {chunks > 1 && studio.colourBy.value === "kind" && <li class="quiet">one shade per chunk</li>}
      {messages && <Item fills={[TONES.SEND.fill]} text="activations" />}
      {messages && <Item fills={["#c9a26b"]} text="gradients" />}
      {studio.messages.value && timed && !messages && <li class="quiet">messages take no time</li>}
      {panels.some((shown) => shown.beside) && (
        <>
          <Item fills={[paper.same]} text="as predicted" />
          <Item fills={[paper.late]} text="longer" />
          <Item fills={[paper.early]} text="shorter" />
        </>
      )}
      {studio.messages.value && kinds.has("REDUCE_GRAD") && <Item fills={[TONES.SHARD.fill]} text="collectives" />}
      {panels.some((shown) => shown.timed) && studio.memory.value && <LimitItem />}
    </ul>
  );
}

/** The line of the limit, or that it is too far above to be drawn. */
function LimitItem() {
  const studio = useStudio();
  const limit = studio.shownLimit.value;
  if (limit === null) return null;
  const least = Array.isArray(limit) ? Math.min(...limit) : limit;
  const drawn = least <= memoryTop(studio.rested.value, limit);
  return drawn ? <li class="limit">memory limit</li> : <li class="quiet">memory limit {studio.panels.value[0].size(least)}, far above</li>;
}

function Item({ fills, text }: { fills: string[]; text: string }) {
  return (
    <li>
      <span class="swatches" aria-hidden="true">{fills.map((fill) => <i key={fill} style={{ background: fill }} />)}</span>
      {text}
    </li>
  );
}

function Ramp({ count }: { count: number }) {
  const stops = Array.from({ length: 9 }, (_, k) => rampFill(k / 8));
  return (
    <li>
      <span class="quiet">microbatch</span> 0
      <span class="ramp" aria-hidden="true" style={{ background: `linear-gradient(90deg, ${stops.join(",")})` }} />
      {count - 1}
    </li>
  );
}
