// Where everything stands: one row per rank with a lane for computation, thin lanes for its waits, channels, collectives and copies, and
// strips for memory. Heights are those of the content, which may be higher than the window that shows it.

export interface Strip {
  top: number;
  height: number;
}

export interface ChannelLane extends Strip {
  channel: number;
}

export interface Row extends Strip {
  panel: number;
  rank: number;
  compute: Strip;
  /** The recorded run, below what was predicted. */
  measured: Strip | null;
  /** Waits for sends and reductions. */
  waits: Strip | null;
  lanes: ChannelLane[];
  collectives: Strip | null;
  /** Copies to the host, and back. */
  out: Strip | null;
  back: Strip | null;
  memory: Strip | null;
  /** What the host holds of the rank. */
  host: Strip | null;
}

export interface PanelPlace extends Strip {
  rows: Row[];
}

export interface Layout {
  width: number;
  gutter: number;
  axis: number;
  panels: PanelPlace[];
  /** Of all panels, without the axis. */
  height: number;
}

/** What a panel needs room for: the channels that leave each rank, and whether it has the other strips. */
export interface PanelShape {
  channelsOf: number[][];
  collectives: boolean;
  memory: boolean;
  measured?: boolean;
  waits?: boolean;
  /** Of each rank: whether it copies activations to the host or back. */
  copies?: boolean[];
  /** Whether what the host holds is shown of ranks that copy. */
  host?: boolean;
  /** Whether arrows are drawn between its rows. */
  arrows?: boolean;
}

export const AXIS = 28;
const TITLE = 28;
const MARGIN = 8;
/** Pixels between two rows with arrows, at the usual scale. */
const ARROWS = 34;
const LARGEST = 1.5;
const SMALLEST = 0.4;

/** The largest rows with which everything fits into the room, or the smallest that can be read. */
export function layOut(shapes: PanelShape[], width: number, room: number): Layout {
  let scale = LARGEST;
  let made = scaled(shapes, width, scale);
  while (made.height + AXIS > room && scale > SMALLEST) {
    scale -= 0.05;
    made = scaled(shapes, width, scale);
  }
  return made;
}

/** The room for the names of ranks, in pixels. */
export function gutterOf(width: number): number {
  return width < 560 ? 44 : 68;
}

function scaled(shapes: PanelShape[], width: number, scale: number): Layout {
  const panels: PanelPlace[] = [];
  let top = 0;
  shapes.forEach((shape, panel) => {
    const from = top;
    top += shapes.length > 1 ? TITLE : MARGIN;
    const rows: Row[] = [];
    shape.channelsOf.forEach((channels, rank) => {
      const row = rowAt(top, panel, rank, channels, shape, scale);
      rows.push(row);
      top += row.height + Math.max(7, Math.round((shape.arrows ? ARROWS : 10) * scale));
    });
    panels.push({ top: from, height: top - from, rows });
    top += MARGIN;
  });
  return { width, gutter: gutterOf(width), axis: AXIS, panels, height: top };
}

function rowAt(top: number, panel: number, rank: number, channels: number[], shape: PanelShape, scale: number): Row {
  const thin = scale > 0.75 ? 5 : scale > 0.5 ? 4 : 2;
  const pitch = scale > 0.5 ? thin + 1 : thin;
  const compute = { top, height: bounded(30 * scale, 9, 40) };
  const measured = shape.measured ? { top: compute.top + compute.height + 1, height: bounded(22 * scale, 7, 30) } : null;
  let at = (measured ?? compute).top + (measured ?? compute).height + 1;
  const strip = (wanted: boolean | undefined, height: number, apart: number): Strip | null => {
    if (!wanted) return null;
    const made = { top: at, height };
    at += height + apart;
    return made;
  };
  const waits = strip(shape.waits, thin, pitch - thin);
  const lanes = channels.map((channel, k) => ({ channel, top: at + k * pitch, height: thin }));
  at += channels.length * pitch;
  const collectives = strip(shape.collectives, thin + 2, 1);
  const copies = shape.copies?.[rank];
  const out = strip(copies, thin + 2, 1);
  const back = strip(copies, thin + 2, 1);
  at += shape.memory ? 2 : 0;
  const memory = strip(shape.memory, bounded(32 * scale, 11, 44), shape.host && copies ? 2 : 0);
  const host = strip(shape.host && copies, bounded(20 * scale, 8, 28), 0);
  return { panel, rank, top, height: at - top, compute, measured, waits, lanes, collectives, out, back, memory, host };
}

function bounded(value: number, least: number, most: number): number {
  return Math.round(Math.min(Math.max(value, least), most));
}

export type Part =
  | { what: "compute" }
  | { what: "measured" }
  | { what: "channel"; channel: number }
  | { what: "waits" | "collectives" | "out" | "back" | "memory" | "host" };

/** The row and the part of it at a height, the nearest part within the row. */
export function partAt(layout: Layout, y: number): { row: Row; part: Part } | null {
  for (const panel of layout.panels) {
    if (y < panel.top || y >= panel.top + panel.height) continue;
    const row = panel.rows.find((each) => y >= each.top && y < each.top + each.height);
    return row ? { row, part: partOf(row, y) } : null;
  }
  return null;
}

function partOf(row: Row, y: number): Part {
  for (const what of ["host", "memory", "back", "out", "collectives"] as const) {
    const strip = row[what];
    if (strip && y >= strip.top) return { what };
  }
  const within = (strip: Strip | null): boolean => strip !== null && y >= strip.top && y < strip.top + strip.height;
  if (within(row.measured)) return { what: "measured" };
  if (within(row.waits)) return { what: "waits" };
  const lane = row.lanes.find((each) => y >= each.top && y <= each.top + each.height);
  return lane ? { what: "channel", channel: lane.channel } : { what: "compute" };
}

export function rowOf(layout: Layout, panel: number, rank: number): Row {
  return layout.panels[panel].rows[rank];
}
