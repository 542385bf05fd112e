// Answers on stdout, line by line, what the page makes of the documents that come on stdin.
import { createInterface } from "node:readline";
import * as core from "../../src/core/index.ts";

interface Question {
  document: unknown;
  costs: Partial<core.Costs> | null;
}

function answer({ document, costs }: Question): unknown {
  const view = core.readDocument(document);
  const nodes = Array.from({ length: view.nodes }, (_, node) => node);
  const table = { csv: core.toCsv(view), actions: nodes.map((node) => core.actionText(view, node)), json: core.toTableJson(view) };
  if (!view.timed) return table;
  const used = costs ? core.fullCosts(costs) : view.costs;
  const timing = costs ? core.timeView(view, used) : core.measuredTiming(view);
  if (!timing) throw new Error("nothing was measured");
  return {
    ...table,
    timing: Object.fromEntries(Object.entries(timing).map(([name, column]) => [name, typeof column === "string" ? column : Array.from(column)])),
    memory: core.memoryOf(view, timing, used).ranks.map(plain),
    gaps: Array.from({ length: view.ranks }, (_, rank) => core.gapsOf(view, timing, rank).map((gap) => ({ ...gap, text: core.gapText(gap) }))),
    path: core.criticalPath(view, timing),
    numbers: core.numbersOf(view, timing, used),
    needs: nodes.map((node) => core.needsOf(view, node)),
    unblocks: nodes.map((node) => core.unblocksOf(view, node)),
    timeline: core.toTimelineJson(view, timing, used),
    trace: core.toTrace(view, timing, used),
  };
}

function plain(curve: core.Curve): unknown {
  const held = Object.fromEntries(Object.entries(curve.held).map(([name, column]) => [name, Array.from(column)]));
  return { ...curve, times: Array.from(curve.times), total: Array.from(curve.total), held };
}

for await (const line of createInterface({ input: process.stdin })) {
  let said: unknown;
  try {
    said = answer(JSON.parse(line) as Question);
  } catch (error) {
    said = { error: String(error) };
  }
  process.stdout.write(`${JSON.stringify(said)}\n`);
}
