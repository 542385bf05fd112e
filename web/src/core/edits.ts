import { B, I, W } from "./kinds.ts";
import { cellNumber, cellText, codeOf, codesOf, homeOf, IDLE, kindOf, nameOf, type Order } from "./order.ts";
import { linkOrder } from "./rebuild.ts";
import { unitText } from "./text.ts";
import { walkOrder } from "./check.ts";

/** A change that cannot be made, in a sentence. */
export class EditError extends Error {}

/**
 * One change to an order. Places count the cells of a row, idle slots included; `to` is the place after the change. A unit is a
 * microbatch, or a slice of one; a stage or unit of null means all of them.
 */
export type Edit =
  | { what: "move"; rank: number; from: number; to: number }
  | { what: "split" | "merge"; stage: number | null; unit: number | null }
  | { what: "place"; stage: number; rank: number }
  | { what: "idle" | "drop"; rank: number; at: number }
  | { what: "add"; rank: number; at: number; kind: number; stage: number; unit: number };

type Edges = readonly (readonly [number, number])[];

/** The order after a change; `edges` are those of the stage graph. */
export function applyEdit(order: Order, edit: Edit, edges: Edges): Order {
  switch (edit.what) {
    case "move":
      return move(order, edit.rank, edit.from, edit.to);
    case "split":
      return replaced(order, edit, B, split);
    case "merge":
      return replaced(order, edit, I, merge);
    case "place":
      return place(order, edit.stage, edit.rank, edges);
    case "idle":
      return withRow(order, edit.rank, inserted(rowOf(order, edit.rank), edit.at, IDLE));
    case "drop":
      return withRow(order, edit.rank, removed(rowOf(order, edit.rank), edit.at));
    case "add":
      return add(order, edit);
  }
}

export function applyEdits(order: Order, edits: readonly Edit[], edges: Edges): Order {
  return edits.reduce((changed, edit) => applyEdit(changed, edit, edges), order);
}

function rowOf(order: Order, rank: number): readonly number[] {
  const row = order.rows[rank];
  if (!row) throw new EditError(`there is no rank ${rank}: ranks go from 0 to ${order.rows.length - 1}`);
  return row;
}

function withRow(order: Order, rank: number, row: number[]): Order {
  return { ...order, rows: order.rows.map((old, k) => (k === rank ? row : old)) };
}

function inserted(row: readonly number[], at: number, cell: number): number[] {
  if (!(at >= 0 && at <= row.length)) throw new EditError(`there is no place ${at} in a row of ${row.length}`);
  return [...row.slice(0, at), cell, ...row.slice(at)];
}

function removed(row: readonly number[], at: number): number[] {
  if (!(at >= 0 && at < row.length)) throw new EditError(`there is no place ${at} in a row of ${row.length}`);
  return [...row.slice(0, at), ...row.slice(at + 1)];
}

function move(order: Order, rank: number, from: number, to: number): Order {
  const row = rowOf(order, rank);
  return withRow(order, rank, inserted(removed(row, from), to, row[from]));
}

function add(order: Order, { rank, at, kind, stage, unit }: Extract<Edit, { what: "add" }>): Order {
  if (stage >= order.stages || unit >= order.units) throw new EditError(`there is no stage ${stage} with a microbatch ${unitText(unit, order.slices)}`);
  return withRow(order, rank, inserted(rowOf(order, rank), at, codeOf(kind, stage, unit, order.units)));
}

/** Rewrites every row that runs the wanted action of the chosen stages and microbatches; refuses if there is none. */
function replaced(order: Order, { what, stage, unit }: Extract<Edit, { what: "split" | "merge" }>, kind: number, rewrite: (row: readonly number[], chosen: Set<number>) => number[]): Order {
  const chosen = new Set<number>();
  const isChosen = (code: number): boolean => {
    const cell = cellNumber(code);
    const [s, u] = [Math.floor(cell / order.units), cell % order.units];
    return kindOf(code) === kind && (stage === null || s === stage) && (unit === null || u === unit);
  };
  const rows = order.rows.map((row) => {
    const here = new Set<number>();
    for (const cell of row) if (cell >= 0 && isChosen(cell)) here.add(cellNumber(cell));
    here.forEach((cell) => chosen.add(cell));
    return here.size ? rewrite(row, here) : row;
  });
  if (!chosen.size) throw new EditError(`there is nothing to ${what}: ${what === "split" ? "no full backward (B)" : "no backward in two parts (I and W)"} of these stages and microbatches by itself`);
  return { ...order, rows };
}

const withKind = (cell: number, kind: number): number => (cell << 2) | kind;

function split(row: readonly number[], chosen: Set<number>): number[] {
  return row.flatMap((code) => (code >= 0 && kindOf(code) === B && chosen.has(cellNumber(code)) ? [withKind(cellNumber(code), I), withKind(cellNumber(code), W)] : [code]));
}

/** B stands where I stood. */
function merge(row: readonly number[], chosen: Set<number>): number[] {
  const whole = new Set(row.filter((code) => code >= 0 && kindOf(code) === W && chosen.has(cellNumber(code))).map(cellNumber));
  return row.flatMap((code) => {
    if (code < 0 || !whole.has(cellNumber(code))) return [code];
    if (kindOf(code) === I) return [withKind(cellNumber(code), B)];
    return kindOf(code) === W ? [] : [code];
  });
}

/** Moves all actions of a stage to another rank, each to the step in which it ran: what a step needs ran in earlier steps, so the order cannot hang. */
function place(order: Order, stage: number, rank: number, edges: Edges): Order {
  rowOf(order, rank);
  if (order.copies.length > 1) throw new EditError("stages that run in two directions keep their ranks");
  if (stage >= order.stages) throw new EditError(`there is no stage ${stage}: stages go from 0 to ${order.stages - 1}`);
  const from = homeOf(order, stage, 0);
  if (from === rank) throw new EditError(`stage ${stage} is on rank ${rank}`);
  const copy = order.copies[0].map((home, held) => (held === stage ? rank : home));
  if (!copy.includes(from)) throw new EditError(`rank ${from} would have nothing to do: stage ${stage} is its only one`);
  const isOf = (code: number): boolean => Math.floor(cellNumber(code) / order.units) === stage;
  for (const cell of order.rows[from]) {
    if (cell < -1 && codesOf(order, cell).some(isOf)) throw new EditError(`${cellText(order, cell)} runs stage ${stage} together with another stage`);
  }
  const leaves = (cell: number): boolean => cell >= 0 && isOf(cell);
  const steps = stepsOfCells(order, edges);
  const moved = order.rows[from].map((cell, k) => ({ cell, step: steps[from][k] })).filter(({ cell }) => leaves(cell));
  const rows = order.rows.map((row, at) => {
    if (at === from) return row.filter((cell) => !leaves(cell));
    return at === rank ? mergeBySteps(row.map((cell, k) => ({ cell, step: steps[rank][k] })), moved) : row;
  });
  return { ...order, rows, copies: [copy] };
}

interface Stepped {
  cell: number;
  step: number;
}

function mergeBySteps(row: Stepped[], moved: Stepped[]): number[] {
  const merged: number[] = [];
  let next = 0;
  for (const { cell, step } of row) {
    while (next < moved.length && moved[next].step < step) merged.push(moved[next++].cell);
    merged.push(cell);
  }
  return [...merged, ...moved.slice(next).map(({ cell }) => cell)];
}

/** The step of each cell if every action took one; cells that never run, and idle slots, follow the one before them. */
function stepsOfCells(order: Order, edges: Edges): number[][] {
  const linked = linkOrder(order, edges);
  const { step } = walkOrder(linked);
  return order.rows.map((row, rank) => {
    let [node, last] = [linked.bounds[rank], -1];
    return row.map((cell) => {
      if (cell === IDLE) return last;
      const own = step[node++];
      return (last = own < 0 ? last + 1 : own);
    });
  });
}

// Text ----------------------------------------------------------------------------------------------------------------

const LETTERS = { move: "m", split: "s", merge: "j", place: "p", idle: "i", drop: "d", add: "a" } as const;
const KINDS = ["F", "B", "I", "W"];

/** Changes as an address or a file holds them, microbatches and slices as one number: `m0.3.5_s2.3_p1.0`. */
export function encodeEdits(edits: readonly Edit[]): string {
  return edits.map(encodeEdit).join("_");
}

function encodeEdit(edit: Edit): string {
  const letter = LETTERS[edit.what];
  const all = (value: number | null): string => (value === null ? "x" : String(value));
  switch (edit.what) {
    case "move":
      return `${letter}${edit.rank}.${edit.from}.${edit.to}`;
    case "split":
    case "merge":
      return `${letter}${all(edit.stage)}.${all(edit.unit)}`;
    case "place":
      return `${letter}${edit.stage}.${edit.rank}`;
    case "idle":
    case "drop":
      return `${letter}${edit.rank}.${edit.at}`;
    case "add":
      return `${letter}${edit.rank}.${edit.at}.${edit.stage}${KINDS[edit.kind]}${edit.unit}`;
  }
}

/** The reverse; refuses text that is not a list of changes. */
export function decodeEdits(text: string): Edit[] {
  return text === "" ? [] : text.split("_").map(decodeEdit);
}

const NUMBERS = /^([msjpid])(\d{1,9}|x)\.(\d{1,9}|x)(?:\.(\d{1,9}))?$/;
const ADDED = /^a(\d{1,9})\.(\d{1,9})\.(\d{1,9})([FBIW])(\d{1,9})$/;

function decodeEdit(text: string): Edit {
  const added = ADDED.exec(text);
  if (added) return { what: "add", rank: Number(added[1]), at: Number(added[2]), stage: Number(added[3]), kind: KINDS.indexOf(added[4]), unit: Number(added[5]) };
  const [, letter, one, other, third] = NUMBERS.exec(text) ?? [];
  const what = (Object.keys(LETTERS) as Edit["what"][]).find((name) => LETTERS[name] === letter);
  const every = (value: string): number | null => (value === "x" ? null : Number(value));
  if (what === "split" || what === "merge") {
    if (third === undefined) return { what, stage: every(one), unit: every(other) };
  } else if (what && one !== "x" && other !== "x") {
    if (what === "move" && third !== undefined) return { what, rank: Number(one), from: Number(other), to: Number(third) };
    if (what === "place" && third === undefined) return { what, stage: Number(one), rank: Number(other) };
    if ((what === "idle" || what === "drop") && third === undefined) return { what, rank: Number(one), at: Number(other) };
  }
  throw new EditError(`${text.slice(0, 40)} is not a change`);
}

/** A change in words, told of the order before it. */
export function describeEdit(order: Order, edit: Edit): string {
  const cell = (rank: number, at: number): string => cellText(order, order.rows[rank]?.[at] ?? IDLE) || "an idle slot";
  const backward = (stage: number | null, unit: number | null): string => {
    if (stage !== null && unit !== null) return nameOf(order, B, stage, unit);
    return stage === null ? "every B" : `every B of stage ${stage}`;
  };
  switch (edit.what) {
    case "move":
      return `Move ${cell(edit.rank, edit.from)} on rank ${edit.rank} from step ${edit.from} to step ${edit.to}`;
    case "split":
      return `Split ${backward(edit.stage, edit.unit)} into I and W`;
    case "merge":
      return `Merge I and W into ${backward(edit.stage, edit.unit)}`;
    case "place":
      return `Move stage ${edit.stage} to rank ${edit.rank}`;
    case "idle":
      return `Insert an idle slot on rank ${edit.rank} at step ${edit.at}`;
    case "drop":
      return `Remove ${cell(edit.rank, edit.at)} on rank ${edit.rank} at step ${edit.at}`;
    case "add":
      return `Add ${nameOf(order, edit.kind, edit.stage, edit.unit)} on rank ${edit.rank} at step ${edit.at}`;
  }
}
