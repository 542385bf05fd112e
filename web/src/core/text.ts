import { hasMicrobatch, isSend, isSendWait } from "./kinds.ts";
import type { View } from "./types.ts";

/** An action as it is written: 2F0, 1UNSHARD, 3SEND_F1, (3F1;0B4)OVERLAP_F_B. */
export function actionText(view: View, node: number): string {
  const [low, high] = [view.entries.at[node], view.entries.at[node + 1]];
  if (high - low === 1) return entryText(view, low);
  const parts = Array.from({ length: high - low }, (_, k) => entryText(view, low + k));
  return `(${parts.join(";")})OVERLAP_F_B`;
}

/** One part of an action. */
export function entryText(view: View, entry: number): string {
  const { kind, stage, microbatch, peer } = view.entries;
  const which = hasMicrobatch(kind[entry]) ? microbatch[entry] : "";
  const other = peer[entry] < 0 ? "" : `${isSend(kind[entry]) || isSendWait(kind[entry]) ? ">" : "<"}${peer[entry]}`;
  return `${stage[entry]}${view.kinds[kind[entry]]}${which}${other}`;
}
