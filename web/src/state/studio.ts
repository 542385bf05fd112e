import { batch, computed, signal } from "@preact/signals";
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { measuredTiming, type Costs, type View } from "../core/index.ts";
import type { ColourBy } from "../draw/fills.ts";
import type { Target } from "../draw/target.ts";
import { adjusted, UNCHANGED, type Adjust } from "./adjust.ts";
import type { ScheduleInfo } from "./api.ts";
import { inUnitOf } from "./lateness.ts";
import { Shown } from "./shown.ts";
import type { Choice, LinkState, Other, Packed, Spot } from "./url.ts";

/** Actions from which on figures wait until a slider rests; the timeline never does. */
const LARGE = 30_000;
const REST = 150;

export interface Notice {
  text: string;
  kind: "error" | "note";
}

/** The page's state: what is shown, how, and what is pointed at. Whatever is on screen follows from these signals. */
export class Studio {
  readonly tab = signal<"timeline" | "plan">("timeline");
  readonly first = signal<View | null>(null);
  readonly second = signal<View | null>(null);
  readonly choice = signal<Choice | null>(null);
  readonly other = signal<Other | null>(null);
  readonly file = signal<Packed | null>(null);
  /** The documents that the page came with. */
  readonly given = signal<View[]>([]);
  /** What schedules are asked with, before the sliders. */
  readonly costs = signal<Partial<Costs>>({});
  readonly schedules = signal<ScheduleInfo[]>([]);

  readonly adjust = signal<Adjust>(UNCHANGED);
  readonly limit = signal<number | null>(null);
  readonly colourBy = signal<ColourBy>("kind");
  readonly messages = signal(true);
  readonly memory = signal(true);
  readonly path = signal(false);
  /** What is on screen of the axis, as shares of it. */
  readonly span = signal<[number, number]>([0, 1]);
  readonly hovered = signal<Target | null>(null);
  readonly selected = signal<Target | null>(null);

  /** Whether a slider is being moved over a schedule so large that only its timeline is drawn meanwhile. */
  readonly moving = signal(false);
  private resting: ReturnType<typeof setTimeout> | undefined;
  private last: Shown[] = [];

  readonly busy = signal(0);
  readonly notice = signal<Notice | null>(null);

  /** Whether the page is a file of its own, without a server to ask. */
  constructor(readonly offline: boolean) {}

  readonly panels = computed<Shown[]>(() => {
    const [first, second] = [this.first.value, this.second.value];
    if (!first) return [];
    if (second) return [this.shown(first, first.stages), this.shown(second, first.stages)];
    const measured = first.measured ? measuredTiming(first) : null;
    if (!measured) return [this.shown(first, first.stages)];
    const costs = adjusted(first, this.adjust.value);
    const found = new Shown("measured", first, first.costs, measured);
    return [inUnitOf(found, Shown.of("predicted", first, costs)), found];
  });

  /** The panels that figures are shown of: those before the move while a slider moves. */
  readonly rested = computed<Shown[]>(() => {
    if (!this.moving.value) this.last = this.panels.value;
    return this.last;
  });

  /** Moves the sliders. */
  move(adjust: Adjust): void {
    const actions = (this.first.value?.nodes ?? 0) + (this.second.value?.nodes ?? 0);
    batch(() => {
      this.adjust.value = adjust;
      this.moving.value = actions > LARGE;
    });
    clearTimeout(this.resting);
    if (this.moving.value) this.resting = setTimeout(() => (this.moving.value = false), REST);
  }

  private shown(view: View, cuts: number): Shown {
    const measured = view.measured ? measuredTiming(view) : null;
    if (measured) return new Shown(`${view.title} (measured)`, view, view.costs, measured);
    return Shown.of(view.title, view, adjusted(view, this.adjust.value, cuts));
  }

  /** What the axis shows when all of it is on screen: a little more than the longest panel. */
  readonly whole = computed(() => {
    const length = Math.max(0, ...this.panels.value.map((each) => each.length));
    const timed = this.panels.value.every((each) => each.timed);
    return timed ? length * 1.015 || 1 : length + 1;
  });

  /** The limit that lines are drawn at: the one typed in, or what the document brings. */
  readonly shownLimit = computed(() => this.limit.value ?? this.first.value?.memoryLimit ?? null);

  /** Whether a link leads to what is shown, and not only to how. */
  get holdsDocument(): boolean {
    const second = this.second.value === null || this.other.value !== null;
    return this.offline || ((this.choice.value !== null || this.file.value !== null) && second);
  }

  show(first: View, second: View | null): void {
    batch(() => {
      this.first.value = first;
      this.second.value = second;
      this.hovered.value = null;
      this.selected.value = null;
    });
  }

  say(text: string, kind: Notice["kind"] = "note"): void {
    this.notice.value = { text, kind };
  }

  setSpan(from: number, to: number): void {
    const width = Math.min(1, Math.max(to - from, 1e-7));
    const low = Math.min(Math.max(from, 0), 1 - width);
    this.span.value = [low, low + width];
  }

  /** The state as a link holds it. */
  link(): LinkState {
    const [from, to] = this.span.value;
    return {
      tab: this.tab.value,
      first: this.choice.value,
      second: this.other.value,
      file: this.file.value,
      given: this.givenPair(),
      costs: this.costs.value,
      limit: this.limit.value,
      adjust: this.adjust.value,
      colourBy: this.colourBy.value,
      messages: this.messages.value,
      memory: this.memory.value,
      path: this.path.value,
      span: from <= 0 && to >= 1 ? null : [from, to],
      selected: this.spotOf(this.selected.value),
    };
  }

  /** Takes over how a link wants things shown; what it wants shown is loaded elsewhere. */
  dress(link: LinkState): void {
    batch(() => {
      this.tab.value = link.tab;
      this.costs.value = link.costs;
      this.limit.value = link.limit;
      this.adjust.value = link.adjust;
      this.colourBy.value = link.colourBy;
      this.messages.value = link.messages;
      this.memory.value = link.memory;
      this.path.value = link.path;
      this.setSpan(...(link.span ?? [0, 1]));
    });
  }

  /** Which of the page's own documents are shown, where that is not the first two. */
  private givenPair(): [number, number] | null {
    const [first, second] = [this.first.value, this.second.value].map((view) => (view ? this.given.value.indexOf(view) : -1));
    if (first < 0 || (second < 0 && this.second.value)) return null;
    return first === 0 && second === (this.given.value.length > 1 ? 1 : -1) ? null : [first, second];
  }

  private spotOf(target: Target | null): Spot | null {
    const view = target?.what === "action" ? this.panels.value[target.panel]?.view : undefined;
    if (!view || target?.what !== "action") return null;
    const rank = view.graph.rank[target.index];
    return { panel: target.panel, rank, step: target.index - view.graph.bounds[rank] };
  }

  selectSpot(spot: Spot | null): void {
    const view = spot && this.panels.value[spot.panel]?.view;
    if (!spot || !view || spot.rank >= view.ranks) return;
    const index = view.graph.bounds[spot.rank] + spot.step;
    if (index < view.graph.bounds[spot.rank + 1]) this.selected.value = { what: "action", panel: spot.panel, index };
  }
}

const Context = createContext<Studio | null>(null);
export const StudioProvider = Context.Provider;

export function useStudio(): Studio {
  const found = useContext(Context);
  if (!found) throw new Error("there is no studio around this part");
  return found;
}
