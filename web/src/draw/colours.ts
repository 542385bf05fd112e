// The colours of Okabe and Ito for kinds and a ramp from blue to yellow for microbatches: both stay apart for people who
// do not see red and green as two colours. They are those of the pictures that the Python package draws.

export interface Tone {
  sample: string;
  means: string;
  fill: string;
}

export const TONES = {
  F: { sample: "F", means: "forward", fill: "#0072b2" },
  B: { sample: "B", means: "full backward", fill: "#d55e00" },
  I: { sample: "I", means: "backward for the input", fill: "#e69f00" },
  W: { sample: "W", means: "backward for the weights", fill: "#009e73" },
  S: { sample: "S", means: "share of the vocabulary: logits or embeddings", fill: "#8844ee" },
  T: { sample: "T", means: "weight gradients of the share", fill: "#bbffaa" },
  MEET: { sample: "collective", means: "collectives of all ranks", fill: "#663311" },
  SEND: { sample: "message", means: "message on its way", fill: "#56b4e9" },
  GRADIENT: { sample: "message", means: "gradients on their way", fill: "#c9a26b" },
  OUT: { sample: "copy", means: "activations copied to the host", fill: "#aa4477" },
  BACK: { sample: "copy", means: "activations copied back", fill: "#dd99bb" },
  SHARD: { sample: "collective", means: "parameters gathered, gradients reduced", fill: "#f0e442" },
  STEP: { sample: "step", means: "optimizer's step", fill: "#777777" },
} satisfies Record<string, Tone>;

const KIND_FILLS: Record<string, string> = { F: TONES.F.fill, B: TONES.B.fill, I: TONES.I.fill, W: TONES.W.fill, S: TONES.S.fill, T: TONES.T.fill };
// The share of white in the first and the last chunk, or of black if negative: kinds whose hues look alike to some readers differ in lightness.
const DARKER = [-0.45, 0];
const LIGHTER = [0, 0.5];
const SHADES: Record<string, number[]> = { F: DARKER, B: DARKER, I: LIGHTER, W: LIGHTER };
const RAMP = ["#00306f", "#2d4a78", "#55626f", "#7b7b78", "#a09575", "#cab36b", "#fdd84a"];

/** Black or white, whichever reads better on the fill. */
export function inkOn(fill: string): string {
  return luminance(fill) > 0.179 ? "#000000" : "#ffffff";
}

/** The colour with so much white in it, or black where that is negative. */
export function mixed(colour: string, white: number): string {
  const share = Math.abs(white);
  const other = white > 0 ? 255 : 0;
  return hex(rgb(colour).map((c) => c * (1 - share) + other * share));
}

/** So much of the second colour in the first. */
export function blended(one: string, other: string, share: number): string {
  const [from, to] = [rgb(one), rgb(other)];
  return hex(from.map((c, k) => c + (to[k] - c) * share));
}

/** A collective of all ranks, lighter than in other pictures because its lane is thin and may be on dark paper: a BROADCAST is darker, a COMBINE lighter. */
export function meetingFill(kind: string): string {
  return mixed(TONES.MEET.fill, kind === "BROADCAST" ? 0.15 : 0.55);
}

/** One of a rank's chunks: the first the darkest, the last the lightest. A share of the vocabulary belongs to no chunk. */
export function chunkFill(kind: string, chunk: number, chunks: number): string {
  const fill = KIND_FILLS[kind] ?? TONES.STEP.fill;
  if (chunks < 2 || !SHADES[kind]) return fill;
  const [first, last] = SHADES[kind];
  return mixed(fill, first + ((last - first) * chunk) / (chunks - 1));
}

/** A colour of the ramp, from 0 to 1. */
export function rampFill(share: number): string {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  const [from, to] = [rgb(RAMP[low]), rgb(RAMP[low + 1])];
  return hex(from.map((c, k) => c + (to[k] - c) * (place - low)));
}

/** A microbatch's place on the ramp; neighbours differ in lightness too, so that they can be told apart. */
export function microbatchFill(microbatch: number, microbatches: number): string {
  const made = rampFill(microbatches < 2 ? 0 : microbatch / (microbatches - 1));
  return microbatch % 2 ? mixed(made, 0.16) : made;
}

function luminance(colour: string): number {
  const [r, g, b] = rgb(colour).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

export function rgb(colour: string): number[] {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

export function hex(parts: number[]): string {
  return "#" + parts.map((c) => Math.round(c).toString(16).padStart(2, "0")).join("");
}

/** What a picture is drawn with besides the fills of actions. */
export interface Paper {
  paper: string;
  band: string;
  line: string;
  faint: string;
  ink: string;
  soft: string;
  accent: string;
  needs: string;
  alarm: string;
  memory: string;
  memoryLine: string;
  idle: string;
  /** Actions of a recorded run: as predicted, longer, shorter. */
  same: string;
  late: string;
  early: string;
}

export const LIGHT: Paper = {
  paper: "#ffffff",
  band: "#f6f7f9",
  line: "#e3e6ea",
  faint: "#eef0f3",
  ink: "#1b2430",
  soft: "#5b6675",
  accent: "#0b5cad",
  needs: "#9c2f74",
  alarm: "#b3261e",
  memory: "#c9d2ea",
  memoryLine: "#4f63a6",
  idle: "#f1f2f5",
  same: "#aab3c0",
  late: "#c2410c",
  early: "#2563c9",
};

export const DARK: Paper = {
  paper: "#12161c",
  band: "#181e26",
  line: "#2a323d",
  faint: "#1e2530",
  ink: "#e8ecf2",
  soft: "#9aa6b5",
  accent: "#7cc0ff",
  needs: "#f0a5d3",
  alarm: "#ff8a80",
  memory: "#2c3a5c",
  memoryLine: "#93a8e8",
  idle: "#1a2029",
  same: "#5d6878",
  late: "#ff9a62",
  early: "#7fb2ff",
};
