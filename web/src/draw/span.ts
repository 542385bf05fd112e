// The part of the time axis that is on screen.

export interface Span {
  from: number;
  to: number;
}

/** Pixels for times: `left` is where `from` is drawn. */
export interface Scale extends Span {
  left: number;
  width: number;
}

export function toX(scale: Scale, time: number): number {
  return scale.left + ((time - scale.from) / (scale.to - scale.from)) * scale.width;
}

export function toTime(scale: Scale, x: number): number {
  return scale.from + ((x - scale.left) / scale.width) * (scale.to - scale.from);
}

/** A figure as people read it: four digits, or all before the point, without a tail of zeros. */
export function figure(value: number): string {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const power = Math.floor(Math.log10(Math.abs(value)));
  if (power >= 7 || power < -6) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(4, power + 1) });
}

const SHORTER: [number, string][] = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const LARGER = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** What times are told in: so many of the costs' unit, and its name. */
export interface TimeUnit {
  size: number;
  name: string;
}

/** The part of a second in which a time reads best; other units are kept. */
export function unitFor(value: number, unit: string): TimeUnit {
  if (unit !== "s") return { size: 1, name: unit };
  const [size, name] = SHORTER.find(([least]) => Math.abs(value) >= least) ?? (value ? SHORTER[3] : SHORTER[0]);
  return { size, name };
}

/** A time in a unit that others are told in too. */
export function timeIn(value: number, { size, name }: TimeUnit): string {
  return name ? `${figure(value / size)} ${name}` : figure(value / size);
}

/** A time by itself; one in seconds in the part of a second that reads best. */
export function timeText(value: number, unit: string): string {
  return timeIn(value, unitFor(value, unit));
}

/** A size; one in bytes in the multiple that reads best. */
export function sizeText(value: number, unit: string): string {
  if (unit !== "B") return unit ? `${figure(value)} ${unit}` : figure(value);
  const power = value ? Math.min(Math.max(Math.floor(Math.log2(Math.abs(value)) / 10), 0), LARGER.length - 1) : 0;
  return `${figure(value / 2 ** (10 * power))} ${LARGER[power]}`;
}

export function percent(value: number): string {
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 2 : 1)}%`;
}

export function signed(value: number, text: (value: number) => string = figure): string {
  return value > 0 ? `+${text(value)}` : value < 0 ? `−${text(-value)}` : text(0);
}
