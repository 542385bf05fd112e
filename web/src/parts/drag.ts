import { batch } from "@preact/signals";
import type { Edit, View } from "../core/index.ts";
import { boxOf, type Box, type Target } from "../draw/target.ts";
import { toTime } from "../draw/span.ts";
import { QUICK } from "../state/editing.ts";
import type { Studio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

const REST = 120;
/** Actions up to which figures and memory follow a drag too; with more they wait for its end. */
const SMALL = 2000;
/** Pixels that the pointer moves before a press becomes a drag. */
const SLACK = 4;

/** One action in the hand: where it was taken, and between which others of its rank it would stand. */
interface Hold {
  view: View;
  node: number;
  rank: number;
  /** Its place among the cells of its row. */
  from: number;
  /** The middles of the rank's other actions, in time, and their places with this one taken out. */
  middles: Float64Array;
  places: Int32Array;
  box: Box;
  /** From the pointer to the middle of the action, in pixels. */
  grip: number;
  start: number;
  moved: boolean;
}

/** Moves actions of the first panel along their rank while the page is in edit mode. */
export class Drag {
  private hold: Hold | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly studio: Studio,
    private readonly stage: Stage,
  ) {}

  get active(): boolean {
    return this.hold !== null;
  }

  /** Whether a press here takes an action. */
  takes(x: number, y: number): Target | null {
    const { editing } = this.studio;
    const target = editing.mode.value ? this.stage.under(x, y) : null;
    return target?.panel === 0 && this.nodeOf(target) >= 0 ? target : null;
  }

  private nodeOf(target: Target): number {
    if (target.what === "action") return target.index;
    const view = this.studio.editing.view.value;
    if (target.what !== "finding" || !view) return -1;
    const { rank, step } = view.findings[target.index];
    const node = view.graph.bounds[rank] + step;
    return node < view.graph.bounds[rank + 1] ? node : -1;
  }

  /** Takes the action at a point; false if there is none that can be moved. */
  take(x: number, y: number): boolean {
    const target = this.takes(x, y);
    const view = this.studio.editing.view.value;
    if (!target || !view?.place) return false;
    const node = this.nodeOf(target);
    const shown = this.studio.panels.value[0];
    const rank = view.graph.rank[node];
    const from = view.place[node];
    const others: number[] = [];
    for (let other = view.graph.bounds[rank]; other < view.graph.bounds[rank + 1]; other++) if (other !== node) others.push(other);
    const box = boxOf({ layout: this.stage.layout.value, scale: this.stage.scale.value, panels: this.studio.panels.value }, { what: "action", panel: 0, index: node });
    this.hold = {
      view,
      node,
      rank,
      from,
      middles: Float64Array.from(others, (other) => (shown.timing.start[other] + shown.timing.end[other]) / 2),
      places: Int32Array.from(others, (other) => view.place![other] - (view.place![other] > from ? 1 : 0)),
      box,
      grip: box.x + box.width / 2 - x,
      start: x,
      moved: false,
    };
    return true;
  }

  move(x: number): void {
    const { hold } = this;
    if (!hold || (!hold.moved && Math.abs(x - hold.start) < SLACK)) return;
    if (!hold.moved && hold.view.nodes > SMALL) this.studio.moving.value = true;
    hold.moved = true;
    const time = toTime(this.stage.scale.value, x + hold.grip);
    const edit = this.editAt(hold, time);
    const { editing } = this.studio;
    this.studio.ghost.value = { node: hold.node, view: hold.view, box: { ...hold.box, x: x + hold.grip - hold.box.width / 2 } };
    if (sameMove(edit, editing.preview.peek())) return;
    clearTimeout(this.timer);
    if (hold.view.nodes <= QUICK) editing.preview.value = edit;
    else this.timer = setTimeout(() => this.hold === hold && (editing.preview.value = edit), REST);
  }

  private editAt(hold: Hold, time: number): Edit | null {
    let [low, high] = [0, hold.middles.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (hold.middles[middle] < time) low = middle + 1;
      else high = middle;
    }
    const before = hold.node - hold.view.graph.bounds[hold.rank];
    const to = low === before ? hold.from : low === 0 ? 0 : hold.places[low - 1] + 1;
    return to === hold.from ? null : { what: "move", rank: hold.rank, from: hold.from, to };
  }

  /** Lets go: the move is made. True if there was one, so that the press was no click. */
  drop(x: number): boolean {
    const { hold } = this;
    if (!hold) return false;
    clearTimeout(this.timer);
    const edit = hold.moved ? this.editAt(hold, toTime(this.stage.scale.value, x + hold.grip)) : null;
    this.cancel();
    if (hold.moved) this.studio.selected.value = { what: "action", panel: 0, index: hold.node };
    if (edit) this.studio.change(edit);
    return hold.moved;
  }

  /** Lets go without a change. */
  cancel(): void {
    clearTimeout(this.timer);
    this.hold = null;
    batch(() => {
      this.studio.editing.preview.value = null;
      this.studio.ghost.value = null;
      this.studio.moving.value = false;
    });
  }
}

function sameMove(one: Edit | null, other: Edit | null): boolean {
  if (one?.what !== "move" || other?.what !== "move") return one === other;
  return one.rank === other.rank && one.from === other.from && one.to === other.to;
}
