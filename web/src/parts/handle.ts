import { actionText } from "../core/index.ts";
import { footprint, waitsOf } from "../draw/overlay.ts";
import { labelsOf, pixelsOf, type Labels } from "../draw/rows.ts";
import { boxOf, type Target } from "../draw/target.ts";
import type { Studio } from "../state/studio.ts";
import type { LinkState } from "../state/url.ts";
import type { Stage } from "./stage.ts";

/** What the canvas shows, for scripts and tests: it can be read, not written. */
export interface Handle {
  readonly state: LinkState;
  readonly drawn: { count: number; took: number; first: number };
  readonly actions: number;
  /** Every action of the first panel, as it is written. */
  readonly nodes: string[];
  /** The times on screen. */
  readonly span: { from: number; to: number };
  /** The waits that the action in the hand would break if it were let go. */
  readonly broken: number;
  /** The waits that are drawn for a finding, in the order of their numbers. */
  readonly waits: { rank: number; step: number; action: string }[];
  /** The moment that is played, as a share of the axis. */
  readonly moment: number | null;
  /** What stands on the actions of each panel: whole names, microbatches or nothing. */
  readonly labels: Labels["form"][];
  /** Whether the messages of each panel have lanes. */
  readonly lanes: boolean[];
  /** Where a target and its arrows are drawn, in pixels of the page. */
  footprint(target: Target): { x: number; y: number; width: number; height: number }[];
  /** The middle of a target on screen, in pixels of the page. */
  where(target: Target): { x: number; y: number };
}

export function handle(studio: Studio, stage: Stage): void {
  const made: Handle = {
    get state() {
      return studio.link();
    },
    get drawn() {
      return { ...stage.drawn };
    },
    get actions() {
      return studio.panels.value.reduce((sum, shown) => sum + shown.view.nodes, 0);
    },
    get nodes() {
      const view = studio.panels.value[0]?.view;
      return view ? Array.from({ length: view.nodes }, (_, node) => actionText(view, node)) : [];
    },
    get span() {
      return { from: stage.scale.value.from, to: stage.scale.value.to };
    },
    get broken() {
      return stage.broken().length;
    },
    get waits() {
      const target = studio.selected.value;
      const view = target && studio.panels.value[target.panel]?.view;
      if (!view || target.what !== "finding") return [];
      return waitsOf(view, target.index).map(([node]) => {
        const rank = view.graph.rank[node];
        return { rank, step: node - view.graph.bounds[rank], action: actionText(view, node) };
      });
    },
    get labels() {
      const { panels, layout, scale, form } = stage.scene();
      return panels.map((shown, panel) => labelsOf(shown, pixelsOf(scale), layout.panels[panel].rows[0]?.compute.height ?? 0, form).form);
    },
    get lanes() {
      return stage.layout.value.panels.map(({ rows }) => rows.some((row) => row.lanes.length > 0));
    },
    footprint(target) {
      const canvas = document.querySelector("[data-testid=timeline]")!.getBoundingClientRect();
      const by = canvas.top + stage.layout.value.axis - stage.scroll.value;
      const place = { layout: stage.layout.value, scale: stage.scale.value, panels: studio.panels.value };
      return footprint(place, target).map(({ x, top, width, height }) => ({ x: canvas.left + x, y: by + top, width, height }));
    },
    get moment() {
      return studio.moment.value;
    },
    where(target) {
      const box = boxOf({ layout: stage.layout.value, scale: stage.scale.value, panels: studio.panels.value }, target);
      const canvas = document.querySelector("[data-testid=timeline]")!.getBoundingClientRect();
      const y = canvas.top + stage.layout.value.axis - stage.scroll.value + box.top + box.height / 2;
      return { x: canvas.left + box.x + box.width / 2, y };
    },
  };
  Object.defineProperty(window, "penstockPage", { value: Object.freeze(made) });
}
