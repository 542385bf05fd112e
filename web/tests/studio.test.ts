import { describe, expect, test, vi } from "vitest";
import { nextAction } from "../src/parts/keys.ts";
import { UNCHANGED } from "../src/state/adjust.ts";
import { firstParting, latenessOfRanks, lengthsByWork, medianRatio } from "../src/state/lateness.ts";
import { relatedOf } from "../src/state/related.ts";
import { Shown } from "../src/state/shown.ts";
import { Studio } from "../src/state/studio.ts";
import { describe as described, sentence } from "../src/state/words.ts";
import { readDocument, timeView, type View } from "../src/core/index.ts";
import { targetAt, boxOf } from "../src/draw/target.ts";
import { gpipe, gpipeDocument } from "./pipeline.ts";
import { sceneOf } from "./scene.ts";

/** A run in which everything takes so many times what the costs say, and one action longer still. */
function measuredView(factor: number, slow: number, extra: number): View {
  const view = gpipe({ ranks: 2, microbatches: 3 });
  const timing = timeView(view, view.costs);
  const late = (times: Float64Array): number[] => [...times].map((time) => time * factor);
  const end = late(timing.end);
  end[slow] += extra;
  const none = [...timing.start].map(() => -1);
  const measured = { source: "measured", start: late(timing.start), end, depart: late(timing.depart), arrive: late(timing.arrive), collective_start: none, collective_end: none };
  return readDocument(gpipeDocument({ ranks: 2, microbatches: 3, more: { measured } }));
}

describe("panels", () => {
  test("one view is one panel, two are two, and sliders move both", () => {
    const studio = new Studio(true);
    expect(studio.panels.value).toEqual([]);
    studio.show(gpipe({ ranks: 2, microbatches: 3 }), null);
    expect(studio.panels.value.map((shown) => shown.numbers.makespan)).toEqual([12]);
    studio.show(studio.first.value!, gpipe({ ranks: 3, microbatches: 3 }));
    expect(studio.panels.value.map((shown) => shown.numbers.makespan)).toEqual([12, 15]);
    studio.adjust.value = { ...UNCHANGED, f: 2 };
    expect(studio.panels.value.map((shown) => shown.numbers.makespan)).toEqual([16, 20]);
    expect(studio.whole.value).toBeGreaterThanOrEqual(20);
  });

  test("a measured run stands beside its prediction", () => {
    const studio = new Studio(true);
    studio.show(measuredView(1.5, 0, 0), null);
    const [predicted, measured] = studio.rested.value;
    expect(studio.panels.value).toEqual([predicted]);
    expect(predicted.beside).toBe(measured);
    expect([predicted.label, predicted.numbers.makespan, predicted.measured]).toEqual(["predicted", 12, false]);
    expect([measured.label, measured.numbers.makespan, measured.measured]).toEqual(["measured", 18, true]);
  });

  test("a run in another unit has its prediction in that unit", () => {
    const studio = new Studio(true);
    studio.show(measuredView(0.001, 0, 0), null);
    const [predicted, measured] = studio.rested.value;
    expect(predicted.numbers.makespan).toBeCloseTo(measured.numbers.makespan, 9);
    expect(predicted.label).toContain("×");
  });

  test("while a slider moves over many actions the figures stand, and follow when it rests", () => {
    vi.useFakeTimers();
    const studio = new Studio(true);
    studio.show({ ...gpipe({ ranks: 2, microbatches: 3 }), nodes: 100_000 }, null);
    const before = studio.rested.value;
    studio.move({ ...UNCHANGED, f: 2 });
    expect(studio.panels.value[0].length).toBe(16);
    expect(studio.rested.value).toBe(before);
    vi.runAllTimers();
    expect(studio.rested.value).toBe(studio.panels.value);
    studio.show(gpipe({ ranks: 2, microbatches: 3 }), null);
    studio.move({ ...UNCHANGED, f: 3 });
    expect(studio.rested.value).toBe(studio.panels.value);
    vi.useRealTimers();
  });

  test("the axis never leaves what there is", () => {
    const studio = new Studio(true);
    for (const [from, to] of [[-1, 0.2], [0.9, 1.4], [0.5, 0.5], [-3, 7]]) {
      studio.setSpan(from, to);
      const [low, high] = studio.span.value;
      expect(low).toBeGreaterThanOrEqual(0);
      expect(high).toBeLessThanOrEqual(1);
      expect(high).toBeGreaterThan(low);
    }
  });

  test("a selection comes back from its link", () => {
    const studio = new Studio(true);
    studio.show(gpipe({ ranks: 2, microbatches: 3 }), null);
    studio.selected.value = { what: "action", panel: 0, index: 8 };
    const { selected } = studio.link();
    expect(selected).toEqual({ panel: 0, rank: 1, step: 2 });
    studio.selected.value = null;
    studio.selectSpot(selected);
    expect(studio.selected.value).toEqual({ what: "action", panel: 0, index: 8 });
    studio.selectSpot({ panel: 3, rank: 9, step: 9 });
    expect(studio.selected.value).toEqual({ what: "action", panel: 0, index: 8 });
  });
});

describe("lateness", () => {
  const view = measuredView(1, 4, 0.5);
  const studio = new Studio(true);
  studio.show(view, null);
  const [predicted, measured] = studio.rested.value;

  test("the first action that is off is found", () => {
    expect(firstParting(predicted, measured)).toMatchObject({ node: 4, rank: 0, action: "0B1", late: 0.5 });
    expect(firstParting(predicted, predicted)).toBeNull();
  });

  test("work that takes longer comes first", () => {
    expect(lengthsByWork(predicted, measured)[0]).toEqual({ name: "stage 0 B", count: 3, predicted: 2, measured: 2 + 0.5 / 3 });
    expect(medianRatio(predicted, measured)).toBe(1);
    expect(latenessOfRanks(predicted, measured)).toEqual([0, 0]);
  });
});

describe("what is pointed at", () => {
  const view = gpipe({ ranks: 3, microbatches: 4, costs: { latency: 0.5, output: 3 } });
  const shown = Shown.of("gpipe", view, view.costs);
  const scene = sceneOf([shown], 0, shown.length);

  test("every action and message is found in the middle of its box", () => {
    for (let node = 0; node < view.nodes; node++) {
      const box = boxOf(scene, { what: "action", panel: 0, index: node });
      expect(targetAt(scene, box.x + box.width / 2, box.top + box.height / 2)).toEqual({ what: "action", panel: 0, index: node });
    }
    for (let message = 0; message < view.messages.before.length; message++) {
      const box = boxOf(scene, { what: "message", panel: 0, index: message });
      expect(targetAt(scene, box.x + box.width / 2, box.top + box.height / 2)).toEqual({ what: "message", panel: 0, index: message });
    }
  });

  test("every idle time is found and says why", () => {
    for (let rank = 0; rank < 3; rank++) {
      for (const gap of shown.gapsOf(rank)) {
        const box = boxOf(scene, { what: "gap", panel: 0, rank, time: (gap.start + gap.end) / 2 });
        const found = targetAt(scene, box.x + box.width / 2, box.top + 1);
        expect(found).toMatchObject({ what: "gap", rank });
        expect(described(shown, found!).facts).toContainEqual(["lasts", String(gap.end - gap.start)]);
      }
    }
  });

  test("an action in words", () => {
    const said = described(shown, { what: "action", panel: 0, index: 8 });
    expect(said).toMatchObject({ title: "1F0", what: "forward" });
    expect(said.facts).toEqual(expect.arrayContaining([["rank", "1"], ["stage", "1"], ["microbatch", "0"], ["start", "1.5"], ["end", "2.5"], ["sends", "3"]]));
    expect(sentence(said)).toContain("1F0, forward. rank 1");
  });

  test("memory in words", () => {
    const said = described(shown, { what: "memory", panel: 0, rank: 2, time: 3.2 });
    expect(said.title).toBe("rank 2 holds 4");
    expect(said.facts).toEqual([["activations", "1"], ["receive buffers", "3"]]);
  });

  test("relations go both ways", () => {
    for (let node = 0; node < view.nodes; node++) {
      for (const { node: needed, message } of relatedOf(view, node).needs) {
        expect(relatedOf(view, needed).unblocks).toContainEqual({ node, message });
      }
    }
  });
});

describe("keys", () => {
  const view = gpipe({ ranks: 3, microbatches: 4 });
  const panels = [Shown.of("one", view, view.costs), Shown.of("two", view, view.costs)];
  const at = (panel: number, index: number) => ({ what: "action", panel, index }) as const;

  test("the first key selects the first action", () => expect(nextAction(panels, null, 1, 0)).toEqual(at(0, 0)));

  test("left and right stay on the rank", () => {
    expect(nextAction(panels, at(0, 3), 1, 0)).toEqual(at(0, 4));
    expect(nextAction(panels, at(0, 7), 1, 0)).toEqual(at(0, 7));
    expect(nextAction(panels, at(0, 8), -1, 0)).toEqual(at(0, 8));
  });

  test("up and down keep the time, from panel to panel", () => {
    expect(nextAction(panels, at(0, 3), 0, 1)).toEqual(at(0, 10));
    expect(nextAction(panels, at(0, 16), 0, 1)).toMatchObject({ panel: 1 });
    expect(nextAction(panels, at(1, 0), 0, -1)).toMatchObject({ panel: 0, index: 16 });
    expect(nextAction(panels, at(0, 0), 0, -1)).toBeNull();
  });
});
