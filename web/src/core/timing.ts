import { durationsOf } from "./durations.ts";
import { optimizerOf } from "./figures.ts";
import { runIndependent } from "./independent.ts";
import { lanesOf } from "./lanes.ts";
import { linksOf, runShared } from "./shared.ts";
import type { Costs, Timing, View } from "./types.ts";

export class TimingError extends Error {}

/** Time the view under these costs, to the last bit as the library does. */
export function timeView(view: View, costs: Costs): Timing {
  if (!view.timed) throw new TimingError("this order cannot run: see its findings");
  const takes = durationsOf(view, costs);
  const lanes = lanesOf(view, costs);
  const shared = costs.contention !== "independent" || lanes.shared;
  const timing = emptyTiming(view, costs, shared);
  const reached = shared
    ? runShared(view.graph, takes, timing, linksOf(view, costs), lanes)
    : runIndependent(view.graph, takes, timing, view.messages.channel, view.channels.length, lanes);
  const stopped = reached.findIndex((node, rank) => node !== view.graph.bounds[rank + 1]);
  if (stopped >= 0) throw new TimingError(`rank ${stopped} never gets to its end`);
  return timing;
}

/** The recorded times, if there are any. */
export function measuredTiming(view: View): Timing | null {
  return view.measured;
}

function emptyTiming(view: View, costs: Costs, shared: boolean): Timing {
  const [nodes, messages] = [view.nodes, view.messages.before.length];
  const never = (length: number) => new Float64Array(length).fill(-1);
  return {
    start: never(nodes),
    end: never(nodes),
    depart: never(messages),
    arrive: never(messages),
    collectiveStart: never(nodes),
    collectiveEnd: never(nodes),
    heldBy: shared ? new Int32Array(messages).fill(-1) : new Int32Array(0),
    source: "simulated",
    optimizer: optimizerOf(view, costs),
  };
}
