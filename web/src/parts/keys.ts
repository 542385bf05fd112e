import { boxOf, type Target } from "../draw/target.ts";
import { firstEndingAfter } from "../draw/visible.ts";
import type { Shown } from "../state/shown.ts";
import type { Studio } from "../state/studio.ts";
import type { Stage } from "./stage.ts";

export const HELP =
  "Left and right arrows go from action to action, up and down from rank to rank; plus and minus zoom, 0 fits everything, " +
  "shift with an arrow moves the axis, C shows the critical path, Escape clears the selection.";

/** Keys on the timeline; whether the key meant something. */
export function pressed(event: KeyboardEvent, studio: Studio, stage: Stage, scroller: HTMLElement): boolean {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const arrows: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const arrow = arrows[event.key];
  if (arrow && event.shiftKey) {
    stage.pan(arrow[0] * 0.2);
    scroller.scrollTop += arrow[1] * 60;
  } else if (arrow) move(studio, stage, scroller, ...arrow);
  else if (event.key === "+" || event.key === "=") stage.zoomBy(1.5);
  else if (event.key === "-" || event.key === "_") stage.zoomBy(1 / 1.5);
  else if (event.key === "0" || event.key === "f") studio.setSpan(0, 1);
  else if (event.key === "Home") stage.pan(-Infinity);
  else if (event.key === "End") stage.pan(Infinity);
  else if (event.key === "c") studio.path.value = !studio.path.value;
  else if (event.key === "Escape") studio.selected.value = null;
  else return false;
  return true;
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
