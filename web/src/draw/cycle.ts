import type { CycleLink, View } from "../core/types.ts";
import type { Pen } from "./pen.ts";
import type { Scene } from "./scene.ts";
import { boxOf, type Box } from "./target.ts";

/** The two ends of a wait as nodes: who waits, and what for; -1 if the row has no such step. */
export function endsOf(view: View, [rank, step, neededRank, neededStep]: CycleLink): [waits: number, needs: number] {
  const at = (r: number, s: number): number => (s < view.graph.bounds[r + 1] - view.graph.bounds[r] ? view.graph.bounds[r] + s : -1);
  return [at(rank, step), at(neededRank, neededStep)];
}

/** Arrows from each action that waits to the one it waits for, numbered in the order of the text. */
export function paintWaits(pen: Pen, scene: Scene, panel: number, waits: [number, number][], numbered: boolean): void {
  const box = (node: number): Box => boxOf(scene, { what: "action", panel, index: node });
  waits.forEach(([waiting, needed]) => {
    for (const node of [waiting, needed]) {
      const { x, top, width, height } = box(node);
      pen.frame(x, top - 1, Math.max(3, width - 1), height + 2, scene.paper.alarm, 2);
    }
  });
  waits.forEach(([waiting, needed], k) => {
    const points = way(box(waiting), box(needed));
    pen.line(points, scene.paper.paper, 5);
    pen.line(points, scene.paper.alarm, 2);
    head(pen, points, scene.paper.alarm);
    if (numbered) badge(pen, scene, points, String(k + 1));
  });
}

const PIECES = 24;
/** Pixels that an arrow on one row rises above its boxes, at least, and that the axis leaves it above the first row. */
const RISE = 20;

/** A bent line from the edge of one box to the edge of the other, so that the labels of both can be read. */
function way(from: Box, to: Box): number[] {
  const flat = Math.abs(to.top - from.top) < 1;
  const [[x0, y0], [x1, y1], bend] = flat ? alongRow(from, to) : acrossRows(from, to);
  const points: number[] = [];
  for (let k = 0; k <= PIECES; k++) {
    const share = k / PIECES;
    const [a, b, c] = [(1 - share) ** 2, 2 * share * (1 - share), share ** 2];
    points.push(a * x0 + b * bend[0] + c * x1, a * y0 + b * bend[1] + c * y1);
  }
  return points;
}

type Point = [x: number, y: number];

/** Over the boxes of a row, or below them where there is no room above. */
function alongRow(from: Box, to: Box): [Point, Point, Point] {
  const above = from.top > RISE;
  const edge = (box: Box): Point => [box.x + box.width / 2, above ? box.top - 1 : box.top + box.height + 1];
  const [one, other] = [edge(from), edge(to)];
  return [one, other, [(one[0] + other[0]) / 2, one[1] + (above ? -2 : 2) * RISE]];
}

/** Between two rows; arrows there and back stand apart. */
function acrossRows(from: Box, to: Box): [Point, Point, Point] {
  const down = to.top > from.top;
  const beside = down ? 0.35 : 0.65;
  const one: Point = [from.x + from.width * beside, down ? from.top + from.height + 1 : from.top - 1];
  const other: Point = [to.x + to.width * beside, down ? to.top - 1 : to.top + to.height + 1];
  return [one, other, [(one[0] + other[0]) / 2 + (other[1] - one[1]) * 0.18, (one[1] + other[1]) / 2 - (other[0] - one[0]) * 0.18]];
}

function head(pen: Pen, points: number[], fill: string): void {
  const end = points.length;
  const [x, y] = [points[end - 2], points[end - 1]];
  const angle = Math.atan2(y - points[end - 5], x - points[end - 6]);
  const at = (turn: number): number[] => [x - 9 * Math.cos(angle + turn), y - 9 * Math.sin(angle + turn)];
  pen.area([x, y, ...at(0.42), ...at(-0.42)], fill);
}

/** The number of an arrow, on its way: a little before the middle, so that those of an arrow there and one back stand apart. */
function badge(pen: Pen, scene: Scene, points: number[], text: string): void {
  const place = 2 * Math.floor(points.length * 0.13);
  pen.dot(points[place], points[place + 1], 8, scene.paper.alarm, scene.paper.paper);
  pen.text(points[place], points[place + 1] + 0.5, text, { fill: scene.paper.paper, size: 11, align: "center", bold: true });
}
