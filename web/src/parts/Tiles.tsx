import { figure, percent, signed } from "../draw/span.ts";
import { limitOf } from "../draw/memory.ts";
import type { Shown } from "../state/shown.ts";
import { useStudio } from "../state/studio.ts";
import { CAUSES } from "../state/words.ts";
import type { Cause } from "../core/index.ts";

/** In place of a figure of an order that cannot run. */
const NONE = "–";

/** The figures that people look for first. They stay where they are when an order hangs, without values. */
export function Tiles() {
  const studio = useStudio();
  const panels = studio.rested.value;
  const limit = studio.shownLimit.value;
  return (
    <section class="tiles" aria-label="Key figures">
      <Tile name="Makespan" panels={panels} value={(shown) => shown.numbers.makespan} text={time} note={(shown) => `${shown.time(busyShare(shown))} of work per rank`} relative />
      <Tile name="Bubble" panels={panels} value={(shown) => shown.numbers.bubble} text={percent} note={(shown) => `${percent(shown.numbers.spanBubble)} of the longest span`} />
      <Tile
        name="Peak memory"
        panels={panels}
        value={(shown) => shown.numbers.peak}
        text={size}
        note={(shown) => peakNote(shown, limit)}
        alarm={(shown) => isOver(shown, limit)}
        relative
      />
      <Tile name="Messages" panels={panels} value={(shown) => shown.numbers.messages} text={figure} note={(shown) => (shown.numbers.bytes ? `${shown.size(shown.numbers.bytes)} in all` : "of no size")} relative />
      <Tile name="Idle" panels={panels} value={idle} text={time} note={(shown) => mainCause(shown)} relative />
    </section>
  );
}

interface TileProps {
  name: string;
  panels: Shown[];
  value: (shown: Shown) => number;
  text: (value: number, shown: Shown) => string;
  note: (shown: Shown) => string;
  alarm?: (shown: Shown) => boolean;
  relative?: boolean;
}

function Tile({ name, panels, value, text, note, alarm, relative }: TileProps) {
  const [first, second] = panels;
  const said = (shown: Shown): string => (shown.timed ? text(value(shown), shown) : NONE);
  const isAlarm = (shown: Shown): boolean => shown.timed && Boolean(alarm?.(shown));
  return (
    <div class="tile" data-testid={`tile-${name}`}>
      <h3>{name}</h3>
      <p class={isAlarm(first) ? "value alarm" : "value"}>{said(first)}</p>
      {second ? (
        <p class="note">
          <span class={isAlarm(second) ? "alarm" : "strong"}>{said(second)}</span> {first.beside ? "measured" : "below"}
          {first.timed && second.timed && `, ${change(value(first), value(second), relative ?? false)}`}
        </p>
      ) : (
        <p class={isAlarm(first) ? "note alarm" : "note"}>{first.timed ? note(first) : "the order cannot run"}</p>
      )}
    </div>
  );
}

export const time = (value: number, shown: Shown): string => shown.time(value);
export const size = (value: number, shown: Shown): string => shown.size(value);

/** How the second differs from the first. */
export function change(first: number, second: number, relative = true): string {
  if (first === second) return "the same";
  if (!relative) return `${signed(100 * (second - first), (value) => value.toFixed(1))} points`;
  return first === 0 ? signed(second) : signed((second - first) / first, percent);
}

export function idle(shown: Shown): number {
  return Object.values(shown.numbers.idle).reduce((sum, each) => sum + each, 0);
}

function busyShare(shown: Shown): number {
  const { busy } = shown.numbers;
  return busy.reduce((sum, each) => sum + each, 0) / Math.max(1, busy.length);
}

function mainCause(shown: Shown): string {
  const found = (Object.entries(shown.numbers.idle) as [Cause, number][]).sort(([, one], [, other]) => other - one)[0];
  return found && found[1] > 0 ? `${percent(found[1] / idle(shown))} ${CAUSES[found[0]]}` : "no rank ever waits";
}

function isOver(shown: Shown, limit: number | number[] | null): boolean {
  return shown.numbers.peaks.some((peak, rank) => peak > (limitOf(limit, rank) ?? Infinity));
}

function peakNote(shown: Shown, limit: number | number[] | null): string {
  const rank = shown.numbers.peaks.indexOf(shown.numbers.peak);
  const most = limitOf(limit, rank);
  const where = `rank ${rank} at ${shown.time(shown.memory.ranks[rank]?.peakTime ?? 0)}`;
  if (most === null) return where;
  return isOver(shown, limit) ? `over the limit of ${shown.size(most)}` : `${where}, limit ${shown.size(most)}`;
}
