import type { PathStep } from "../core/types.ts";
import { makerOf, relatedOf } from "../state/related.ts";
import type { Shown } from "../state/shown.ts";
import type { Pen } from "./pen.ts";
import { paintAction, channelFill } from "./rows.ts";
import { fills, shifted, type Scene } from "./scene.ts";
import { boxOf, type Target } from "./target.ts";

const VEIL = 0.62;

export interface Pointed {
  hovered: Target | null;
  selected: Target | null;
  /** Whether the critical path of each panel is shown. */
  path: boolean;
}

/** What is pointed at, over the picture: the rest is veiled where something is selected or the path is asked for. */
export function paintOverlay(pen: Pen, scene: Scene, pointed: Pointed): void {
  const { layout, scale } = scene;
  pen.clip(scale.left, layout.axis, scale.width, scene.visible, () =>
    shifted(pen, scene, (moved) => {
      if (pointed.path) paintPaths(moved, scene);
      if (pointed.selected) paintSelected(moved, scene, pointed.selected, !pointed.path);
      if (pointed.hovered) paintHovered(moved, scene, pointed.hovered, pointed.selected === null && !pointed.path);
    }),
  );
}

function veil(pen: Pen, scene: Scene, panels: Iterable<number>): void {
  for (const panel of panels) {
    const rows = scene.layout.panels[panel].rows;
    for (const row of rows) {
      const height = row.memory ? row.memory.top - row.top : row.height;
      pen.rect(scene.scale.left, row.top, scene.scale.width, height, scene.paper.paper, VEIL);
    }
  }
}

function paintPaths(pen: Pen, scene: Scene): void {
  veil(pen, scene, scene.panels.keys());
  scene.panels.forEach((shown, panel) => {
    const points: number[] = [];
    for (const step of shown.timed ? shown.path : []) {
      const target = stepTarget(step, panel);
      if (step.end < scene.scale.from || step.start > scene.scale.to) continue;
      redraw(pen, scene, target);
      const box = boxOf(scene, target);
      const y = box.top + box.height + (step.what === "message" ? -box.height / 2 : -2);
      points.push(box.x, y, box.x + box.width, y);
    }
    if (points.length) pen.line(points, scene.paper.ink, 1.5);
  });
}

/** What a step of the critical path is on screen. */
export function stepTarget(step: PathStep, panel: number): Target {
  return step.what === "optimizer" ? { what: "optimizer", panel, rank: step.rank } : { what: step.what, panel, index: step.index };
}

function paintSelected(pen: Pen, scene: Scene, target: Target, veiled: boolean): void {
  if (veiled) veil(pen, scene, [target.panel]);
  paintRelations(pen, scene, target);
  redraw(pen, scene, target);
  framed(pen, scene, target, 2);
}

function paintHovered(pen: Pen, scene: Scene, target: Target, related: boolean): void {
  if (target.what === "memory") {
    const box = boxOf(scene, target);
    pen.line([box.x, box.top, box.x, box.top + box.height], scene.paper.ink, 1);
    return;
  }
  if (related) paintRelations(pen, scene, target);
  framed(pen, scene, target, 1.5);
}

function framed(pen: Pen, scene: Scene, target: Target, thickness: number): void {
  const box = boxOf(scene, target);
  const width = Math.max(3, box.width);
  pen.frame(box.x - 0.5, box.top - 1, width, box.height + 2, scene.paper.ink, thickness, target.what === "gap");
}

/** What it needs in one colour, what it unblocks in the other, with arrows along the way. */
function paintRelations(pen: Pen, scene: Scene, target: Target): void {
  const { paper } = scene;
  const { panel } = target;
  if (target.what === "message") {
    const { view } = scene.panels[panel];
    const ends = [makerOf(view, target.index), view.graph.user[target.index]];
    for (const node of ends) redraw(pen, scene, { what: "action", panel, index: node });
    arrow(pen, scene, panel, ends[0], ends[1], paper.accent);
    return;
  }
  if (target.what !== "action") return;
  const { view } = scene.panels[panel];
  const { needs, unblocks } = relatedOf(view, target.index);
  for (const link of [...needs, ...unblocks]) {
    redraw(pen, scene, { what: "action", panel, index: link.node });
    if (link.message >= 0) redraw(pen, scene, { what: "message", panel, index: link.message });
  }
  for (const link of needs) related(pen, scene, panel, link.node, target.index, link.message, paper.needs, link.node);
  for (const link of unblocks) related(pen, scene, panel, target.index, link.node, link.message, paper.accent, link.node);
}

function related(
  pen: Pen,
  scene: Scene,
  panel: number,
  from: number,
  to: number,
  message: number,
  colour: string,
  other: number,
): void {
  const box = boxOf(scene, { what: "action", panel, index: other });
  pen.frame(box.x, box.top, Math.max(2, box.width - 1), box.height, colour, 2);
  if (message >= 0) arrow(pen, scene, panel, from, to, colour);
}

/** From the end of one action to the start of another. */
function arrow(pen: Pen, scene: Scene, panel: number, from: number, to: number, colour: string): void {
  const one = boxOf(scene, { what: "action", panel, index: from });
  const other = boxOf(scene, { what: "action", panel, index: to });
  const end: [number, number] = [other.x, other.top + other.height / 2];
  pen.curve([one.x + one.width, one.top + one.height / 2], [end[0] - 5, end[1]], scene.paper.paper, 4);
  pen.curve([one.x + one.width, one.top + one.height / 2], [end[0] - 5, end[1]], colour, 1.8);
  pen.tip(end[0] + 1, end[1], colour);
}

/** Draws a target again over the veil. */
function redraw(pen: Pen, scene: Scene, target: Target): void {
  const shown: Shown = scene.panels[target.panel];
  const box = boxOf(scene, target);
  if (target.what === "action") paintAction(pen, shown, target.index, box, box.x, box.width, fills(shown, scene.colourBy));
  if (target.what === "message") {
    pen.rect(box.x, box.top, box.width, box.height, channelFill(shown, shown.view.messages.channel[target.index]));
  }
}
