import { boxOf, type Target } from "../draw/target.ts";
import type { Studio } from "../state/studio.ts";
import type { LinkState } from "../state/url.ts";
import type { Stage } from "./stage.ts";

/** What the canvas shows, for scripts and tests: it can be read, not written. */
export interface Handle {
  readonly state: LinkState;
  readonly drawn: { count: number; took: number };
  readonly actions: number;
  /** The times on screen. */
  readonly span: { from: number; to: number };
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
    get span() {
      return { from: stage.scale.value.from, to: stage.scale.value.to };
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
