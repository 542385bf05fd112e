import { computed, effect, signal, type ReadonlySignal } from "@preact/signals";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type D3ZoomEvent, type ZoomBehavior } from "d3-zoom";
import { gutterOf, layOut, type Layout } from "../draw/layout.ts";
import { endsOf } from "../draw/cycle.ts";
import { paintOverlay, type Pointed } from "../draw/overlay.ts";
import { CanvasPen } from "../draw/pen.ts";
import { paintScene, type Scene } from "../draw/scene.ts";
import { chartForm } from "../draw/rows.ts";
import type { Scale } from "../draw/span.ts";
import { targetAt } from "../draw/target.ts";
import type { Studio } from "../state/studio.ts";
import type { Themes } from "../state/theme.ts";
import type { View } from "../core/types.ts";
import { Drag } from "./drag.ts";

const MOST_ZOOM = 1e6;
/** Wheel steps below this are those of two fingers on a touchpad. */
const PINCH = 30;
const RIGHT = 12;
/** Pixels of a typical message from which on messages are drawn. */
const READABLE = 6;
/** Findings whose waits are drawn while an action is dragged. */
const MOST_BROKEN = 20;

/** The canvases of the timeline: sizes, zoom and pointer come in, pictures go out. */
export class Stage {
  readonly width = signal(0);
  readonly room = signal(480);
  readonly scroll = signal(0);
  readonly pointer = signal<{ x: number; y: number } | null>(null);
  readonly layout: ReadonlySignal<Layout>;
  readonly scale: ReadonlySignal<Scale>;
  /** How many pictures were drawn, what the last one took, and when the first was there, in milliseconds since the page was opened. */
  readonly drawn = { count: 0, took: 0, first: 0 };
  readonly drag: Drag;
  private frame = 0;
  private ends: (() => void)[] = [];

  constructor(
    private readonly studio: Studio,
    private readonly themes: Themes,
  ) {
    this.drag = new Drag(studio, this);
    this.layout = computed(() => this.laidOut());
    this.scale = computed(() => {
      const [from, to] = studio.span.value;
      const { gutter, width } = this.layout.value;
      const whole = studio.whole.value;
      return { from: from * whole, to: to * whole, left: gutter, width: Math.max(width - gutter - RIGHT, 1) };
    });
  }

  private laidOut(): Layout {
    const { messages, memory, panels } = this.studio;
    const some = (lists: Int32Array[]): boolean => messages.value && lists.some((list) => list.length > 0);
    const travelling = this.travelling.value;
    const shapes = panels.value.map((shown, panel) => {
      const { channelsOf, collectives, out, back, waits } = shown.structure;
      return {
        channelsOf: channelsOf.map((channels) => (messages.value && travelling[panel] === "1" ? channels : [])),
        collectives: some(collectives),
        copies: out.map((list, rank) => messages.value && list.length + back[rank].length > 0),
        waits: some(waits),
        memory: memory.value && shown.timed,
        host: memory.value && shown.timed,
        measured: shown.beside !== null,
        arrows: !shown.timed && shown.view.findings.length > 0,
      };
    });
    return layOut(shapes, this.width.value, this.room.value);
  }

  /** For each panel, 1 if its messages are long enough at this zoom to be drawn; shorter ones would be dust. */
  readonly travelling = computed(() => {
    const [from, to] = this.studio.span.value;
    const pixels = (this.width.value - gutterOf(this.width.value) - RIGHT) / (this.studio.whole.value * (to - from));
    return this.studio.panels.value.map((shown) => (shown.travel * pixels >= READABLE ? "1" : "0")).join("");
  });

  /** How high the canvases are. */
  readonly height = computed(() => Math.min(this.layout.value.height + this.layout.value.axis, Math.max(this.room.value, 160)));

  scene(): Scene {
    const { studio } = this;
    const [panels, layout, scale] = [studio.panels.value, this.layout.value, this.scale.value];
    return {
      panels,
      layout,
      scale,
      form: chartForm(panels, layout, scale),
      paper: this.themes.paper.value,
      colourBy: studio.colourBy.value,
      limit: studio.shownLimit.value,
      whole: !studio.moving.value,
      scroll: this.scroll.value,
      visible: this.height.value - layout.axis,
    };
  }

  /** Draws whenever something has changed, at most once a frame; what is pointed at stands on a canvas of its own. */
  attach(base: HTMLCanvasElement, overlay: HTMLCanvasElement, scroller: HTMLElement): void {
    const stale = { base: false, overlay: false };
    const ask = (part: keyof typeof stale): void => {
      stale[part] = true;
      if (!this.frame) this.frame = requestAnimationFrame(paint);
    };
    const paint = (): void => {
      this.frame = 0;
      const begun = performance.now();
      if (stale.base) this.paintOn(base, (pen, scene) => paintScene(pen, scene));
      if (stale.overlay) this.paintOn(overlay, (pen, scene) => paintOverlay(pen, scene, this.pointed()));
      stale.base = stale.overlay = false;
      this.drawn.count++;
      if (!this.drawn.first && this.studio.panels.peek().length) this.drawn.first = performance.now();
      this.drawn.took = performance.now() - begun;
    };
    this.ends.push(
      effect(() => {
        this.scene();
        ask("base");
        ask("overlay");
      }),
      effect(() => {
        this.pointed();
        ask("overlay");
      }),
    );
    this.attachZoom(overlay, scroller);
  }

  detach(): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.pointer.value = null;
    this.ends.forEach((end) => end());
    this.ends = [];
  }

  private pointed(): Pointed {
    const { hovered, selected, path, ghost, whole } = this.studio;
    const moment = this.studio.moment.value === null ? null : this.studio.moment.value * whole.value;
    if (!ghost.value) return { hovered: hovered.value, selected: selected.value, path: path.value, moment };
    return { hovered: null, selected: null, path: false, drag: { ghost: ghost.value, broken: this.broken() } };
  }

  /** What the order would wait for in vain if the action in the hand were let go, as nodes of what is drawn. */
  broken(): [number, number][] {
    const { editing, panels } = this.studio;
    const [view, drawn] = [editing.previewed.value, panels.value[0]?.view];
    if (!view || !drawn) return [];
    const here = (node: number): number => nodeOf(drawn, view, node);
    const waits = view.findings.slice(0, MOST_BROKEN).flatMap((finding) => (finding.cycle ?? []).map((link) => endsOf(view, link).map(here) as [number, number]));
    return waits.filter((ends) => ends.every((node) => node >= 0));
  }

  private paintOn(canvas: HTMLCanvasElement, body: (pen: CanvasPen, scene: Scene) => void): void {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [this.width.peek(), this.height.peek()];
    const context = canvas.getContext("2d");
    if (!context || !width || !this.studio.panels.peek().length) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    body(new CanvasPen(context), this.scene());
  }

  // Zoom ------------------------------------------------------------------------------------------------------------

  private attachZoom(overlay: HTMLCanvasElement, scroller: HTMLElement): void {
    const behaviour: ZoomBehavior<HTMLCanvasElement, unknown> = zoom<HTMLCanvasElement, unknown>()
      .scaleExtent([1, MOST_ZOOM])
      .clickDistance(4)
      .wheelDelta((event: WheelEvent) => -event.deltaY * (event.deltaMode === 1 ? 0.05 : Math.abs(event.deltaY) < PINCH ? 0.01 : 0.002))
      .filter((event: Event) => this.zooms(event));
    let own = false;
    behaviour.on("zoom", (event: D3ZoomEvent<HTMLCanvasElement, unknown>) => {
      own = true;
      this.takeTransform(event.transform.k, event.transform.x);
      own = false;
      if (event.sourceEvent instanceof MouseEvent && event.sourceEvent.type === "mousemove") {
        scroller.scrollTop -= event.sourceEvent.movementY;
      }
    });
    const selection = select(overlay);
    selection.call(behaviour).on("dblclick.zoom", null);
    this.ends.push(
      effect(() => {
        const { left, width } = this.scale.value;
        const [from, to] = this.studio.span.value;
        const edges: [[number, number], [number, number]] = [[left, 0], [left + width, 1]];
        behaviour.extent(edges).translateExtent(edges);
        const factor = 1 / (to - from);
        if (!own) selection.property("__zoom", zoomIdentity.translate(left - (left + from * width) * factor, 0).scale(factor));
      }),
    );
    overlay.addEventListener("wheel", (event) => this.wheelSideways(event), { passive: false });
    overlay.addEventListener("dblclick", () => this.studio.setSpan(0, 1));
  }

  /** The plain wheel scrolls; with Ctrl, or with two fingers, it zooms. A press moves the axis unless it takes an action. */
  private zooms(event: Event): boolean {
    if (event.type === "wheel") return ((event as WheelEvent).ctrlKey || (event as WheelEvent).metaKey) && !isSideways(event as WheelEvent);
    return !this.drag.active && !(event as MouseEvent).button;
  }

  private takeTransform(factor: number, shift: number): void {
    const { left, width } = this.scale.peek();
    const from = ((left - shift) / factor - left) / width;
    this.studio.setSpan(from, from + 1 / factor);
  }

  private wheelSideways(event: WheelEvent): void {
    if (!isSideways(event)) return;
    event.preventDefault();
    this.pan((event.deltaX || event.deltaY) / this.scale.peek().width);
  }

  /** Moves by a share of what is on screen. */
  pan(share: number): void {
    const [from, to] = this.studio.span.peek();
    const by = Math.min(Math.max(share * (to - from), -from), 1 - to);
    this.studio.setSpan(from + by, to + by);
  }

  /** Zooms around the middle, or around a share of what is on screen. */
  zoomBy(factor: number, at = 0.5): void {
    const [from, to] = this.studio.span.peek();
    const centre = from + at * (to - from);
    const width = Math.min(1, Math.max((to - from) / factor, 1 / MOST_ZOOM));
    this.studio.setSpan(centre - at * width, centre + (1 - at) * width);
  }

  // Pointer ---------------------------------------------------------------------------------------------------------

  point(x: number, y: number): void {
    this.pointer.value = { x, y };
    const found = this.under(x, y);
    if (JSON.stringify(found) !== JSON.stringify(this.studio.hovered.peek())) this.studio.hovered.value = found;
  }

  under(x: number, y: number): ReturnType<typeof targetAt> {
    const layout = this.layout.peek();
    if (y < layout.axis) return null;
    return targetAt({ layout, scale: this.scale.peek(), panels: this.studio.panels.peek() }, x, y - layout.axis + this.scroll.peek());
  }

  /** Where the pointer is, as a share of what is on screen; the middle if it is elsewhere. */
  share(): number {
    const { left, width } = this.scale.peek();
    const x = this.pointer.peek()?.x;
    return x === undefined ? 0.5 : Math.min(Math.max((x - left) / width, 0), 1);
  }

  leave(): void {
    this.pointer.value = null;
    this.studio.hovered.value = null;
  }
}

/** The node of one view that is the same action as that of another. */
function nodeOf(view: View, other: View, node: number): number {
  if (node < 0) return -1;
  const entry = other.entries.at[node];
  const [kind, stage, unit] = [other.entries.kind[entry], other.entries.stage[entry], other.entries.unit[entry]];
  const rank = other.graph.rank[node];
  for (let each = view.graph.bounds[rank]; each < view.graph.bounds[rank + 1]; each++) {
    const at = view.entries.at[each];
    if (view.entries.kind[at] === kind && view.entries.stage[at] === stage && view.entries.unit[at] === unit) return each;
  }
  return -1;
}

function isSideways(event: WheelEvent): boolean {
  return event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
}
