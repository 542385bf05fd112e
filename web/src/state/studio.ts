import { batch, computed, signal } from "@preact/signals";
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { type Costs, type Edit, EditError, encodeEdits, measuredTiming, type Recording, RecordingError, type Timing, timingOf, type View } from "../core/index.ts";
import type { ColourBy } from "../draw/fills.ts";
import type { Ghost } from "../draw/overlay.ts";
import type { Target } from "../draw/target.ts";
import { adjusted, UNCHANGED, type Adjust } from "./adjust.ts";
import type { ScheduleInfo } from "./api.ts";
import { Editing } from "./editing.ts";
import { inUnitOf } from "./lateness.ts";
import { Shown } from "./shown.ts";
import type { Choice, LinkState, Other, Packed, Spot } from "./url.ts";

/** Actions from which on figures wait until a slider rests; the timeline never does. */
const LARGE = 30_000;
const REST = 150;
/** How long a step is played, in milliseconds. */
const LASTS = 12_000;
/** Letters of changes that an address holds. */
const MOST_EDITS = 6000;

export interface Notice {
  text: string;
  kind: "error" | "note";
}

/** The page's state: what is shown, how, and what is pointed at. Whatever is on screen follows from these signals. */
export class Studio {
  readonly tab = signal<"timeline" | "plan">("timeline");
  readonly first = signal<View | null>(null);
  readonly second = signal<View | null>(null);
  /** Changes to the first schedule. */
  readonly editing = new Editing();
  readonly choice = signal<Choice | null>(null);
  readonly other = signal<Other | null>(null);
  readonly file = signal<Packed | null>(null);
  /** The documents that the page came with. */
  readonly given = signal<View[]>([]);
  /** A recorded run that was laid over the first schedule. */
  readonly recording = signal<Recording | null>(null);
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
  /** The action in the hand while it is dragged. */
  readonly ghost = signal<Ghost | null>(null);

  /** Whether a slider is being moved over a schedule so large that only its timeline is drawn meanwhile. */
  readonly moving = signal(false);
  private resting: ReturnType<typeof setTimeout> | undefined;
  private last: Shown[] = [];

  readonly help = signal(false);
  /** The moment that is played, as a share of the axis; null while nothing is. */
  readonly moment = signal<number | null>(null);
  readonly playing = signal(false);
  private running = 0;

  readonly busy = signal(0);
  readonly notice = signal<Notice | null>(null);

  /** Whether the page is a file of its own, without a server to ask. */
  constructor(readonly offline: boolean) {}

  readonly panels = computed<Shown[]>(() => {
    const made = this.makePanels();
    const all = made.flatMap((shown) => (shown.beside ? [shown, shown.beside] : [shown]));
    const longest = Math.max(0, ...all.map((shown) => shown.length));
    for (const shown of all) shown.longest = longest;
    return made;
  });

  private makePanels(): Shown[] {
    const first = this.editing.shown.value ?? this.first.value;
    const second = this.second.value ?? (this.editing.active.value && this.editing.original.value ? this.first.value : null);
    if (!first) return [];
    if (second) return [this.shown(first, first.stages), this.shown(second, first.stages)];
    const measured = this.measuredOf(first);
    if (!measured) return [this.shown(first, first.stages)];
    const run = new Shown("measured", first, first.costs, measured);
    const predicted = inUnitOf(run, Shown.of("predicted", first, adjusted(first, this.adjust.value)));
    predicted.beside = run;
    return [predicted];
  }

  /** The times of the recorded run that stands beside a view: those of its document, or of a file that was laid over it. */
  private measuredOf(view: View): Timing | null {
    if (view.measured) return measuredTiming(view);
    const recording = this.recording.value;
    if (!recording || !view.timed) return null;
    try {
      return timingOf(view, recording);
    } catch (error) {
      if (error instanceof RecordingError) return null; // an order that was changed since may have other actions
      throw error;
    }
  }

  /** Lays a recorded run over the first schedule; throws if it is one of other actions. */
  record(recording: Recording): void {
    const view = this.editing.shown.value ?? this.first.value;
    if (!view?.timed) throw new RecordingError("there is no schedule with times to lay the run over");
    timingOf(view, recording);
    batch(() => {
      this.second.value = null;
      this.other.value = null;
      this.selected.value = null;
      this.hovered.value = null;
      this.recording.value = recording;
    });
  }

  /** What figures are shown of: the panels, or the prediction and the run beside it; those before the move while a slider moves. */
  readonly rested = computed<Shown[]>(() => {
    const panels = this.panels.value;
    if (!this.moving.value) this.last = panels[0]?.beside ? [panels[0], panels[0].beside] : panels;
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
    const length = Math.max(0, ...this.panels.value.map((each) => Math.max(each.length, each.beside?.length ?? 0)));
    const timed = this.panels.value.every((each) => each.timed);
    return timed ? length * 1.015 || 1 : length + 1;
  });

  /** What is shown, in a line. */
  readonly title = computed(() => this.editing.view.value?.title ?? this.first.value?.title ?? "");

  /** The limit that lines are drawn at: the one typed in, or what the document brings. */
  readonly shownLimit = computed(() => this.limit.value ?? this.first.value?.memoryLimit ?? null);

  /** Whether a link leads to what is shown, and not only to how. */
  get holdsDocument(): boolean {
    const second = this.second.value === null || this.other.value !== null;
    if (this.editing.edits.value.length && !this.linkedEdits) return false;
    return this.offline || ((this.choice.value !== null || this.file.value !== null) && second);
  }

  show(first: View, second: View | null): void {
    batch(() => {
      if (first !== this.first.value) {
        this.editing.reset(first);
        this.recording.value = null;
      }
      this.first.value = first;
      this.second.value = second;
      this.hovered.value = null;
      this.selected.value = null;
    });
  }

  /** Changes the first schedule; the action that is selected stays selected. */
  change(...edits: Edit[]): void {
    this.keepSelected(() => this.editing.apply(...edits));
  }

  /** Takes back the last change, or makes it again. */
  step(back: boolean): void {
    this.keepSelected(() => void (back ? this.editing.undo() : this.editing.redo()));
  }

  keepSelected(body: () => void): void {
    const target = this.selected.value;
    const view = target?.what === "action" && target.panel === 0 ? (this.editing.view.value ?? this.first.value) : null;
    const entry = view && target?.what === "action" ? view.entries.at[target.index] : -1;
    this.hovered.value = null;
    try {
      batch(body);
    } catch (error) {
      if (!(error instanceof EditError)) throw error;
      return this.say(`${error.message}.`, "error");
    }
    if (!view || entry < 0) {
      this.selected.value = null;
      return;
    }
    const after = this.editing.view.value ?? this.first.value;
    const node = after ? nodeLike(after, view.entries.kind[entry], view.entries.stage[entry], view.entries.unit[entry]) : -1;
    this.selected.value = node < 0 ? null : { what: "action", panel: 0, index: node };
  }

  /** Copies a text, or shows it if the browser does not let a page do that. */
  async copy(text: string, note: string): Promise<void> {
    try {
      await navigator.clipboard.writeText(text);
      this.say(`${note}:\n${text}`);
    } catch {
      this.say(text);
    }
  }

  say(text: string, kind: Notice["kind"] = "note"): void {
    this.notice.value = { text, kind };
  }

  /** Plays the step from the start, or on from where it stands; a second call halts it. */
  play(): void {
    if (this.playing.value) {
      this.playing.value = false;
      cancelAnimationFrame(this.running);
      return;
    }
    if (!this.panels.value.some((shown) => shown.timed)) return;
    const from = this.moment.value ?? 0;
    const begun = performance.now();
    this.playing.value = true;
    const next = (now: number): void => {
      const share = from + Math.max(0, now - begun) / LASTS;
      batch(() => {
        this.moment.value = share < 1 ? share : null;
        this.playing.value = share < 1;
      });
      if (share < 1) this.running = requestAnimationFrame(next);
    };
    this.running = requestAnimationFrame(next);
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
      edits: this.linkedEdits,
    };
  }

  /** The changes as an address holds them; none if they are too many for one. */
  private get linkedEdits(): string {
    const text = encodeEdits(this.editing.edits.value);
    return text.length > MOST_EDITS ? "" : text;
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

/** The node of an action, or of the parts that it was split into or merged from; -1 for none. */
function nodeLike(view: View, kind: number, stage: number, unit: number): number {
  const { entries } = view;
  let found = -1;
  for (let entry = 0; entry < entries.kind.length; entry++) {
    if (entries.stage[entry] !== stage || entries.unit[entry] !== unit) continue;
    if (entries.kind[entry] === kind) return entries.node[entry];
    if (kind !== 0 && entries.kind[entry] !== 0 && found < 0) found = entries.node[entry];
  }
  return found;
}

const Context = createContext<Studio | null>(null);
export const StudioProvider = Context.Provider;

export function useStudio(): Studio {
  const found = useContext(Context);
  if (!found) throw new Error("there is no studio around this part");
  return found;
}
