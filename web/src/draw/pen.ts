// One way to draw, on a canvas and into SVG, so that what is exported is what is on screen.

export interface TextStyle {
  fill: string;
  size: number;
  align?: "left" | "center" | "right";
  bold?: boolean;
}

export interface Pen {
  rect(x: number, y: number, width: number, height: number, fill: string, alpha?: number): void;
  frame(x: number, y: number, width: number, height: number, stroke: string, thickness: number, dashed?: boolean): void;
  line(points: number[], stroke: string, thickness: number, dashed?: boolean): void;
  area(points: number[], fill: string): void;
  curve(from: [number, number], to: [number, number], stroke: string, thickness: number): void;
  /** A triangle that points to the right, its tip at x and y. */
  tip(x: number, y: number, fill: string): void;
  dot(x: number, y: number, radius: number, fill: string, stroke: string): void;
  /** y is the middle of the text. */
  text(x: number, y: number, text: string, style: TextStyle): void;
  /** Runs the body with everything outside of the box cut off. */
  clip(x: number, y: number, width: number, height: number, body: () => void): void;
}

export const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
const DASH = [4, 3];

export class CanvasPen implements Pen {
  private fill = "";
  private font = "";
  constructor(private readonly context: CanvasRenderingContext2D) {
    context.textBaseline = "middle";
  }

  private paint(fill: string): void {
    if (fill !== this.fill) this.context.fillStyle = this.fill = fill;
  }

  rect(x: number, y: number, width: number, height: number, fill: string, alpha = 1): void {
    this.paint(fill);
    if (alpha !== 1) this.context.globalAlpha = alpha;
    this.context.fillRect(x, y, width, height);
    if (alpha !== 1) this.context.globalAlpha = 1;
  }

  private stroke(stroke: string, thickness: number, dashed = false): void {
    this.context.strokeStyle = stroke;
    this.context.lineWidth = thickness;
    this.context.setLineDash(dashed ? DASH : []);
    this.context.stroke();
  }

  frame(x: number, y: number, width: number, height: number, stroke: string, thickness: number, dashed = false): void {
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.stroke(stroke, thickness, dashed);
  }

  private trace(points: number[]): void {
    this.context.beginPath();
    for (let k = 0; k < points.length; k += 2) this.context.lineTo(points[k], points[k + 1]);
  }

  line(points: number[], stroke: string, thickness: number, dashed = false): void {
    this.trace(points);
    this.stroke(stroke, thickness, dashed);
  }

  area(points: number[], fill: string): void {
    this.trace(points);
    this.paint(fill);
    this.context.fill();
  }

  curve(from: [number, number], to: [number, number], stroke: string, thickness: number): void {
    this.context.beginPath();
    this.context.moveTo(...from);
    const [one, other] = bend(from, to);
    this.context.bezierCurveTo(one, from[1], other, to[1], ...to);
    this.stroke(stroke, thickness);
  }

  tip(x: number, y: number, fill: string): void {
    this.area([x, y, x - 6, y - 3.5, x - 6, y + 3.5], fill);
  }

  dot(x: number, y: number, radius: number, fill: string, stroke: string): void {
    this.context.beginPath();
    this.context.arc(x, y, radius, 0, 2 * Math.PI);
    this.paint(fill);
    this.context.fill();
    this.stroke(stroke, 1);
  }

  text(x: number, y: number, text: string, style: TextStyle): void {
    this.paint(style.fill);
    const font = `${style.bold ? "600 " : ""}${style.size}px ${FONT}`;
    if (font !== this.font) this.context.font = this.font = font;
    this.context.textAlign = style.align ?? "left";
    this.context.fillText(text, x, y);
  }

  clip(x: number, y: number, width: number, height: number, body: () => void): void {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    body();
    this.context.restore();
    this.fill = this.font = ""; // restoring has changed both behind our back
  }
}

export class SvgPen implements Pen {
  private readonly parts: string[] = [];
  private clips = 0;

  rect(x: number, y: number, width: number, height: number, fill: string, alpha = 1): void {
    this.add("rect", { ...box(x, y, width, height), fill, "fill-opacity": alpha === 1 ? undefined : alpha });
  }

  frame(x: number, y: number, width: number, height: number, stroke: string, thickness: number, dashed = false): void {
    this.add("rect", { ...box(x, y, width, height), fill: "none", ...stroked(stroke, thickness, dashed) });
  }

  line(points: number[], stroke: string, thickness: number, dashed = false): void {
    this.add("polyline", { points: points.map(short).join(" "), fill: "none", ...stroked(stroke, thickness, dashed) });
  }

  area(points: number[], fill: string): void {
    this.add("polygon", { points: points.map(short).join(" "), fill });
  }

  curve(from: [number, number], to: [number, number], stroke: string, thickness: number): void {
    const [one, other] = bend(from, to);
    const d = `M${from.map(short)} C${[one, from[1]].map(short)} ${[other, to[1]].map(short)} ${to.map(short)}`;
    this.add("path", { d, fill: "none", ...stroked(stroke, thickness, false) });
  }

  tip(x: number, y: number, fill: string): void {
    this.area([x, y, x - 6, y - 3.5, x - 6, y + 3.5], fill);
  }

  dot(x: number, y: number, radius: number, fill: string, stroke: string): void {
    this.add("circle", { cx: short(x), cy: short(y), r: radius, fill, stroke });
  }

  text(x: number, y: number, text: string, style: TextStyle): void {
    const anchor = { left: undefined, center: "middle", right: "end" }[style.align ?? "left"];
    const made = { x: short(x), y: short(y + style.size * 0.35), fill: style.fill, "font-size": style.size, "text-anchor": anchor };
    this.add("text", { ...made, "font-weight": style.bold ? 600 : undefined }, escaped(text));
  }

  clip(x: number, y: number, width: number, height: number, body: () => void): void {
    const id = `c${this.clips++}`;
    this.parts.push(`<clipPath id="${id}"><rect ${attributes(box(x, y, width, height))}/></clipPath><g clip-path="url(#${id})">`);
    body();
    this.parts.push("</g>");
  }

  private add(name: string, values: Record<string, string | number | undefined>, inner = ""): void {
    this.parts.push(`<${name} ${attributes(values)}${inner ? `>${inner}</${name}>` : "/>"}`);
  }

  /** The whole picture as a file. */
  file(width: number, height: number, title: string): string {
    const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
    const open = `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${escaped(FONT)}" role="img">`;
    return `${open}\n<title>${escaped(title)}</title>\n${this.parts.join("\n")}\n</svg>\n`;
  }
}

function bend(from: [number, number], to: [number, number]): [number, number] {
  const reach = Math.max(12, Math.abs(to[0] - from[0]) / 2);
  return [from[0] + reach, to[0] - reach];
}

function box(x: number, y: number, width: number, height: number): Record<string, string> {
  return { x: short(x), y: short(y), width: short(width), height: short(height) };
}

function stroked(stroke: string, thickness: number, dashed: boolean): Record<string, string | number | undefined> {
  return { stroke, "stroke-width": thickness, "stroke-dasharray": dashed ? DASH.join(" ") : undefined };
}

function attributes(values: Record<string, string | number | undefined>): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined);
  return given.map(([name, value]) => `${name}="${value}"`).join(" ");
}

function short(value: number): string {
  return String(Math.round(value * 100) / 100);
}

export function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}
