import type { Costs, PerAction, View } from "../core/index.ts";

/** What the sliders change: factors on the costs of a view, and the latency itself. */
export interface Adjust {
  f: number;
  i: number;
  w: number;
  /** The full backward, if it has a cost of its own. */
  b: number;
  /** Null leaves what the view has. */
  latency: number | null;
  /** Of a spread vocabulary: the cost itself where it is one number, a factor where it is one per stage; null leaves what the view has. */
  s: number | null;
  t: number | null;
  broadcast: number | null;
  combine: number | null;
  logits: number | null;
  /** Factors on single stages' times. */
  skew: Record<number, number>;
}

export const UNCHANGED: Adjust = { f: 1, i: 1, w: 1, b: 1, latency: null, s: null, t: null, broadcast: null, combine: null, logits: null, skew: {} };

const TIMES = ["f", "i", "w", "b"] as const;
/** The costs of a spread vocabulary. */
export const SPREAD = ["s", "t", "broadcast", "combine", "logits"] as const;
/** What grows with a microbatch, or a slice of one. */
const OF_A_UNIT = ["f", "i", "w", "b", "activation", "weight_stash", "kept", "kept_gradients", "output", ...SPREAD] as const;
/** What grows with a stage: its work and what it holds. Messages are as large however the model is cut. */
const OF_A_STAGE = ["f", "i", "w", "b", "activation", "weight_stash", "kept", "kept_gradients", "parameters", "shard", "unshard", "reduce", "optimizer"] as const;

export function isUnchanged(adjust: Adjust): boolean {
  return TIMES.every((name) => adjust[name] === 1) && [adjust.latency, ...SPREAD.map((name) => adjust[name])].every((value) => value === null) && Object.keys(adjust.skew).length === 0;
}

const MOST_FACTOR = 1e6;
const MOST_COST = 1e24;

/** What is so large or small that nothing could be drawn to scale, in words; null if all can be drawn. */
export function excess(adjust: Adjust): string | null {
  const factors: [string, number][] = [...TIMES.map((name): [string, number] => [name, adjust[name]]), ...Object.entries(adjust.skew)];
  const wrong = factors.find(([, factor]) => !fits(factor, MOST_FACTOR));
  if (wrong) return `${/^\d/.test(wrong[0]) ? "skew of stage " : ""}${wrong[0]} is ${wrong[1]}, beyond ${MOST_FACTOR}`;
  const large = (["latency", ...SPREAD] as const).find((name) => !fits(adjust[name] ?? 0, MOST_COST));
  return large === undefined ? null : `${large} is ${adjust[large]}, beyond ${MOST_COST}`;
}

function fits(value: number, most: number): boolean {
  return value === 0 || (value >= 1 / most && value <= most);
}

/** A view's costs with the sliders applied; the skew is told in stages of a model cut into `cuts`. */
export function adjusted(view: View, adjust: Adjust, cuts: number = view.stages): Costs {
  const factors = stageFactors(adjust.skew, cuts, view.stages);
  const made: Costs = { ...view.costs, latency: adjust.latency ?? view.costs.latency };
  for (const name of TIMES) {
    const value = view.costs[name];
    if (value !== null) made[name] = times(value, adjust[name], factors);
  }
  for (const name of SPREAD) {
    const [base, value] = [view.costs[name], adjust[name]];
    if (value !== null) made[name] = Array.isArray(base) ? multiplied(base, value) : value;
  }
  return made;
}

/** One factor per stage, or null if none differs. If the model is cut otherwise, each stage has the mean of the factors that it covers. */
export function stageFactors(skew: Record<number, number>, cuts: number, stages: number): number[] | null {
  const given = Object.entries(skew).filter(([stage, factor]) => Number(stage) < cuts && factor !== 1);
  if (!given.length) return null;
  const whole = Array.from({ length: cuts }, (_, stage) => skew[stage] ?? 1);
  return Array.from({ length: stages }, (_, stage) => mean(whole, (stage * cuts) / stages, ((stage + 1) * cuts) / stages));
}

function mean(values: number[], from: number, to: number): number {
  if (to - from === 1 && Number.isInteger(from)) return values[from];
  let sum = 0;
  for (let k = Math.floor(from); k < to; k++) sum += (Math.min(k + 1, to) - Math.max(k, from)) * values[k];
  return sum / (to - from);
}

function times(value: PerAction, factor: number, factors: number[] | null): PerAction {
  if (factors === null && factor === 1) return value;
  if (factors === null) return multiplied(value, factor);
  return factors.map((each, stage) => multiplied(Array.isArray(value) ? value[stage] : value, factor * each) as number | number[]);
}

function multiplied(value: PerAction, factor: number): PerAction {
  return Array.isArray(value) ? value.map((each) => multiplied(each, factor) as number | number[]) : value * factor;
}

/**
 * The same model cut into more or fewer stages per rank, and slices per microbatch: single numbers that grow with a stage or a slice are
 * divided among them. `stages` and `slices` are how many there were for each that there is now.
 */
export function shared(costs: Partial<Costs>, stages: number, slices = 1): Partial<Costs> {
  const made: Record<string, unknown> = { ...costs };
  for (const name of new Set([...OF_A_STAGE, ...OF_A_UNIT])) {
    const value = costs[name];
    const share = (isIn(OF_A_STAGE, name) ? stages : 1) * (isIn(OF_A_UNIT, name) ? slices : 1);
    if (typeof value === "number") made[name] = value * share;
  }
  return made as Partial<Costs>;
}

function isIn(names: readonly string[], name: string): boolean {
  return names.includes(name);
}

/** Whether a cost is one number for all stages, so that it can be given to a pipeline with other stages. */
export function isUniform(costs: Costs): boolean {
  return [...OF_A_STAGE, ...SPREAD, "output", "latency", "bandwidth", "lanes", "rank_s", "rank_t", "rank_logits"].every((name) => !Array.isArray(costs[name as keyof Costs]));
}

/** The middle of a cost over all stages, for a slider to show. */
export function meanOf(value: PerAction): number {
  if (!Array.isArray(value)) return value;
  return value.reduce<number>((sum, each) => sum + meanOf(each), 0) / Math.max(1, value.length);
}
