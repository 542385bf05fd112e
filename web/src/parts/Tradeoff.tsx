import { scaleLinear, scaleLog } from "d3-scale";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { figure, sizeText, timeIn } from "../draw/span.ts";
import { TONES } from "../draw/colours.ts";
import type { Candidate } from "../state/api.ts";
import { paretoFront, type PlanState } from "../state/plan.ts";

const MARGIN = { left: 74, right: 20, top: 18, bottom: 46 };
const HIGHEST = 440;
const SLOWEST = 2;
export const PLACEMENTS: Record<string, string> = {
  linear: TONES.F.fill,
  looped: TONES.I.fill,
  v: TONES.W.fill,
  wave: "#cc79a7",
  bidirectional: TONES.B.fill,
};

/** The candidates that were timed. */
export function timedOf(candidates: readonly Candidate[]): Candidate[] {
  return candidates.filter((each) => each.makespan !== null && each.memory !== null);
}

/** The candidates that were timed and are not far too slow to be of use: measured against the fastest that fits. The best is always there. */
export function plotted(candidates: readonly Candidate[], best: Candidate | null): Candidate[] {
  const timed = timedOf(candidates);
  const fitting = timed.filter((each) => each.fits);
  const fastest = Math.min(...(fitting.length ? fitting : timed).map((each) => each.makespan!));
  return timed.filter((each) => each.makespan! <= SLOWEST * fastest || each.index === best?.index);
}

function domain(values: number[]): [number, number] {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || high || 1) * 0.07;
  return [Math.max(low - room, low > 0 ? low * 0.5 : 0), high + room];
}

/** The width of an element, kept up to date. */
function useWidth() {
  const holder = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(760);
  useLayoutEffect(() => {
    const measure = (): void => {
      if (holder.current) setWidth(Math.max(280, holder.current.clientWidth)); // the observer may speak once more when the plot is gone
    };
    const observer = new ResizeObserver(measure);
    observer.observe(holder.current!);
    measure();
    return () => observer.disconnect();
  }, []);
  return { holder, width };
}

/** Pixels from one size on the axis to the next, at least. */
const APART = 66;

/** Round sizes; those in bytes are round in the multiple that they are told in. `width` is that of the axis. */
export function sizeTicks(low: number, high: number, unit: string, width: number): number[] {
  const power = unit === "B" && high > 1 ? Math.floor(Math.log2(high) / 10) : 0;
  const whole = 2 ** (10 * power);
  const made = (isWide(low, high) ? scaleLog : scaleLinear)([low / whole, high / whole], [0, width]);
  let last = -Infinity;
  return made
    .ticks(isWide(low, high) ? 20 : Math.max(2, Math.floor(width / (1.4 * APART))))
    .filter((value) => made(value) - last >= APART && ((last = made(value)), true))
    .map((value) => value * whole);
}

/** Whether a logarithmic axis shows more. */
function isWide(low: number, high: number): boolean {
  return low > 0 && high > 6 * low;
}

/** Time against memory: one mark per candidate, filled if it fits. */
export function Tradeoff({ plan, open }: { plan: PlanState; open: (candidate: Candidate) => void }) {
  const { holder, width } = useWidth();
  const height = Math.round(Math.min(HIGHEST, Math.max(260, width * 0.7)));
  const best = plan.best.value;
  const shown = plotted(plan.candidates.value, best);
  const time = plan.timeUnit.value;
  const { size } = plan.units.value;
  const limit = plan.limit.value;
  const memories = shown.map((each) => each.memory!);
  const [low, high] = domain(limit === null ? memories : [...memories, limit]);
  const x = (isWide(low, high) ? scaleLog : scaleLinear)([low, high], [MARGIN.left, width - MARGIN.right]);
  const y = scaleLinear(domain(shown.map((each) => each.makespan!)), [height - MARGIN.bottom, MARGIN.top]);
  return (
    <div ref={holder}>
      <svg class="tradeoff" width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="group" aria-label="Time against memory, one mark per candidate" data-testid="tradeoff">
        {y.ticks(6).map((value) => (
          <g key={value}>
            <line class="grid" x1={MARGIN.left} x2={width - MARGIN.right} y1={y(value)} y2={y(value)} />
            <text class="tick" x={MARGIN.left - 8} y={y(value) + 4} text-anchor="end">{timeIn(value, time)}</text>
          </g>
        ))}
        {sizeTicks(low, high, size, width - MARGIN.left - MARGIN.right).map((value) => (
          <text key={value} class="tick" x={x(value)} y={height - MARGIN.bottom + 18} text-anchor="middle">{sizeText(value, size)}</text>
        ))}
        <line class="axis" x1={MARGIN.left} x2={width - MARGIN.right} y1={height - MARGIN.bottom} y2={height - MARGIN.bottom} />
        <text class="title" x={(MARGIN.left + width - MARGIN.right) / 2} y={height - 8} text-anchor="middle">peak memory of the fullest rank</text>
        <text class="title" transform={`translate(14 ${height / 2}) rotate(-90)`} text-anchor="middle">time</text>
        {limit !== null && (
          <g>
            <line class="limit" x1={x(limit)} x2={x(limit)} y1={MARGIN.top} y2={height - MARGIN.bottom} />
            <text class="limit-text" x={x(limit) + (x(limit) < width / 2 ? 6 : -6)} y={MARGIN.top + 10} text-anchor={x(limit) < width / 2 ? "start" : "end"}>{limitText(plan)}</text>
          </g>
        )}
        <Front plan={plan} x={x} y={y} />
        {shown.map((each) => (
          <Mark key={each.index} candidate={each} x={x(each.memory!)} y={y(each.makespan!)} best={each.index === best?.index} label={labelOf(each, plan)} open={open} />
        ))}
        {best && <BestName name={best.name} x={x(best.memory!)} y={y(best.makespan!)} width={width} marks={shown.filter((each) => each !== best).map((each) => [x(each.memory!), y(each.makespan!)])} />}
      </svg>
    </div>
  );
}

/** The candidates that no other beats in both, joined by steps. */
function Front({ plan, x, y }: { plan: PlanState; x: (memory: number) => number; y: (time: number) => number }) {
  const front = paretoFront(plotted(plan.candidates.value, plan.best.value));
  const points = front.flatMap((each, k) => {
    const here = `${x(each.memory!)},${y(each.makespan!)}`;
    return k ? [`${x(front[k - 1].memory!)},${y(each.makespan!)}`, here] : [here];
  });
  return <polyline class="front" points={points.join(" ")} data-testid="front" />;
}

/** The limit that candidates are judged by, and what is kept free below the one that was asked for. */
function limitText(plan: PlanState): string {
  const [limit, asked, { size }] = [plan.limit.value!, plan.asked.value, plan.units.value];
  const free = asked ? 1 - limit / asked : 0;
  return `limit ${sizeText(limit, size)}${free > 1e-6 ? `, ${figure(100 * free)}% kept free` : ""}`;
}

function labelOf(each: Candidate, plan: PlanState): string {
  const { size } = plan.units.value;
  return `${each.name}: time ${timeIn(each.makespan!, plan.timeUnit.value)}, memory ${sizeText(each.memory!, size)}${each.fits ? "" : ", does not fit"}`;
}

/** Pixels of a letter of the best one's name, near enough. */
const LETTER = 8.4;

/** The name of the best: above its mark, or below it if fewer other marks are there. */
function BestName({ name, x, y, width, marks }: { name: string; x: number; y: number; width: number; marks: number[][] }) {
  const middle = inside(x, name, width);
  const covered = (from: number, to: number): number => marks.filter(([left, top]) => Math.abs(left - middle) < (name.length * LETTER) / 2 + 6 && top > from && top < to).length;
  const isBelow = covered(y - 32, y - 6) > covered(y + 6, y + 32);
  return <text class="best-text" x={middle} y={isBelow ? y + 23 : y - 13} text-anchor="middle">{name}</text>;
}

/** The middle of a text at x, or as near to it as the text is inside the plot. */
function inside(x: number, text: string, width: number): number {
  const half = (text.length * LETTER) / 2;
  return Math.max(Math.min(x, width - 6 - half), MARGIN.left + 4 + half);
}

interface MarkProps {
  candidate: Candidate;
  x: number;
  y: number;
  best: boolean;
  label: string;
  open: (candidate: Candidate) => void;
}

function Mark({ candidate, x, y, best, label, open }: MarkProps) {
  const colour = PLACEMENTS[String(candidate.placement)] ?? TONES.STEP.fill;
  const press = (event: KeyboardEvent): void => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open(candidate);
    }
  };
  return (
    <g class={best ? "mark best" : "mark"} role="button" tabindex={0} aria-label={label} onClick={() => open(candidate)} onKeyDown={press} data-testid="candidate">
      <title>{label}</title>
      <circle class="reach" cx={x} cy={y} r={12} />
      <circle cx={x} cy={y} r={best ? 8 : 5.5} fill={candidate.fits ? colour : "none"} stroke={colour} stroke-width={candidate.fits ? 1 : 1.5} />
    </g>
  );
}
