import { describe, expect, test } from "vitest";
import * as core from "../src/core/index.ts";
import { Editing } from "../src/state/editing.ts";
import { fileName, textOf, trainCommand } from "../src/state/exports.ts";
import { Shown } from "../src/state/shown.ts";
import { Studio } from "../src/state/studio.ts";
import { gpipe, random } from "./pipeline.ts";

const view = gpipe({ ranks: 3, microbatches: 4 });
const { edges } = view.table;
const rows = (order: core.Order): string[][] => order.rows.map((row) => row.map((cell) => core.cellText(order, cell)));
const after = (...texts: string[]): core.Order => core.applyEdits(core.orderOf(view), core.decodeEdits(texts.join("_")), edges);

describe("changes", () => {
  test("an action moves along its rank, and the others keep their order", () => {
    expect(rows(after("m0.0.2"))[0]).toEqual(["0F1", "0F2", "0F0", "0F3", "0B0", "0B1", "0B2", "0B3"]);
    expect(rows(after("m0.7.0"))[0][0]).toBe("0B3");
    expect(rows(after("m0.0.2"))[1]).toEqual(rows(core.orderOf(view))[1]);
  });

  test("a backward is split and merged back", () => {
    expect(rows(after("s1.2"))[1]).toEqual(["1F0", "1F1", "1F2", "1F3", "1B0", "1B1", "1I2", "1W2", "1B3"]);
    expect(rows(after("s1.2", "j1.2"))).toEqual(rows(core.orderOf(view)));
    expect(rows(after("s1.2", "m1.7.8", "j1.2"))[1].slice(4)).toEqual(["1B0", "1B1", "1B2", "1B3"]);
    expect(rows(after("sx.x")).flat().filter((text) => text.includes("B"))).toEqual([]);
    expect(rows(after("s2.x"))[2].filter((text) => text.includes("I")).length).toBe(4);
  });

  test("a rank keeps at least one stage, and what does not exist is refused", () => {
    const two = gpipe({ ranks: 2, microbatches: 2 });
    for (const text of ["p0.1", "p0.0", "p5.0", "p0.7", "m0.9.0", "m9.0.0", "s0.0_s0.0", "j0.0", "i0.99", "d0.44", "a0.0.9F0"]) {
      expect(() => core.applyEdits(core.orderOf(two), core.decodeEdits(text), two.table.edges), text).toThrow(core.EditError);
    }
  });

  test("idle slots delay what follows them, stand in the CSV and are taken out again", () => {
    const made = core.checkedView(view, after("i0.0", "i0.5"));
    const timing = core.timeView(made, made.costs);
    expect(timing.start[0]).toBe(1);
    expect(core.numbersOf(made, timing, made.costs).makespan).toBeGreaterThan(core.numbersOf(view, core.timeView(view, view.costs), view.costs).makespan);
    expect(core.gapsOf(made, timing, 0)[0]).toMatchObject({ start: 0, end: 1 });
    expect(core.toCsv(made).split("\r\n")[0].split(",")[0]).toBe("");
    expect(core.toTableJson(made).rows).toEqual(core.toTableJson(core.checkedView(view, core.orderOf(view))).rows);
    expect(rows(after("i0.0", "i0.5", "d0.0", "d0.4"))).toEqual(rows(core.orderOf(view)));
  });

  test.each(["pair", "duplex", "rank"] as const)("idle slots last as long with links of a %s", (contention) => {
    const made = core.checkedView(view, after("i1.0", "i0.5", "i2.3"));
    const alone = core.timeView(made, made.costs);
    const shared = core.timeView(made, { ...made.costs, contention });
    expect(shared.start).toEqual(alone.start);
  });

  test("changes come back from their text", () => {
    const next = random(4);
    const number = (): number => Math.floor(next() * 50);
    for (let k = 0; k < 300; k++) {
      const some = (): number | null => (next() < 0.3 ? null : number());
      const edits: core.Edit[] = [
        { what: "move", rank: number(), from: number(), to: number() },
        { what: "split", stage: some(), unit: some() },
        { what: "merge", stage: some(), unit: some() },
        { what: "place", stage: number(), rank: number() },
        { what: "idle", rank: number(), at: number() },
        { what: "drop", rank: number(), at: number() },
        { what: "add", rank: number(), at: number(), kind: k % 4, stage: number(), unit: number() },
      ];
      expect(core.decodeEdits(core.encodeEdits(edits))).toEqual(edits);
    }
  });

  test("an order that cannot run says so and has its cycle", () => {
    const broken = core.checkedView(view, after("m0.4.0"));
    expect(broken.timed).toBe(false);
    expect(broken.findings.map(({ rule }) => rule)).toContain("order");
    const stuck = core.checkedView(view, after("m1.4.0", "m1.1.0"));
    expect(stuck.findings.length).toBeGreaterThan(0);
  });
});

describe("history", () => {
  test("every change can be undone and made again", () => {
    const editing = new Editing();
    editing.reset(view);
    expect(editing.view.value).toBeNull();
    const texts = ["m0.0.1", "s1.1", "i2.0"];
    for (const text of texts) editing.apply(...core.decodeEdits(text));
    const last = rows(editing.order.value!);
    expect(editing.list.value).toEqual(["Move 0F0 on rank 0 from step 0 to step 1", "Split 1B1 into I and W", "Insert an idle slot on rank 2 at step 0"]);
    expect(editing.view.value!.title).toBe(`${view.title}, edited`);
    for (let k = 0; k < 3; k++) expect(editing.undo()).toBe(true);
    expect(editing.undo()).toBe(false);
    expect(editing.active.value).toBe(false);
    expect(editing.list.value.length).toBe(3);
    editing.goTo(3);
    expect(rows(editing.order.value!)).toEqual(last);
    editing.goTo(1);
    editing.apply(...core.decodeEdits("s0.0"));
    expect(core.encodeEdits(editing.edits.value)).toBe("m0.0.1_s0.0");
    expect(editing.redo()).toBe(false);
  });

  test("a change that cannot be made changes nothing", () => {
    const editing = new Editing();
    editing.reset(view);
    editing.apply(...core.decodeEdits("m0.0.1"));
    expect(() => editing.apply(...core.decodeEdits("m0.1.0_m0.99.0"))).toThrow(core.EditError);
    expect(core.encodeEdits(editing.edits.value)).toBe("m0.0.1");
    expect(() => editing.take("nonsense")).toThrow(core.EditError);
    expect(core.encodeEdits(editing.edits.value)).toBe("m0.0.1");
  });

  test("the verifier's findings count where it has answered for this order", () => {
    const editing = new Editing();
    editing.reset(view);
    editing.apply(...core.decodeEdits("m0.4.0"));
    const own = editing.findings.value;
    const memory: core.Finding = { rule: "memory", severity: "memory", rank: 0, step: 1, action: "0F1", message: "holds 5", remedy: "take less" };
    editing.verdict.value = { order: editing.order.value!, proof: null, program: null, findings: [{ ...own[0], fix: undefined }, memory] };
    expect(editing.findings.value[0].fix).toEqual(own[0].fix);
    expect(editing.findings.value[1]).toBe(memory);
    expect(editing.shown.value!.findings.length).toBe(2);
    editing.undo();
    expect(editing.findings.value).toEqual([]);
  });

  test("the action that is selected stays selected, and the link holds the changes", () => {
    const studio = new Studio(true);
    studio.show(view, null);
    studio.selected.value = { what: "action", panel: 0, index: 8 + 5 };
    studio.change({ what: "move", rank: 1, from: 5, to: 7 });
    expect(studio.selected.value).toEqual({ what: "action", panel: 0, index: 8 + 7 });
    studio.change({ what: "split", stage: 1, unit: 1 });
    expect(studio.selected.value).toEqual({ what: "action", panel: 0, index: 8 + 7 });
    expect(studio.link().edits).toBe("m1.5.7_s1.1");
    studio.step(true);
    expect(studio.link().edits).toBe("m1.5.7");
    studio.change({ what: "move", rank: 44, from: 0, to: 0 });
    expect(studio.notice.value?.text).toContain("there is no rank 44");
    studio.show(gpipe({ ranks: 2, microbatches: 2 }), null);
    expect(studio.link().edits).toBe("");
  });

  test("what a drag would do is shown while it can run, and never kept", () => {
    const studio = new Studio(true);
    studio.show(view, null);
    studio.editing.mode.value = true;
    studio.editing.preview.value = { what: "move", rank: 0, from: 0, to: 1 };
    expect(core.actionText(studio.panels.value[0].view, 0)).toBe("0F1");
    studio.editing.preview.value = { what: "move", rank: 0, from: 4, to: 0 };
    expect(core.actionText(studio.panels.value[0].view, 0)).toBe("0F0");
    expect(studio.editing.previewed.value!.findings.map(({ rule }) => rule)).toContain("order");
    studio.editing.preview.value = null;
    expect(studio.link().edits).toBe("");
  });
});

describe("files", () => {
  test("a saved view comes back with its changes", () => {
    for (const base of [view, { ...view, timed: false, findings: [], numFindings: 0 }]) {
      const document = JSON.parse(JSON.stringify(core.toDocument(base, "m0.0.1"))) as Record<string, unknown>;
      const back = core.readDocument(document);
      expect(document.edits).toBe("m0.0.1");
      expect(core.toTableJson(back)).toEqual(core.toTableJson(base));
      expect(back.title).toBe(base.title);
      if (base.timed) expect(core.timeView(back, back.costs)).toEqual(core.timeView(base, base.costs));
    }
  });

  test("the changed order is exported", () => {
    const made = core.checkedView(view, after("m0.0.1", "s2.0"));
    const shown = Shown.of("edited", made, made.costs);
    expect((JSON.parse(textOf(shown, "order")) as { rows: string[][] }).rows[0].slice(0, 2)).toEqual(["0F1", "0F0"]);
    expect(textOf(shown, "csv")).toContain("2I0,2W0");
  });

  test("the command trains by name, or with the file", () => {
    const choice = { schedule: "zbv", ranks: 4, microbatches: 8, chunks: null, options: {}, form: "schedule", offload: "" } as const;
    expect(trainCommand(choice, false, "zbv")).toBe("penstock train train.py --ranks 4 --microbatches 8 --schedule zbv");
    const title = "zbv, 4 ranks, 8 microbatches, edited";
    expect(trainCommand(choice, true, title)).toBe(`penstock train train.py --schedule ${fileName(title, "order")}`);
    expect(trainCommand({ ...choice, chunks: 4 }, false, title)).toContain(".json");
    expect(trainCommand(null, false, "$(rm -rf ~); `x`")).toBe("penstock train train.py --schedule rm-rf-x.json");
  });
});
