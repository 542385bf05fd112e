// A scene without a browser.
import { LIGHT } from "../src/draw/colours.ts";
import { layOut } from "../src/draw/layout.ts";
import { chartForm } from "../src/draw/rows.ts";
import type { Scene } from "../src/draw/scene.ts";
import type { Shown } from "../src/state/shown.ts";

export function sceneOf(panels: Shown[], from: number, to: number, width = 1000): Scene {
  const shapes = panels.map((shown) => ({ channelsOf: shown.structure.channelsOf, collectives: false, memory: shown.timed, measured: shown.beside !== null }));
  const layout = layOut(shapes, width, 700);
  const scale = { from, to, left: layout.gutter, width: width - layout.gutter - 12 };
  return { panels, layout, scale, form: chartForm(panels, layout, scale), paper: LIGHT, colourBy: "kind", limit: null, whole: true, scroll: 0, visible: 500 };
}
