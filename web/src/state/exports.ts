import { toCsv, toDocument, toTableJson, toTimelineJson, toTrace, type View } from "../core/index.ts";
import type { Layout } from "../draw/layout.ts";
import { CanvasPen, SvgPen } from "../draw/pen.ts";
import { paintScene, type Scene } from "../draw/scene.ts";
import { paintOverlay, type Pointed } from "../draw/overlay.ts";
import type { Shown } from "./shown.ts";
import type { Choice } from "./url.ts";

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

export type Format = "png" | "svg" | "json" | "trace" | "csv" | "order" | "view";

export const FORMATS: { format: Format; name: string; says: string; timed: boolean }[] = [
  { format: "png", name: "PNG", says: "picture of what you see", timed: false },
  { format: "svg", name: "SVG", says: "the same, to scale and edit", timed: false },
  { format: "csv", name: "CSV", says: "the order, for PyTorch", timed: false },
  { format: "order", name: "Schedule", says: "the order, for Penstock", timed: false },
  { format: "json", name: "JSON", says: "timeline, for Penstock", timed: true },
  { format: "trace", name: "Trace", says: "for Perfetto", timed: true },
  { format: "view", name: "View", says: "to open here again", timed: false },
];

/** A panel in one of the forms that are text. */
export function textOf(shown: Shown, format: "json" | "trace" | "csv" | "order"): string {
  if (format === "csv") return toCsv(shown.view);
  if (format === "order") return JSON.stringify(toTableJson(shown.view));
  if (format === "trace") return JSON.stringify(toTrace(shown.view, shown.timing, shown.costs));
  return JSON.stringify(toTimelineJson(shown.view, shown.timing, shown.costs));
}

const LONGEST = 120;

/** A file's name from a title: letters, digits and dashes. */
export function fileName(title: string, format: Format): string {
  const stem = title.toLowerCase().slice(0, LONGEST).replace(/[^a-z0-9.]+/g, "-").replace(/^-+|-+$/g, "") || "penstock";
  return `${stem}.${SUFFIXES[format]}`;
}

const SUFFIXES: Record<Format, string> = { png: "png", svg: "svg", json: "timeline.json", trace: "trace.json", csv: "csv", order: "json", view: "view.json" };

const TYPES: Record<Format, string> = { png: "image/png", svg: "image/svg+xml", json: "application/json", trace: "application/json", csv: "text/csv", order: "application/json", view: "application/json" };

/** A file of one panel or of the picture; `unchanged` is the view before the changes that `edits` names. */
export async function made(format: Format, scene: Scene, pointed: Pointed, panel: number, unchanged: View, edits: string): Promise<Saved> {
  const picture = format === "png" || format === "svg";
  const shown = scene.panels[panel];
  const name = fileName(picture ? titleOf(scene.panels) : shown.label, format);
  if (format === "png") return { name, type: TYPES.png, content: await toPng(scene, pointed) };
  if (format === "view") return { name, type: TYPES.view, content: JSON.stringify(toDocument(unchanged, edits)) };
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


/** The command that trains with what is shown: by name, or with the file that is exported from here. */
export function trainCommand(choice: Choice | null, isChanged: boolean, title: string): string {
  const plain = choice && !isChanged && !choice.offload && choice.chunks === null && Object.keys(choice.options).length === 0;
  if (plain) return `penstock train train.py --ranks ${choice.ranks} --microbatches ${choice.microbatches} --schedule ${choice.schedule}`;
  return `penstock train train.py --schedule ${fileName(title, "order")}`;
}
