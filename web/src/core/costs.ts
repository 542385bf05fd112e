import type { Costs, PerAction, PerLink, PerRank, PerStage } from "./types.ts";

export class CostsError extends Error {}

const DEFAULTS: Costs = {
  f: 1,
  i: 1,
  w: 1,
  b: null,
  latency: 0,
  activation: 1,
  weight_stash: 0,
  kept: 0,
  kept_gradients: 0,
  overlap: 1,
  output: 0,
  bandwidth: null,
  contention: "independent",
  lanes: null,
  parameters: 0,
  shard: 0,
  unshard: 0,
  reduce: 0,
  optimizer: 0,
  host_latency: 0,
  host_bandwidth: null,
  host_link_shared: 1,
  s: 0,
  t: 0,
  broadcast: 0,
  combine: 0,
  logits: 0,
  rank_s: 1,
  rank_t: 1,
  rank_logits: 1,
};

/** Costs in which everything takes one and messages take nothing. */
export function defaultCosts(): Costs {
  return { ...DEFAULTS };
}

/** Costs with the fields that were left out; refuses names that are none. */
export function fullCosts(given: Partial<Costs>): Costs {
  for (const name of Object.keys(given)) if (!(name in DEFAULTS)) throw new CostsError(`there is no cost ${name}`);
  return { ...DEFAULTS, ...given };
}

/** The fields that differ from their defaults, as files hold them. */
export function plainCosts(costs: Costs): Partial<Costs> {
  const kept = Object.entries(costs).filter(([name, value]) => value !== DEFAULTS[name as keyof Costs]);
  return Object.fromEntries(kept) as Partial<Costs>;
}

/** The value of every stage. */
export function perStage(value: PerStage, stages: number, name: string): Float64Array {
  if (Array.isArray(value) && value.length !== stages) throw wrong(name, value.length, stages, "stages");
  return Float64Array.from({ length: stages }, (_, stage) => (Array.isArray(value) ? value[stage] : value));
}

/** The value of every stage and unit (microbatch, or slice of one): that of stage s and unit u stands at s * units + u. */
export function perAction(value: PerAction, stages: number, units: number, name: string): Float64Array {
  const made = new Float64Array(stages * units);
  if (!Array.isArray(value)) return made.fill(value);
  if (value.length !== stages) throw wrong(name, value.length, stages, "stages");
  value.forEach((row, stage) => {
    if (!Array.isArray(row)) made.fill(row, stage * units, (stage + 1) * units);
    else if (row.length !== units) throw wrong(`${name}[${stage}]`, row.length, units, "microbatches, or slices of them");
    else made.set(row, stage * units);
  });
  return made;
}

/** What a rank's share of the embedding (stage 0) or of the head takes or holds, as a multiple of the value that ranks have in common. */
export function perShare(value: PerRank, ranks: number, name: string): (rank: number, stage: number) => number {
  if (!Array.isArray(value)) return () => value;
  if (value.length !== ranks) throw wrong(name, value.length, ranks, "ranks");
  return (rank, stage) => {
    const own = value[rank];
    return Array.isArray(own) ? own[Math.min(stage, 1)] : own;
  };
}

/** The full backward: its own value, or the sum of its halves. */
export function backward(costs: Costs, stages: number, units: number): Float64Array {
  if (costs.b !== null) return perAction(costs.b, stages, units, "b");
  const [i, w] = [perAction(costs.i, stages, units, "i"), perAction(costs.w, stages, units, "w")];
  return i.map((value, at) => value + w[at]);
}

/** The value of the link from one rank to another. */
export function perLink<Value extends number | null>(value: PerLink<Value>, ranks: number, name: string): (from: number, to: number) => Value {
  if (!Array.isArray(value)) return () => value;
  if (value.length !== ranks) throw wrong(name, value.length, ranks, "ranks");
  return (from, to) => value[from][to];
}

function wrong(name: string, got: number, wanted: number, what: string): CostsError {
  return new CostsError(`${name} has ${got} values for ${wanted} ${what}: give one number or one each`);
}
