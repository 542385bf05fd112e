// Where everything stands: a row a rank with a lane for computation, thin lanes for its channels and collectives, and a strip
// for memory. Heights are those of the content, which may be higher than the window that shows it.

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
  lanes: ChannelLane[];
  collectives: Strip | null;
  memory: Strip | null;
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
}

export const AXIS = 28;
const TITLE = 28;
const MARGIN = 8;
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
      top += row.height + Math.max(7, Math.round(10 * scale));
    });
    panels.push({ top: from, height: top - from, rows });
    top += MARGIN;
  });
  return { width, gutter: width < 560 ? 44 : 68, axis: AXIS, panels, height: top };
}

function rowAt(top: number, panel: number, rank: number, channels: number[], shape: PanelShape, scale: number): Row {
  const thin = scale > 0.75 ? 5 : scale > 0.5 ? 4 : 2;
  const pitch = scale > 0.5 ? thin + 1 : thin;
  const compute = { top, height: bounded(30 * scale, 9, 40) };
  const measured = shape.measured ? { top: compute.top + compute.height + 1, height: bounded(22 * scale, 7, 30) } : null;
  let at = (measured ?? compute).top + (measured ?? compute).height + 1;
  const lanes = channels.map((channel, k) => ({ channel, top: at + k * pitch, height: thin }));
  at += channels.length * pitch;
  const collectives = shape.collectives ? { top: at, height: thin + 2 } : null;
  at += collectives ? thin + 3 : 0;
  const memory = shape.memory ? { top: at + 2, height: bounded(32 * scale, 11, 44) } : null;
  const bottom = memory ? memory.top + memory.height : at;
  return { panel, rank, top, height: bottom - top, compute, measured, lanes, collectives, memory };
}

function bounded(value: number, least: number, most: number): number {
  return Math.round(Math.min(Math.max(value, least), most));
}

export type Part =
  | { what: "compute" }
  | { what: "measured" }
  | { what: "channel"; channel: number }
  | { what: "collectives" }
  | { what: "memory" };

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
  if (row.memory && y >= row.memory.top) return { what: "memory" };
  if (row.collectives && y >= row.collectives.top) return { what: "collectives" };
  if (row.measured && y >= row.measured.top && y < row.measured.top + row.measured.height) return { what: "measured" };
  const lane = row.lanes.find((each) => y >= each.top && y <= each.top + each.height);
  return lane ? { what: "channel", channel: lane.channel } : { what: "compute" };
}

export function rowOf(layout: Layout, panel: number, rank: number): Row {
  return layout.panels[panel].rows[rank];
}
