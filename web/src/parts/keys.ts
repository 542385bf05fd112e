import { kinds } from "../core/index.ts";
import { boxOf, type Target } from "../draw/target.ts";
import { firstEndingAfter } from "../draw/visible.ts";
import type { Shown } from "../state/shown.ts";
import type { Studio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

/** Keys on the timeline; whether the key meant something. */
export function pressed(event: KeyboardEvent, studio: Studio, stage: Stage, scroller: HTMLElement): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const arrows: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const arrow = arrows[event.key];
  if (arrow && event.shiftKey) {
    stage.pan(arrow[0] * 0.2);
    scroller.scrollTop += arrow[1] * 60;
  } else if (arrow) move(studio, stage, scroller, ...arrow);
  else return view(event.key, studio, stage, scroller) || edit(event.key, studio, stage, scroller);
  return true;
}

/** Keys that change what is on screen. */
function view(key: string, studio: Studio, stage: Stage, scroller: HTMLElement): boolean {
  const actions: Record<string, () => void> = {
    "+": () => stage.zoomBy(1.5),
    "=": () => stage.zoomBy(1.5),
    w: () => stage.zoomBy(1.5, stage.share()),
    "-": () => stage.zoomBy(1 / 1.5),
    _: () => stage.zoomBy(1 / 1.5),
    s: () => stage.zoomBy(1 / 1.5, stage.share()),
    a: () => stage.pan(-0.2),
    d: () => stage.pan(0.2),
    "0": () => studio.setSpan(0, 1),
    f: () => frame(studio, stage, scroller),
    Home: () => stage.pan(-Infinity),
    End: () => stage.pan(Infinity),
    c: () => (studio.path.value = !studio.path.value),
    e: () => toggleEditing(studio),
    " ": () => studio.play(),
    Escape: () => (stage.drag.active ? stage.drag.cancel() : (studio.selected.value = null)),
  };
  const action = actions[key.length === 1 ? key.toLowerCase() : key];
  action?.();
  return action !== undefined;
}

/** Starts or ends editing, or says why nothing can be changed. */
export function toggleEditing(studio: Studio): void {
  const { editing } = studio;
  if (!editing.mode.value && editing.refusal) return studio.say(`This schedule cannot be changed: ${editing.refusal}.`, "error");
  studio.keepSelected(() => (editing.mode.value = !editing.mode.value));
}

/** Keys that change the selected action of the first schedule. */
function edit(key: string, studio: Studio, stage: Stage, scroller: HTMLElement): boolean {
  const target = studio.selected.value;
  const { editing } = studio;
  const now = editing.view.value;
  if (!editing.mode.value || target?.what !== "action" || target.panel !== 0 || !now?.place) return false;
  const { entries, graph, place, slots } = now;
  const [node, first] = [target.index, entries.at[target.index]];
  const [rank, at, kind, stage_, unit] = [graph.rank[node], place[node], entries.kind[first], entries.stage[first], entries.unit[first]];
  const last = editing.order.value!.rows[rank].length - 1;
  if (key === "[" && at > 0) studio.change({ what: "move", rank, from: at, to: at - 1 });
  else if (key === "]" && at < last) studio.change({ what: "move", rank, from: at, to: at + 1 });
  else if (key === "x" && kind !== kinds.F) studio.change({ what: kind === kinds.B ? "split" : "merge", stage: stage_, unit });
  else if (key === "i") studio.change({ what: "idle", rank, at });
  else if ((key === "Delete" || key === "Backspace") && slots?.[node]) studio.change({ what: "drop", rank, at: at - 1 });
  else return key === "[" || key === "]";
  if (studio.selected.value) reveal(studio, stage, scroller, studio.selected.value);
  return true;
}

/** Keys that change what is on screen while the pointer is on the chart, wherever the focus is; those that buttons and lists use are not among them. */
const AT_POINTER = /^[wasdfce0+=_-]$/i;

/** Keys that mean the same everywhere on the page, except while something is typed. */
export function pressedAnywhere(event: KeyboardEvent, studio: Studio, stage: Stage): boolean {
  const typing = event.target instanceof HTMLElement && event.target.matches("input:not([type=range], [type=checkbox], [type=radio]), textarea, select");
  const { key } = event;
  if (typing || event.defaultPrevented) return false;
  if ((event.ctrlKey || event.metaKey) && !event.altKey && key.toLowerCase() === "z") studio.step(!event.shiftKey);
  else if ((event.ctrlKey || event.metaKey) && !event.altKey && key.toLowerCase() === "y") studio.step(false);
  else if (key === "?") studio.help.value = !studio.help.value;
  else return isAtPointer(event, studio, stage) && view(key, studio, stage, document.querySelector<HTMLElement>(".scroller")!);
  return true;
}

function isAtPointer(event: KeyboardEvent, studio: Studio, stage: Stage): boolean {
  const modified = event.ctrlKey || event.metaKey || event.altKey;
  return !modified && !studio.help.value && stage.pointer.value !== null && AT_POINTER.test(event.key);
}

/** Selects the action beside the selected one, or the first. */
function move(studio: Studio, stage: Stage, scroller: HTMLElement, along: number, across: number): void {
  const panels = studio.panels.value;
  const next = nextAction(panels, studio.selected.value, along, across);
  if (!next) return;
  studio.selected.value = next;
  reveal(studio, stage, scroller, next);
}

export function nextAction(panels: Shown[], selected: Target | null, along: number, across: number): Target | null {
  if (selected?.what !== "action") {
    const panel = panels.findIndex((shown) => shown.structure.compute.length > 0);
    return panel < 0 ? null : { what: "action", panel, index: panels[panel].structure.compute[0] };
  }
  const shown = panels[selected.panel];
  const rank = shown.view.graph.rank[selected.index];
  if (across) return acrossTo(panels, selected.panel, rank + across, shown.timing.start[selected.index]);
  const { order } = shown.computeLane(rank);
  const place = order.indexOf(selected.index) + along;
  return place >= 0 && place < order.length ? { ...selected, index: order[place] } : selected;
}

/** The action that runs at a time on another rank, which may be in the panel above or below. */
function acrossTo(panels: Shown[], panel: number, rank: number, time: number): Target | null {
  const step = rank < 0 ? -1 : 1;
  const there = rank >= 0 && rank < panels[panel].view.ranks ? panel : panel + step;
  if (!panels[there]) return null;
  const wanted = there === panel ? rank : step < 0 ? panels[there].view.ranks - 1 : 0;
  const lane = panels[there].computeLane(wanted);
  if (!lane.order.length) return null;
  const place = Math.min(firstEndingAfter(lane, time), lane.order.length - 1);
  return { what: "action", panel: there, index: lane.order[place] };
}

/** Shows the selection large, with some room around it; everything if nothing is selected. */
function frame(studio: Studio, stage: Stage, scroller: HTMLElement): void {
  const target = studio.selected.value;
  if (!target) return studio.setSpan(0, 1);
  const whole = studio.whole.value;
  const [from, to] = spanOf(studio.panels.value[target.panel], target);
  const room = Math.max((to - from) * 4, whole * 1e-5);
  studio.setSpan((from - room) / whole, (to + room) / whole);
  reveal(studio, stage, scroller, target);
}

/** From when to when a target lasts; a finding with everything that waits in it. */
function spanOf(shown: Shown, target: Target): [number, number] {
  const { timing, view } = shown;
  if (target.what === "message") return [timing.depart[target.index], timing.arrive[target.index]];
  if (target.what === "collective") return [timing.collectiveStart[target.index], timing.collectiveEnd[target.index]];
  if (target.what === "wait") return [shown.waited[target.index], timing.start[target.index]];
  if (target.what === "action") return [timing.start[target.index], timing.end[target.index]];
  if (target.what === "measured") return [shown.beside!.timing.start[target.index], shown.beside!.timing.end[target.index]];
  if (target.what === "finding") {
    const { rank, step, cycle = [] } = view.findings[target.index];
    const nodes = [[rank, step], ...cycle.flatMap(([r, s, other, t]) => [[r, s], [other, t]])].map(([r, s]) => Math.min(view.graph.bounds[r] + s, view.graph.bounds[r + 1] - 1));
    return [Math.min(...nodes.map((node) => timing.start[node])), Math.max(...nodes.map((node) => timing.end[node]))];
  }
  if (target.what === "optimizer") return [shown.finished[target.rank] - timing.optimizer[target.rank], shown.finished[target.rank]];
  const gap = shown.gapAt(target.rank, target.time);
  return gap && target.what === "gap" ? [gap.start, gap.end] : [target.time, target.time];
}

/** Brings a target on screen. */
export function reveal(studio: Studio, stage: Stage, scroller: HTMLElement, target: Target): void {
  const place = { layout: stage.layout.value, scale: stage.scale.value, panels: studio.panels.value };
  const box = boxOf(place, target);
  const { left, width } = place.scale;
  if (box.x < left || box.x + Math.min(box.width, width) > left + width) stage.pan((box.x + box.width / 2 - left) / width - 0.5);
  const visible = stage.height.value - place.layout.axis;
  if (box.top < scroller.scrollTop) scroller.scrollTop = box.top - 10;
  else if (box.top + box.height > scroller.scrollTop + visible) scroller.scrollTop = box.top + box.height - visible + 10;
}
