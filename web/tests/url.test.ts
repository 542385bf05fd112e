import { describe, expect, test } from "vitest";
import { pack, unpack } from "../src/state/packed.ts";
import { SHAPE, USUAL, type Wanted } from "../src/state/plan.ts";
import { lacksCluster, readPlan, setPlan } from "../src/state/planLink.ts";
import { decodeLink, encodeLink, PLAIN, type LinkState, type Option } from "../src/state/url.ts";
import { random } from "./pipeline.ts";

function anyState(seed: number): LinkState {
  const next = random(seed);
  const maybe = <Value>(value: Value): Value | null => (next() < 0.5 ? value : null);
  const pick = <Value>(...values: Value[]): Value => values[Math.floor(next() * values.length)];
  const round = (value: number): number => Number(value.toPrecision(5));
  const options = (): Record<string, Option> => (next() < 0.5 ? {} : { depth: 3, "odd name&=#": "a b+c%", flag: true, text: "3x" });
  const from = Math.floor(next() * 9000) / 10000;
  const first = { schedule: pick("1f1b", "interleaved-1f1b"), ranks: 8, microbatches: 33, chunks: maybe(2), options: options(), form: pick("schedule", "program", "sharded"), offload: pick("", "50", "100+50+0") } as const;
  return {
    tab: pick("timeline", "plan"),
    first: maybe(first),
    second: maybe({ schedule: "zb-h1", chunks: maybe(4), options: options() }),
    file: maybe({ name: "a file, with comma.csv", content: "AbC-_9" }),
    given: maybe<[number, number]>([2, pick(-1, 0, 5)]),
    costs: {},
    limit: maybe(round(next() * 100)),
    adjust: { f: round(next() * 4), i: 1, w: round(next() * 4), b: 1, latency: maybe(round(next())), s: maybe(round(next())), t: maybe(2), broadcast: maybe(0), combine: maybe(round(next())), logits: maybe(round(next())), skew: next() < 0.5 ? {} : { 3: 1.5, 0: 0.25 } },
    colourBy: pick("kind", "microbatch"),
    messages: next() < 0.5,
    memory: next() < 0.5,
    path: next() < 0.5,
    span: maybe<[number, number]>([from, from + 0.05]),
    edits: pick("", "m0.3.5_s1.2"),
    selected: maybe({ panel: 1, rank: 3, step: 12 }),
  };
}

describe("links", () => {
  test.each(Array.from({ length: 200 }, (_, seed) => seed))("a state comes back from its link (%i)", (seed) => {
    const state = anyState(seed);
    const back = decodeLink(`#${encodeLink(state)}`);
    expect({ ...back, span: null }).toEqual({ ...state, span: null });
    if (state.span) for (const end of [0, 1]) expect(back.span![end]).toBeCloseTo(state.span[end], 5);
  });

  test("costs travel with a schedule", () => {
    const first = { schedule: "zbv", ranks: 2, microbatches: 4, chunks: null, options: {}, form: "schedule", offload: "" } as const;
    const state = { ...PLAIN, first, costs: { f: 2, activation: [1, 2, 3, 4] } };
    expect(decodeLink(encodeLink(state))).toEqual(state);
  });

  test("what is as usual takes no room", () => {
    expect(encodeLink(PLAIN)).toBe("");
    expect(decodeLink("")).toEqual(PLAIN);
  });

  test.each(["#%%%", "#p=-1&m=x&s=", "#s=zbv", "#s=zbv&p=1e999&m=4", "#skew=a:b,,:,3:", "#z=0.9,0.1", "#z=5,6", "#sel=1.2", "#sel=a.b.c", "#costs={", '#costs={"g":1}', "#f=-3&latency=NaN"])(
    "a broken link shows the page as usual (%s)",
    (hash) => expect(decodeLink(hash)).toEqual(PLAIN),
  );

  test("any text at all is read", () => {
    const next = random(9);
    for (let k = 0; k < 500; k++) {
      const text = Array.from({ length: 30 }, () => String.fromCharCode(32 + Math.floor(next() * 95))).join("");
      expect(() => decodeLink(`#${text}&skew=${text}&z=${text}&sel=${text}`)).not.toThrow();
    }
  });
});

describe("the plan's form", () => {
  const there = (wanted: Wanted): Wanted => {
    const said = new URLSearchParams();
    setPlan(said, wanted);
    return readPlan(new URLSearchParams(said.toString()));
  };

  test("a cluster that is too long for a link is missed by whoever opens it", () => {
    const said = new URLSearchParams();
    setPlan(said, { ...USUAL, cluster: "#".repeat(5000) });
    expect(said.toString().length).toBeLessThan(100);
    expect([readPlan(said), lacksCluster(said), lacksCluster(new URLSearchParams())]).toEqual([USUAL, true, false]);
  });

  test("it comes back, and takes no room where it is as usual", () => {
    const said = new URLSearchParams();
    setPlan(said, USUAL);
    expect(said.toString()).toBe("");
    const wanted: Wanted = { ...USUAL, cluster: "[[devices]]\nname = 'a&b#'", model: "profile", profile: '{"layers": [&#+]}', ranks: "3", limit: "", shape: { ...SHAPE, gated: false, hidden: "x y" } };
    expect(there(wanted)).toEqual(wanted);
  });

  test("a long profile is left out", () => expect(there({ ...USUAL, profile: "x".repeat(2001) })).toEqual(USUAL));
});

describe("files in links", () => {
  test("a text comes back", async () => {
    const text = "0F0,0F1,,0B0\n".repeat(200) + "ünïcode ✓";
    const packed = await pack(text);
    expect(packed).toMatch(/^[A-Za-z0-9_-]+$/);
    expect(packed!.length).toBeLessThan(text.length / 4);
    expect(await unpack(packed!)).toBe(text);
  });

  test.each(["!!!", "AAAA", "AbC-_9"])("a broken link is said to be so (%s)", async (packed) => {
    await expect(unpack(packed)).rejects.toThrow("The link is broken");
  });

  test("what is too long is not packed", async () => {
    const next = random(3);
    const noise = Array.from({ length: 60_000 }, () => String.fromCharCode(33 + Math.floor(next() * 90))).join("");
    expect(await pack(noise)).toBeNull();
  });
});
