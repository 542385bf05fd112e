import { isCompute, isSpread } from "../core/kinds.ts";
import type { View } from "../core/types.ts";
import { structureOf } from "../state/structure.ts";
import { chunkFill, hex, inkOn, meetingFill, microbatchFill, mixed, rgb, TONES } from "./colours.ts";

export type ColourBy = "kind" | "microbatch";

const RECEIVE = "#bbbbbb";

/** The colour of each entry of a view. */
export class Fills {
  private readonly table: string[];
  private readonly inks = new Map<string, string>();
  private readonly parts = new Map<string, number[]>();
  private readonly sum = [0, 0, 0];
  private weight = 0;

  constructor(
    private readonly view: View,
    private readonly by: ColourBy,
  ) {
    this.table = by === "kind" ? kindTable(view) : Array.from({ length: view.unitCount }, (_, unit) => unitFill(view, unit));
  }

  of(entry: number): string {
    const { kind, stage, unit } = this.view.entries;
    if (!isCompute(kind[entry])) return otherFill(this.view.kinds[kind[entry]]);
    if (this.by === "microbatch") return this.table[unit[entry]] ?? TONES.STEP.fill;
    if (isSpread(kind[entry])) return chunkFill(this.view.kinds[kind[entry]], 0, 1);
    const { chunk, chunks } = structureOf(this.view);
    return this.table[kind[entry] * chunks + (chunk[unit[entry] % chunk.length]?.[stage[entry]] ?? 0)];
  }

  /** Adds a colour with a weight, for what is too small to be drawn by itself. */
  add(entry: number, weight: number): void {
    const fill = this.of(entry);
    let parts = this.parts.get(fill);
    if (!parts) this.parts.set(fill, (parts = rgb(fill)));
    for (let k = 0; k < 3; k++) this.sum[k] += weight * parts[k];
    this.weight += weight;
  }

  /** The mean of what was added, in steps that neighbours often share. */
  mean(): string {
    const { sum, weight } = this;
    const made = hex(sum.map((each) => (weight ? Math.min(255, Math.round(each / weight / 8) * 8) : 128)));
    sum.fill(0);
    this.weight = 0;
    return made;
  }

  inkOn(fill: string): string {
    let ink = this.inks.get(fill);
    if (!ink) this.inks.set(fill, (ink = inkOn(fill)));
    return ink;
  }
}

/** The colour of a microbatch; its later slices are lighter. */
function unitFill({ microbatches, slices }: View, unit: number): string {
  const fill = microbatchFill(Math.floor(unit / slices), microbatches);
  return slices > 1 ? mixed(fill, (0.45 * (unit % slices)) / (slices - 1)) : fill;
}

function kindTable(view: View): string[] {
  const { chunks } = structureOf(view);
  return ["F", "B", "I", "W"].flatMap((kind) => Array.from({ length: chunks }, (_, chunk) => chunkFill(kind, chunk, chunks)));
}

function otherFill(kind: string): string {
  if (kind.includes("SEND")) return TONES.SEND.fill;
  if (kind === "OFFLOAD" || kind === "RELOAD") return kind === "OFFLOAD" ? TONES.OUT.fill : TONES.BACK.fill;
  if (kind === "BROADCAST" || kind === "COMBINE") return meetingFill(kind);
  return kind.startsWith("RECV") ? RECEIVE : TONES.SHARD.fill;
}
