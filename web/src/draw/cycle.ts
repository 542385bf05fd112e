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

/** From the middle of one box to the middle of the other, bent so that neither lies under it: over the boxes on one row. */
function way(from: Box, to: Box): number[] {
  const [x0, y0] = [from.x + from.width / 2, from.top + from.height / 2];
  const [x1, y1] = [to.x + to.width / 2, to.top + to.height / 2];
  const flat = Math.abs(y1 - y0) < 1;
  const bend: [number, number] = flat ? [(x0 + x1) / 2, y0 - Math.max(18, from.height * 1.4)] : [(x0 + x1) / 2 + (y1 - y0) * 0.18, (y0 + y1) / 2 - (x1 - x0) * 0.18];
  const points: number[] = [];
  for (let k = 0; k <= PIECES; k++) {
    const share = k / PIECES;
    const [a, b, c] = [(1 - share) ** 2, 2 * share * (1 - share), share ** 2];
    points.push(a * x0 + b * bend[0] + c * x1, a * y0 + b * bend[1] + c * y1);
  }
  return points;
}

function head(pen: Pen, points: number[], fill: string): void {
  const end = points.length;
  const [x, y] = [points[end - 2], points[end - 1]];
  const angle = Math.atan2(y - points[end - 5], x - points[end - 6]);
  const at = (turn: number): number[] => [x - 9 * Math.cos(angle + turn), y - 9 * Math.sin(angle + turn)];
  pen.area([x, y, ...at(0.42), ...at(-0.42)], fill);
}

function badge(pen: Pen, scene: Scene, points: number[], text: string): void {
  const place = 2 * Math.floor(points.length / 4);
  pen.dot(points[place], points[place + 1], 8, scene.paper.alarm, scene.paper.paper);
  pen.text(points[place], points[place + 1] + 0.5, text, { fill: scene.paper.paper, size: 11, align: "center", bold: true });
}
