import { computed, effect, signal, type ReadonlySignal } from "@preact/signals";
import { select } from "d3-selection";
import { zoom, zoomIdentity, type D3ZoomEvent, type ZoomBehavior } from "d3-zoom";
import { layOut, type Layout } from "../draw/layout.ts";
import { paintOverlay } from "../draw/overlay.ts";
import { CanvasPen } from "../draw/pen.ts";
import { paintScene, type Scene } from "../draw/scene.ts";
import type { Scale } from "../draw/span.ts";
import { targetAt } from "../draw/target.ts";
import type { Studio } from "../state/studio.ts";
import type { Themes } from "../state/theme.ts";

const MOST_ZOOM = 1e6;
const RIGHT = 12;

/** The canvases of the timeline: sizes, zoom and pointer come in, pictures go out. */
export class Stage {
  readonly width = signal(0);
  readonly room = signal(480);
  readonly scroll = signal(0);
  readonly pointer = signal<{ x: number; y: number } | null>(null);
  readonly layout: ReadonlySignal<Layout>;
  readonly scale: ReadonlySignal<Scale>;
  /** How many pictures were drawn, and what the last one took in milliseconds. */
  readonly drawn = { count: 0, took: 0 };
  private frame = 0;
  private ends: (() => void)[] = [];

  constructor(
    private readonly studio: Studio,
    private readonly themes: Themes,
  ) {
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
    const shapes = panels.value.map((shown) => ({
      channelsOf: shown.structure.channelsOf.map((channels) => (messages.value ? channels : [])),
      collectives: messages.value && shown.structure.collectives.some((list) => list.length > 0),
      memory: memory.value && shown.timed,
    }));
    return layOut(shapes, this.width.value, this.room.value);
  }

  /** How high the canvases are. */
  readonly height = computed(() => Math.min(this.layout.value.height + this.layout.value.axis, Math.max(this.room.value, 160)));

  scene(): Scene {
    const { studio } = this;
    return {
      panels: studio.panels.value,
      layout: this.layout.value,
      scale: this.scale.value,
      paper: this.themes.paper.value,
      colourBy: studio.colourBy.value,
      limit: studio.shownLimit.value,
      whole: !studio.moving.value,
      scroll: this.scroll.value,
      visible: this.height.value - this.layout.value.axis,
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
    this.ends.forEach((end) => end());
    this.ends = [];
  }

  private pointed(): { hovered: Studio["hovered"]["value"]; selected: Studio["selected"]["value"]; path: boolean } {
    const { hovered, selected, path } = this.studio;
    return { hovered: hovered.value, selected: selected.value, path: path.value };
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
      .filter((event: MouseEvent) => !event.button && !(event.type === "wheel" && isSideways(event as WheelEvent)));
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

  leave(): void {
    this.pointer.value = null;
    this.studio.hovered.value = null;
  }
}

function isSideways(event: WheelEvent): boolean {
  return event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
}
