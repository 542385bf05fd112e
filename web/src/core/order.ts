import { isCompute, isCopy, isSpread } from "./kinds.ts";
import { unitText } from "./text.ts";
import type { View } from "./types.ts";

/** An idle slot among the cells of a row. */
export const IDLE = -1;

/**
 * A schedule that can be changed: the cells of each rank's row. A cell is a compute action as one number (`codeOf`), an idle slot,
 * or for actions that run together the number of their list, as `overlapCell` gives it. Rows are never changed in place.
 */
export interface Order {
  rows: readonly (readonly number[])[];
  copies: readonly (readonly number[])[];
  /** The codes of each overlapped action; changes never split or join these. */
  overlaps: readonly (readonly number[])[];
  stages: number;
  slices: number;
  /** Microbatches times slices: a unit is a microbatch, or a slice of one. */
  units: number;
}

export const codeOf = (kind: number, stage: number, unit: number, units: number): number => (stage * units + unit) * 4 + kind;
export const kindOf = (code: number): number => code & 3;
export const cellNumber = (code: number): number => code >> 2;
const overlapCell = (index: number): number => -2 - index;

/** The codes that a cell runs: none for an idle slot. */
export function codesOf(order: Order, cell: number): readonly number[] {
  if (cell >= 0) return [cell];
  return cell === IDLE ? [] : order.overlaps[-2 - cell];
}

const KINDS = ["F", "B", "I", "W"];

/** A compute action as it is written: 2F0, 2F0.1. */
export function nameOf(order: Order, kind: number, stage: number, unit: number): string {
  return `${stage}${KINDS[kind]}${unitText(unit, order.slices)}`;
}

/** A cell as it is written; an idle slot is empty. */
export function cellText(order: Order, cell: number): string {
  const parts = codesOf(order, cell).map((code) => {
    const number = cellNumber(code);
    return nameOf(order, kindOf(code), Math.floor(number / order.units), number % order.units);
  });
  return parts.length > 1 ? `(${parts.join(";")})OVERLAP_F_B` : (parts[0] ?? "");
}

/** Why a view cannot be changed, in words; null if it can. */
export function notEditable(view: View): string | null {
  const { kind, stage, unit } = view.entries;
  for (let entry = 0; entry < kind.length; entry++) {
    if (isCopy(kind[entry])) return "it moves activations to host memory, and these copies are placed when a schedule is lowered: open the schedule without them, change that, and lower it with offload again";
    if (isSpread(kind[entry])) return "its vocabulary is spread over the ranks, and the shares and collectives are placed by a pass: open the schedule without them, change that, and spread the vocabulary again";
    if (isCompute(kind[entry]) && (stage[entry] >= view.stages || unit[entry] >= view.unitCount)) {
      return `it names stage ${stage[entry]} and microbatch ${unitText(unit[entry], view.slices)}, which do not exist`;
    }
  }
  return null;
}

/** The compute actions of a view, rank by rank; communication is left to the lowering. */
export function orderOf(view: View): Order {
  const { entries, graph, unitCount: units, slices } = view;
  const overlaps: number[][] = [];
  const rows = Array.from({ length: view.ranks }, (_, rank) => {
    const row: number[] = [];
    for (let node = graph.bounds[rank]; node < graph.bounds[rank + 1]; node++) {
      const codes: number[] = [];
      for (let entry = entries.at[node]; entry < entries.at[node + 1]; entry++) {
        if (isCompute(entries.kind[entry])) codes.push(codeOf(entries.kind[entry], entries.stage[entry], entries.unit[entry], units));
      }
      if (codes.length > 1) row.push(overlapCell(overlaps.push(codes) - 1));
      else if (codes.length) row.push(codes[0]);
    }
    return row;
  });
  return { rows, copies: view.copies, overlaps, stages: view.stages, slices, units };
}

/** The rank that the placement gives a stage and unit. */
export function homeOf(order: Order, stage: number, unit: number): number {
  return order.copies[unit % order.copies.length][stage];
}
