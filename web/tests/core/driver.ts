// Answers on stdout, line by line, what the page makes of the documents that come on stdin.
import { createInterface } from "node:readline";
import * as core from "../../src/core/index.ts";

interface Question {
  document: unknown;
  costs: Partial<core.Costs> | null;
  /** Changes to the order, as an address holds them. */
  edits?: string;
  /** Files of a recorded run to lay over the document. */
  recorded?: core.NamedText[];
}

/** What the page makes of a changed order, and what it finds wrong with it. */
function edited(view: core.View, edits: string): unknown {
  const order = core.applyEdits(core.orderOf(view), core.decodeEdits(edits), view.table.edges);
  const made = core.checkedView(view, order);
  const repairs = core.repair(view, order);
  const columns = (group: object): unknown => Object.fromEntries(Object.entries(group).map(([name, column]) => [name, Array.from(column as ArrayLike<number>)]));
  return {
    json: core.toTableJson(made),
    findings: made.findings,
    timed: made.timed,
    entries: columns(made.entries),
    graph: columns(made.graph),
    local: columns(made.local),
    messages: columns(made.messages),
    channels: made.channels,
    repairs: repairs && core.encodeEdits(repairs),
    repaired: repairs && core.toTableJson(core.checkedView(view, core.applyEdits(order, repairs, view.table.edges))),
    applied: made.findings.map(({ fix }) => fix && core.toTableJson(core.checkedView(view, core.applyEdits(order, fix, view.table.edges)))),
  };
}

function answer({ document, costs, edits, recorded }: Question): unknown {
  const view = core.readDocument(document);
  if (recorded !== undefined) return plainTiming(core.timingOf(view, core.readRecording(recorded)));
  if (edits !== undefined) return edited(view, edits);
  const nodes = Array.from({ length: view.nodes }, (_, node) => node);
  const table = { view: core.toDocument(view, ""), csv: core.toCsv(view), actions: nodes.map((node) => core.actionText(view, node)), json: core.toTableJson(view) };
  if (!view.timed) return table;
  const used = costs ? core.fullCosts(costs) : view.costs;
  const timing = costs ? core.timeView(view, used) : core.measuredTiming(view);
  if (!timing) throw new Error("nothing was measured");
  const memory = core.memoryOf(view, timing, used);
  return {
    ...table,
    timing: plainTiming(timing),
    memory: memory.ranks.map(plain),
    host: memory.host?.map(plain) ?? null,
    gaps: Array.from({ length: view.ranks }, (_, rank) => core.gapsOf(view, timing, rank).map((gap) => ({ ...gap, text: core.gapText(gap) }))),
    path: core.criticalPath(view, timing, used),
    numbers: core.numbersOf(view, timing, used),
    needs: nodes.map((node) => core.needsOf(view, node)),
    unblocks: nodes.map((node) => core.unblocksOf(view, node)),
    timeline: core.toTimelineJson(view, timing, used),
    trace: core.toTrace(view, timing, used),
  };
}

function plainTiming(timing: core.Timing): unknown {
  return Object.fromEntries(Object.entries(timing).map(([name, column]) => [name, typeof column === "string" ? column : Array.from(column)]));
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
