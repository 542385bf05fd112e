import type { PathStep, View } from "../core/types.ts";
import { makerOf, relatedOf } from "../state/related.ts";
import type { Shown } from "../state/shown.ts";
import type { Pen } from "./pen.ts";
import { endsOf, paintWaits } from "./cycle.ts";
import { besideFill, channelFill, labelsOf, paintAction, paintMeasuredAction, pixelsOf } from "./rows.ts";
import { fills, shifted, type Scene } from "./scene.ts";
import type { Strip } from "./layout.ts";
import { toX } from "./span.ts";
import { boxOf, nodeTarget, type Box, type Place, type Target } from "./target.ts";
import { boxAt } from "./visible.ts";

const VEIL = 0.62;

/** An action in the hand, drawn at the pointer. */
export interface Ghost {
  node: number;
  view: View;
  box: Box;
}

export interface Pointed {
  hovered: Target | null;
  selected: Target | null;
  /** Whether the critical path of each panel is shown. */
  path: boolean;
  /** The time that is played. */
  moment?: number | null;
  /** The action in the hand, and the waits that letting it go here would break. */
  drag?: { ghost: Ghost; broken: [number, number][] } | null;
}

/** What is pointed at, over the picture: the rest is veiled if something is selected or the path is shown. */
export function paintOverlay(pen: Pen, scene: Scene, pointed: Pointed): void {
  const { layout, scale } = scene;
  pen.clip(scale.left, layout.axis, scale.width, scene.visible, () =>
    shifted(pen, scene, (moved) => {
      if (pointed.path) paintPaths(moved, scene);
      if (pointed.selected) paintSelected(moved, scene, pointed.selected, !pointed.path);
      if (pointed.selected?.what !== "finding" && !pointed.drag) paintHangs(moved, scene);
      if (pointed.moment != null) paintMoment(moved, scene, pointed.moment);
      if (pointed.drag) return paintDrag(moved, scene, pointed.drag);
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

/** The moment that is played: what comes later is veiled, what runs now is framed, and messages on their way are dots. */
function paintMoment(pen: Pen, scene: Scene, moment: number): void {
  const { scale, paper, panels, layout } = scene;
  const x = Math.max(toX(scale, moment), scale.left);
  pen.rect(x, 0, Math.max(0, scale.left + scale.width - x), layout.height, paper.paper, VEIL);
  panels.forEach((shown, panel) => {
    if (!shown.timed) return;
    for (const row of layout.panels[panel].rows) {
      const node = boxAt(shown.computeLane(row.rank), moment);
      if (node < 0 || shown.timing.start[node] > moment) continue;
      const box = boxOf(scene, { what: "action", panel, index: node });
      redraw(pen, scene, { what: "action", panel, index: node });
      pen.frame(box.x, box.top - 1, Math.max(2, box.width - 1), box.height + 2, paper.ink, 2);
    }
    paintTravelling(pen, scene, panel, moment);
  });
  pen.line([x, 0, x, layout.height], paper.accent, 1.5);
}

/** Messages that are on their way at a moment, between the two ranks. */
function paintTravelling(pen: Pen, scene: Scene, panel: number, moment: number): void {
  const shown = scene.panels[panel];
  const { depart, arrive } = shown.timing;
  const { source, target, channel } = shown.view.messages;
  const rows = scene.layout.panels[panel].rows;
  const x = toX(scene.scale, moment);
  shown.view.channels.forEach((_, each) => {
    const message = boxAt(shown.channelLane(each), moment);
    if (message < 0 || depart[message] > moment || arrive[message] <= depart[message]) return;
    const share = (moment - depart[message]) / (arrive[message] - depart[message]);
    const [from, to] = [rows[source[message]].compute, rows[target[message]].compute];
    const middle = (strip: Strip): number => strip.top + strip.height / 2;
    pen.dot(x, middle(from) + share * (middle(to) - middle(from)), 4, channelFill(shown, channel[message]), scene.paper.ink);
  });
}

/** The action at the pointer over the place it leaves, with what would wait forever. */
function paintDrag(pen: Pen, scene: Scene, { ghost, broken }: NonNullable<Pointed["drag"]>): void {
  const shown = scene.panels[0];
  const { box, node } = ghost;
  const colour = broken.length ? scene.paper.alarm : scene.paper.accent;
  paintWaits(pen, scene, 0, broken, false);
  pen.rect(box.x, box.top - 4, box.width, box.height + 8, scene.paper.paper, 0.5);
  if (shown.view.nodes === ghost.view.nodes) {
    const drawn = ghost.view === shown.view ? shown : shown.like(ghost.view);
    const labels = labelsOf(shown, pixelsOf(scene.scale), box.height, scene.form);
    paintAction(pen, drawn, node, { top: box.top - 4, height: box.height }, box.x, box.width, fills(drawn, scene.colourBy), labels);
  }
  pen.frame(box.x - 1, box.top - 5, box.width + 1, box.height + 2, colour, 2.5);
}

/** In an order that cannot run, the waits of its worst finding. */
function paintHangs(pen: Pen, scene: Scene): void {
  scene.panels.forEach(({ timed, view }, panel) => {
    if (!timed && view.findings[0]) paintWaits(pen, scene, panel, waitsOf(view, 0), true);
  });
}

/** The waits that a finding names, as nodes. */
export function waitsOf(view: View, finding: number): [number, number][] {
  return (view.findings[finding]?.cycle ?? []).map((link) => endsOf(view, link)).filter((ends) => ends.every((node) => node >= 0));
}

function paintSelected(pen: Pen, scene: Scene, target: Target, veiled: boolean): void {
  if (veiled && (scene.panels[target.panel].timed || target.what === "finding")) veil(pen, scene, [target.panel]);
  if (target.what === "finding") {
    const { view } = scene.panels[target.panel];
    const waits = waitsOf(view, target.index);
    for (const node of waits.flat()) redraw(pen, scene, { what: "action", panel: target.panel, index: node });
    paintWaits(pen, scene, target.panel, waits, true);
    if (waits.length) return;
  }
  paintRelations(pen, scene, target);
  redraw(pen, scene, target);
  framed(pen, scene, target, 2);
  if (target.what !== "measured") return;
  const predicted: Target = { ...target, what: "action" };
  redraw(pen, scene, predicted);
  framed(pen, scene, predicted, 1);
}

function paintHovered(pen: Pen, scene: Scene, target: Target, related: boolean): void {
  if (target.what === "memory" || target.what === "host") {
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
  if (!isNode(target)) return;
  const { view } = scene.panels[panel];
  const { needs, unblocks } = relatedOf(view, target.index);
  for (const link of [...needs, ...unblocks]) {
    redraw(pen, scene, nodeTarget(view, panel, link.node));
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
  const box = boxOf(scene, nodeTarget(scene.panels[panel].view, panel, other));
  pen.frame(box.x, box.top, Math.max(2, box.width - 1), box.height, colour, 2);
  if (message >= 0) arrow(pen, scene, panel, from, to, colour);
}

/** Where a target, what it is related to and the arrows between them are drawn: what a note about it must not cover. */
export function footprint(place: Place, target: Target): Box[] {
  const { view } = place.panels[target.panel];
  const action = (index: number): Box => boxOf(place, nodeTarget(view, target.panel, index));
  const own = boxOf(place, target);
  if (target.what === "message") return [own, ...along(action(makerOf(view, target.index)), action(view.graph.user[target.index]))];
  if (!isNode(target)) return [own];
  const { needs, unblocks } = relatedOf(view, target.index);
  return [
    own,
    ...needs.flatMap((link) => (link.message < 0 ? [action(link.node)] : along(action(link.node), own))),
    ...unblocks.flatMap((link) => (link.message < 0 ? [action(link.node)] : along(own, action(link.node)))),
  ];
}

const PIECES = 12;

/** Two boxes and small ones along the arrow between them. */
function along(from: Box, to: Box): Box[] {
  const [x0, y0, x1, y1] = [from.x + from.width, from.top + from.height / 2, to.x, to.top + to.height / 2];
  const way = Array.from({ length: PIECES + 1 }, (_, k): Box => {
    const share = k / PIECES;
    const eased = share * share * (3 - 2 * share);
    return { x: x0 + share * (x1 - x0) - 6, width: 12, top: y0 + eased * (y1 - y0) - 6, height: 12 };
  });
  return [from, to, ...way];
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
  const pixels = pixelsOf(scene.scale);
  if (target.what === "action") paintAction(pen, shown, target.index, box, box.x, box.width, fills(shown, scene.colourBy), labelsOf(shown, pixels, box.height, scene.form));
  if (target.what === "measured" && shown.beside) {
    paintMeasuredAction(pen, shown, target.index, box, box.x, box.width, scene.paper, labelsOf(shown.beside, pixels, box.height, scene.form));
  }
  if (target.what === "message") {
    pen.rect(box.x, box.top, box.width, box.height, channelFill(shown, shown.view.messages.channel[target.index]));
  }
  if (target.what === "collective" || target.what === "wait") pen.rect(box.x, box.top, box.width, box.height, besideFill(shown, target.index, scene.paper));
}

/** Whether a target is an action, or what one starts beside the computation: it has needs, and others need it. */
function isNode(target: Target): target is Extract<Target, { what: "action" | "collective" | "wait" }> {
  return target.what === "action" || target.what === "collective" || target.what === "wait";
}
