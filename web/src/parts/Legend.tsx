import { chunkFill, meetingFill, rampFill, TONES } from "../draw/colours.ts";
import { memoryTop } from "../draw/memory.ts";
import { slowLinks } from "../state/linkRows.ts";
import type { Shown } from "../state/shown.ts";
import { useStudio } from "../state/studio.ts";
import type { Themes } from "../state/theme.ts";
import type { Stage } from "./stage.ts";

const KINDS = ["F", "B", "I", "W", "S", "T"] as const;

const JOINS = ["BROADCAST", "COMBINE"];

/** What the colours mean, of what is there. */
export function Legend({ themes, stage }: { themes: Themes; stage: Stage }) {
  const studio = useStudio();
  const panels = studio.panels.value;
  const kinds = new Set(panels.flatMap((shown) => [...shown.structure.kinds]));
  const chunks = Math.max(1, ...panels.map((shown) => shown.structure.chunks));
  const beside = studio.messages.value && panels.some((shown) => shown.timed);
  const paper = themes.paper.value;
  return (
    <ul class="legend" aria-label="Colours">
      {studio.colourBy.value === "microbatch" ? (
        <Ramp count={Math.max(...panels.map((shown) => shown.view.microbatches))} sliced={panels.some((shown) => shown.view.slices > 1)} />
      ) : (
        KINDS.filter((kind) => kinds.has(kind)).map((kind) => <Item key={kind} fills={shadesOf(kind, panels)} text={`${kind} ${TONES[kind].means}`} />)
      )}
      {chunks > 1 && studio.colourBy.value === "kind" && <li class="quiet">one shade per chunk</li>}
      {beside && <MessageItems stage={stage} />}
      {panels.some((shown) => shown.beside) && (
        <>
          <Item fills={[paper.same]} text="as predicted" />
          <Item fills={[paper.late]} text="longer" />
          <Item fills={[paper.early]} text="shorter" />
        </>
      )}
      {beside && panels.some((shown) => shown.timed) && (kinds.has("UNSHARD") || kinds.has("REDUCE_GRAD")) && <Item fills={[TONES.SHARD.fill]} text="collectives" />}
      {beside && JOINS.some((kind) => kinds.has(kind)) && <Item fills={JOINS.filter((kind) => kinds.has(kind)).map(meetingFill)} text={TONES.MEET.means} />}
      {beside && kinds.has("OFFLOAD") && <Item fills={[TONES.OUT.fill]} text="copies to the host" />}
      {beside && kinds.has("RELOAD") && <Item fills={[TONES.BACK.fill]} text="copies back" />}
      {beside && panels.some((shown) => shown.structure.waits.some((list) => list.length > 0)) && <Item fills={[paper.soft]} text="waits for sends and reductions" />}
      {panels.some((shown) => shown.timed) && studio.memory.value && <LimitItem />}
    </ul>
  );
}

/** The colours of a kind in the panels that have it, each once. */
export function shadesOf(kind: string, panels: Shown[]): string[] {
  const having = panels.filter(({ structure }) => structure.kinds.has(kind));
  return [...new Set(having.flatMap(({ structure: { chunks } }) => Array.from({ length: chunks }, (_, chunk) => chunkFill(kind, chunk, chunks))))];
}

/** The colours of messages, or why there are none. */
function MessageItems({ stage }: { stage: Stage }) {
  const sending = useStudio().panels.value.filter((shown) => shown.timed && shown.view.channels.length > 0);
  if (!sending.length) return null;
  if (stage.travelling.value.includes("1")) {
    return (
      <>
        <Item fills={[TONES.SEND.fill]} text="activations" />
        <Item fills={[TONES.GRADIENT.fill]} text="gradients" />
        {sending.some((shown) => slowLinks(shown).size > 0) && <li class="slow-link">slow link</li>}
      </>
    );
  }
  return <li class="quiet">{sending.some((shown) => shown.travel > 0) ? "messages are short: zoom in to see them" : "messages take no time"}</li>;
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

function Ramp({ count, sliced }: { count: number; sliced: boolean }) {
  const stops = Array.from({ length: 9 }, (_, k) => rampFill(k / 8));
  return (
    <li>
      <span class="quiet">microbatch</span> 0
      <span class="ramp" aria-hidden="true" style={{ background: `linear-gradient(90deg, ${stops.join(",")})` }} />
      {count - 1}
      {sliced && <span class="quiet">later slices lighter</span>}
    </li>
  );
}
