import { effect } from "@preact/signals";
import { plainCosts, toTableJson } from "../core/index.ts";
import * as api from "./api.ts";
import type { Studio } from "./studio.ts";

const REST = 200;

/** Has every changed order proved by the server, once the changes rest. */
export function proveChanges(studio: Studio): void {
  const { editing } = studio;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let asked: AbortController | null = null;
  effect(() => {
    const [view, order, limit] = [editing.view.value, editing.order.value, studio.shownLimit.value];
    clearTimeout(timer);
    asked?.abort();
    if (studio.offline || !view || !order || !editing.edits.value.length) return;
    timer = setTimeout(async () => {
      const own = (asked = new AbortController());
      try {
        const { proof, program, findings } = await api.verify(toTableJson(view), plainCosts(view.costs), limit, own.signal);
        if (!own.signal.aborted) editing.verdict.value = { order, proof, program, findings };
      } catch (error) {
        if (!own.signal.aborted) studio.say((error as Error).message, "error");
      }
    }, REST);
  });
}
