import { hasMicrobatch, isSend, isSendWait } from "./kinds.ts";
import type { View } from "./types.ts";

/** A microbatch as it is written, with its slice if there are several: 3, 3.1. */
export function unitText(unit: number, slices: number): string {
  return slices === 1 ? String(unit) : `${Math.floor(unit / slices)}.${unit % slices}`;
}

/**
 * An action as it is written: 2F0, 2F0.1, 1UNSHARD, 3SEND_F1, (3F1;0B4)OVERLAP_F_B. With `slices` of 1, one number stands for
 * microbatch and slice, as PyTorch needs it.
 */
export function actionText(view: View, node: number, slices = view.slices): string {
  const [low, high] = [view.entries.at[node], view.entries.at[node + 1]];
  if (high - low === 1) return entryText(view, low, slices);
  const parts = Array.from({ length: high - low }, (_, k) => entryText(view, low + k, slices));
  return `(${parts.join(";")})OVERLAP_F_B`;
}

/** One part of an action. */
export function entryText(view: View, entry: number, slices = view.slices): string {
  const { kind, stage, unit, peer } = view.entries;
  const which = hasMicrobatch(kind[entry]) ? unitText(unit[entry], slices) : "";
  const other = peer[entry] < 0 ? "" : `${isSend(kind[entry]) || isSendWait(kind[entry]) ? ">" : "<"}${peer[entry]}`;
  return `${stage[entry]}${view.kinds[kind[entry]]}${which}${other}`;
}
