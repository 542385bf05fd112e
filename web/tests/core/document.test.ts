import { expect, test } from "vitest";
import { readDocument } from "../../src/core/index.ts";
import { two } from "./two.ts";

function packed(type: string, values: ArrayLike<number> & { buffer: ArrayBufferLike }): Record<string, string> {
  return { [type]: Buffer.from(values.buffer).toString("base64") };
}

test("lists and packed columns read the same", () => {
  const document = two();
  const entries = document.entries as Record<string, number[]>;
  const columns = Object.entries(entries).map(([name, values]) => {
    return [name, name === "kind" ? packed("i8", Int8Array.from(values)) : packed("i32", Int32Array.from(values))];
  });
  expect(readDocument(two({ entries: Object.fromEntries(columns) }))).toEqual(readDocument(document));
});

test("what follows from the columns is made", () => {
  const view = readDocument(two());
  expect([...view.graph.rank]).toEqual([0, 0, 1, 1]);
  expect([...view.entries.node]).toEqual([0, 1, 2, 3]);
  expect(view.costs).toMatchObject({ f: 2, i: 1, latency: 0.5, bandwidth: null });
  expect(view.units).toEqual({ time: "", size: "" });
});

test("measured times are read with the optimizer's of their costs", () => {
  const times = { start: [0, 7, 2, 5], end: [2, 9, 4, 6], depart: [2, 6], arrive: [2.5, 6.5] };
  const none = { collective_start: [-1, -1, -1, -1], collective_end: [-1, -1, -1, -1] };
  const view = readDocument(two({ measured: { source: "measured", ...times, ...none }, costs: { optimizer: [1, 2] } }));
  expect(view.measured?.source).toBe("measured");
  expect([...(view.measured?.optimizer ?? [])]).toEqual([1, 2]);
});

test("a file that cannot run has its grid and findings alone", () => {
  const finding = { rule: "order", severity: "wrong", rank: 1, step: 0, action: "1F0", message: "no", remedy: "do" };
  const view = readDocument(two({ timed: false, graph: { bounds: [0, 2, 4] }, local: null, messages: null, channels: [], findings: [finding] }));
  expect(view.timed).toBe(false);
  expect(view.nodes).toBe(4);
  expect(view.findings).toEqual([finding]);
});

test.each([
  [null, "must be an object"],
  [[], "must be an object"],
  [{}, "not a document of the studio"],
  [two({ version: 2 }), "version 2: this page reads version 1"],
  [two({ ranks: 0 }), "ranks must be a whole number"],
  [two({ stages: 1.5 }), "stages must be a whole number"],
  [two({ ranks: 3 }), "graph.bounds has 3 values, there should be 4"],
  [two({ entries: { ...(two().entries as object), peer: [-1] } }), "entries.peer has 1 values, there should be 4"],
  [two({ entries: { ...(two().entries as object), at: [0, 1] } }), "entries.at does not end"],
  [two({ entries: { ...(two().entries as object), stage: { i32: "*" } } }), "stage is not base64"],
  [two({ entries: { ...(two().entries as object), stage: { i32: "AAA=" } } }), "ends in the middle of a number"],
  [two({ entries: { ...(two().entries as object), stage: { f64: "" } } }), "must be a column of type i32"],
  [two({ graph: { ...(two().graph as object), slot: [] } }), "graph.slot has 0 values"],
  [two({ messages: null }), "messages must be an object"],
  [two({ costs: { g: 1 } }), "there is no cost g"],
])("a document with a mistake is refused in words (%#)", (document, said) => {
  expect(() => readDocument(document)).toThrow(said);
});
