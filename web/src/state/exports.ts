import { toCsv, toTimelineJson, toTrace } from "../core/index.ts";
import type { Layout } from "../draw/layout.ts";
import { CanvasPen, SvgPen } from "../draw/pen.ts";
import { paintScene, type Scene } from "../draw/scene.ts";
import { paintOverlay, type Pointed } from "../draw/overlay.ts";
import type { Shown } from "./shown.ts";

/** Something to save: its name, its type, and its content when asked for. */
export interface Saved {
  name: string;
  type: string;
  content: string | Blob;
}

const DENSITY = 2;
/** Canvases that are higher or wider than this are refused by browsers. */
const MOST_PIXELS = 16_000;

/** The scene as it is on screen, with all its rows. */
export function wholeScene(scene: Scene): Scene {
  return { ...scene, whole: true, scroll: 0, visible: scene.layout.height };
}

export function toSvg(scene: Scene, pointed: Pointed): string {
  const whole = wholeScene(scene);
  const pen = new SvgPen();
  paintScene(pen, whole);
  paintOverlay(pen, whole, pointed);
  return pen.file(whole.layout.width, heightOf(whole.layout), titleOf(scene.panels));
}

export async function toPng(scene: Scene, pointed: Pointed): Promise<Blob> {
  const whole = wholeScene(scene);
  const [width, height] = [whole.layout.width, heightOf(whole.layout)];
  const density = Math.min(DENSITY, MOST_PIXELS / height, MOST_PIXELS / width);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  const context = canvas.getContext("2d")!;
  context.scale(density, density);
  const pen = new CanvasPen(context);
  paintScene(pen, whole);
  paintOverlay(pen, whole, pointed);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("the picture is too large to be saved as PNG"))), "image/png"));
}

function heightOf(layout: Layout): number {
  return layout.height + layout.axis;
}

export function titleOf(panels: Shown[]): string {
  return panels.map((shown) => shown.label).join(" and ");
}

export type Format = "png" | "svg" | "json" | "trace" | "csv";

export const FORMATS: { format: Format; name: string; says: string; timed: boolean }[] = [
  { format: "png", name: "PNG", says: "picture of what you see", timed: false },
  { format: "svg", name: "SVG", says: "the same, to scale and edit", timed: false },
  { format: "json", name: "JSON", says: "timeline, for Penstock", timed: true },
  { format: "trace", name: "Trace", says: "for Perfetto", timed: true },
  { format: "csv", name: "CSV", says: "order of actions, for PyTorch", timed: false },
];

/** A panel in one of the forms that are text. */
export function textOf(shown: Shown, format: "json" | "trace" | "csv"): string {
  if (format === "csv") return toCsv(shown.view);
  if (format === "trace") return JSON.stringify(toTrace(shown.view, shown.timing, shown.costs));
  return JSON.stringify(toTimelineJson(shown.view, shown.timing, shown.costs));
}

/** A file's name from a title: letters, digits and dashes. */
export function fileName(title: string, format: Format): string {
  const stem = title.toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^-+|-+$/g, "") || "penstock";
  return `${stem}.${format === "trace" ? "trace.json" : format}`;
}

const TYPES: Record<Format, string> = { png: "image/png", svg: "image/svg+xml", json: "application/json", trace: "application/json", csv: "text/csv" };

export async function made(format: Format, scene: Scene, pointed: Pointed, panel: number): Promise<Saved> {
  const picture = format === "png" || format === "svg";
  const shown = scene.panels[panel];
  const name = fileName(picture ? titleOf(scene.panels) : shown.label, format);
  if (format === "png") return { name, type: TYPES.png, content: await toPng(scene, pointed) };
  return { name, type: TYPES[format], content: format === "svg" ? toSvg(scene, pointed) : textOf(shown, format) };
}

/** Hands a file to the reader. */
export function save(saved: Saved): void {
  const address = URL.createObjectURL(saved.content instanceof Blob ? saved.content : new Blob([saved.content], { type: saved.type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = saved.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

