import { describe, expect, test } from "vitest";
import * as core from "../src/core/index.ts";
import { freePlace } from "../src/parts/Tooltip.tsx";
import { largestDifferences, lengthDifference } from "../src/state/differences.ts";
import { Studio } from "../src/state/studio.ts";
import { gpipe } from "./pipeline.ts";

const view = gpipe({ ranks: 2, microbatches: 3, costs: { latency: 0.5 } });
const timing = core.timeView(view, view.costs);
const timeline = core.toTimelineJson(view, timing, view.costs);

function read(text: string, name = "run.json"): core.Recording {
  return core.readRecording([{ name, text }]);
}

function laid(change: (json: Record<string, number[]>) => void): Studio {
  const json = structuredClone(timeline) as unknown as Record<string, number[]>;
  change(json);
  const studio = new Studio(true);
  studio.show(view, null);
  studio.record(read(JSON.stringify({ ...json, source: "measured" })));
  return studio;
}

describe("a recorded run", () => {
  test("as predicted has no difference", () => {
    const [predicted] = laid(() => undefined).panels.value;
    expect(predicted.beside!.timing.start).toEqual(timing.start);
    expect(largestDifferences(predicted)).toEqual([]);
  });

  test("names the action that takes longer, and the wait that does", () => {
    // 1B0 (node 9) takes half a unit longer, and everything after it on both ranks is that much later; 0B0 and what follows wait a whole unit more.
    const studio = laid((json) => {
      const slow = timing.end[9];
      for (const name of ["start", "end", "depart", "arrive"]) json[name] = json[name].map((time) => (time >= slow ? time + 0.5 : time));
      for (const node of [3, 4, 5]) {
        json.start[node] += 1;
        json.end[node] += 1;
      }
    });
    const [predicted] = studio.panels.value;
    const [first, second] = largestDifferences(predicted);
    expect(first).toMatchObject({ node: 3, rank: 0, action: "0B0" });
    expect(first.adds).toBeCloseTo(1, 9);
    expect(first.cause).toMatch(/^starts 1.5 after 1B0 ended on rank 1, predicted 0.5$/);
    expect(second).toMatchObject({ node: 9, rank: 1, action: "1B0", cause: "takes 2.5, predicted 2" });
    expect(lengthDifference(predicted, 9)).toBeCloseTo(0.25, 9);
    expect(lengthDifference(predicted, 8)).toBe(0);
  });

  test("is found by the names of its actions in a trace", () => {
    const trace = core.toTrace(view, timing, view.costs);
    const recording = read(JSON.stringify(trace), "run.trace.json");
    const found = core.timingOf(view, { ...recording, exact: null });
    found.start.forEach((start, node) => expect(start).toBeCloseTo(timing.start[node], 3));
    found.arrive.forEach((arrive, message) => expect(arrive).toBeGreaterThanOrEqual(found.depart[message]));
  });

  test.each([
    ["{}", "neither a timeline nor a trace"],
    ["[1]", "neither a timeline nor a trace"],
    ["{", "neither a timeline nor a trace"],
    ['{"type": "timeline"}', "no rows of actions"],
    ['{"type": "timeline", "table": {"rows": [["0F0"]]}}', "'start' must be a list of times"],
    ['{"traceEvents": [null, 3, {"ph": "X", "name": "<b>", "ts": 1, "dur": 1}]}', "no slice that is named like an action"],
  ])("that cannot be read is refused (%s)", (text, said) => expect(() => read(text)).toThrow(said));

  test("of other actions is refused with their number", () => {
    const other = gpipe({ ranks: 2, microbatches: 2 });
    const recording = read(JSON.stringify(core.toTimelineJson(other, core.timeView(other, other.costs), other.costs)));
    expect(() => core.timingOf(view, recording)).toThrow("lacks 4 of the 12 that are shown");
    const studio = new Studio(true);
    expect(() => studio.record(recording)).toThrow(core.RecordingError);
    const more = gpipe({ ranks: 2, microbatches: 4 });
    const longer = read(JSON.stringify(core.toTimelineJson(more, core.timeView(more, more.costs), more.costs)));
    expect(() => core.timingOf(view, longer)).toThrow("has 4 besides the 12 that are shown");
  });
});

describe("traces of a profiler", () => {
  /** One file per rank: a range is entered when the rank is free, its first operator comes when its input is there. */
  function traces(form: (action: string) => string, ahead = [0, 0], steps = 1): core.NamedText[] {
    const second = 1e6;
    return [0, 1].map((rank) => {
      const events: Record<string, unknown>[] = [{ ph: "M", name: "process_name" }];
      for (let step = 0; step < steps; step++) {
        let free = step * 100;
        for (let node = view.graph.bounds[rank]; node < view.graph.bounds[rank + 1]; node++) {
          const [start, end] = [step * 100 + timing.start[node], step * 100 + timing.end[node]];
          events.push({ ph: "X", cat: "user_annotation", name: form(core.actionText(view, node)), ts: free * second + ahead[rank], dur: (end - free) * second });
          events.push({ ph: "X", cat: "cpu_op", name: "gloo:recv", ts: free * second + ahead[rank], dur: 1 });
          events.push({ ph: "X", cat: "cpu_op", name: "aten::mm", ts: start * second + ahead[rank], dur: 1 });
          free = end;
        }
      }
      return { name: `trace_${rank}.json`, text: JSON.stringify({ traceEvents: events }) };
    });
  }

  const numbered = (action: string): string => action.replace(/^\d+F(\d+)$/, "Forward $1").replace(/^\d+B(\d+)$/, "Backward $1");

  test.each([
    ["PP:", (action: string) => `PP:${action}`],
    ["penstock::", (action: string) => `penstock::${action}`],
    ["Forward and Backward", numbered],
  ])("give each computation its times (%s)", (_, form) => {
    const found = core.timingOf(view, core.readRecording(traces(form).reverse()));
    found.start.forEach((start, node) => expect(start).toBeCloseTo(timing.start[node], 9));
    found.end.forEach((end, node) => expect(end).toBeCloseTo(timing.end[node], 9));
    found.arrive.forEach((arrive, message) => expect(arrive).toBeCloseTo(timing.arrive[message], 9));
  });

  test("are read by one clock, and the last of several steps counts", () => {
    const found = core.timingOf(view, core.readRecording(traces((action) => `PP:${action}`, [0, 7e9], 3)));
    expect(found.end[11] - found.start[6]).toBeCloseTo(timing.end[11] - timing.start[6], 9);
    found.arrive.forEach((arrive, message) => expect(arrive).toBeGreaterThanOrEqual(found.depart[message]));
  });

  test("of some ranks, of one rank twice and beside other files are refused with what to do", () => {
    const both = traces((action) => `PP:${action}`);
    expect(() => core.timingOf(view, core.readRecording(both.slice(0, 1)))).toThrow("one rank of 2: lay the traces of all ranks over the schedule together");
    expect(() => core.readRecording([both[0], { ...both[0], name: "copy_1.json" }])).toThrow("both ran 0F0: give the files of one pipeline");
    expect(() => core.readRecording([both[0], traces(numbered)[1]])).toThrow("are of different runs");
    expect(() => core.readRecording([traces(numbered)[0], traces(numbered)[0]])).toThrow("so give one file for each");
    expect(() => core.readRecording([both[0], traces((action) => `PP:${action}`, [0, 0], 2)[1]])).toThrow("different numbers of steps: 1 in trace_0.json (rank 0), 2 in trace_1.json (rank 1)");
    expect(() => core.readRecording([both[0], { name: "t.json", text: JSON.stringify(timeline) }])).toThrow("t.json is a run of all ranks");
  });
});

test.each([
  [200, 150],
  [20, 20],
  [790, 390],
  [400, 395],
])("a note at %i, %i stands beside the arrows that it explains", (x, y) => {
  const taken = [
    { x: x - 30, top: y - 10, width: 60, height: 20 },
    { x: x + 10, top: y + 10, width: 80, height: 60 },
    { x: x - 90, top: y - 70, width: 80, height: 60 },
  ];
  const note = { width: 180, height: 120 };
  const [left, top] = freePlace({ x, y }, note, { width: 800, top: -100, bottom: 500 }, taken);
  for (const box of taken) {
    const apart = left >= box.x + box.width || left + note.width <= box.x || top >= box.top + box.height || top + note.height <= box.top;
    expect(apart).toBe(true);
  }
});
