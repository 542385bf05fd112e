// The plan's form in an address: the fields that are not as usual.
import { SHAPE, USUAL, type Shape, type Wanted } from "./plan.ts";

const OWN = ["ranks", "microbatches", "limit", "seconds"] as const;
const SIZES = Object.keys(SHAPE).filter((name): name is Exclude<keyof Shape, "gated"> => name !== "gated");
/** Letters of a profile that an address holds. */
const MOST_PROFILE = 2000;
/** Letters of a cluster. */
const MOST_CLUSTER = 4000;
/** Letters of any other field. */
const MOST_FIELD = 40;

/** Whether the profile has room in a link. */
function isWhole(wanted: Wanted): boolean {
  return wanted.profile.length <= MOST_PROFILE;
}

export function setPlan(said: URLSearchParams, wanted: Wanted): void {
  const set = (name: string, value: string, usual: string): void => void (value !== usual && said.set(`plan.${name}`, value));
  set("model", wanted.model, USUAL.model);
  for (const name of OWN) set(name, wanted[name], USUAL[name]);
  for (const name of SIZES) set(name, wanted.shape[name], SHAPE[name]);
  set("recompute", wanted.recompute ? "1" : "0", "0");
  set("gated", wanted.shape.gated ? "1" : "0", SHAPE.gated ? "1" : "0");
  if (isWhole(wanted)) set("profile", wanted.profile, "");
  if (wanted.cluster.length <= MOST_CLUSTER) set("cluster", wanted.cluster, "");
  else said.set("plan.without", "cluster");
}

/** Whether a link was made with a cluster that had no room in it. */
export function lacksCluster(said: URLSearchParams): boolean {
  return said.get("plan.without") === "cluster";
}

/** The reverse; what is not there or cannot be is as usual. */
export function readPlan(said: URLSearchParams): Wanted {
  const text = (name: string, usual: string, most = MOST_FIELD): string => {
    const found = said.get(`plan.${name}`);
    return found !== null && found.length <= most ? found : usual;
  };
  const shape: Shape = { ...SHAPE, gated: text("gated", SHAPE.gated ? "1" : "0") === "1" };
  for (const name of SIZES) shape[name] = text(name, SHAPE[name]);
  const made: Wanted = { ...USUAL, shape, model: text("model", USUAL.model) === "profile" ? "profile" : "transformer", profile: text("profile", "", MOST_PROFILE), recompute: text("recompute", "0") === "1", cluster: text("cluster", "", MOST_CLUSTER) };
  for (const name of OWN) made[name] = text(name, USUAL[name]);
  return made;
}
