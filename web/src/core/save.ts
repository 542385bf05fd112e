import { plainCosts } from "./costs.ts";
import type { View } from "./types.ts";

type Column = Record<string, string>;

/** A view as a document, which `readDocument` reads back; `edits` are changes to it, which the page makes again when it opens the file. */
export function toDocument(view: View, edits: string): Record<string, unknown> {
  const { entries, graph, messages, local, measured } = view;
  const whole = (column: Int32Array): Column => ({ i32: packed(column) });
  const real = (column: Float64Array): Column => ({ f64: packed(column) });
  const columns = (group: object, names: readonly string[]): Record<string, Column> => Object.fromEntries(names.map((name) => [name, whole((group as Record<string, Int32Array>)[name])]));
  return {
    format: "penstock",
    type: "view",
    version: 1,
    title: view.title,
    source: view.source,
    depends_on_costs: view.dependsOnCosts,
    ranks: view.ranks,
    stages: view.stages,
    microbatches: view.microbatches,
    slices: view.slices,
    copies: view.copies,
    lowered: view.lowered,
    table: view.table,
    kinds: view.kinds,
    entries: { kind: { i8: packed(entries.kind) }, ...columns(entries, ["stage", "peer", "at"]), microbatch: whole(entries.unit) },
    timed: view.timed,
    graph: view.timed
      ? { ...columns(graph, ["bounds", "need_at", "need", "send_at", "gather_at", "gather", "received", "sender", "user", "receive", "slot", "retire"]), collective: { i8: packed(graph.collective) }, ...(graph.join.length ? columns(graph, ["meet"]) : {}) }
      : columns(graph, ["bounds"]),
    local: view.timed ? columns(local, ["after", "before"]) : null,
    messages: view.timed ? columns(messages, ["before", "after", "maker", "begun", "last", "source", "target", "channel"]) : null,
    channels: view.channels,
    costs: plainCosts(view.costs),
    units: view.units,
    memory_limit: view.memoryLimit,
    devices: view.devices,
    cluster: view.cluster,
    measured: measured && {
      source: measured.source,
      start: real(measured.start),
      end: real(measured.end),
      depart: real(measured.depart),
      arrive: real(measured.arrive),
      collective_start: real(measured.collectiveStart),
      collective_end: real(measured.collectiveEnd),
    },
    findings: view.findings,
    num_findings: view.numFindings,
    ...(edits ? { edits } : {}),
  };
}

function packed(column: Int8Array | Int32Array | Float64Array): string {
  const bytes = new Uint8Array(column.buffer, column.byteOffset, column.byteLength);
  const parts: string[] = [];
  for (let at = 0; at < bytes.length; at += 0x8000) parts.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  return btoa(parts.join(""));
}
