const UNITS: Record<string, number> = { "": 1, B: 1 };
["K", "M", "G", "T", "P"].forEach((letter, k) => {
  UNITS[`${letter}B`] = 1000 ** (k + 1);
  UNITS[`${letter}iB`] = 1024 ** (k + 1);
});

/** A number as it is, or a text like 40GiB in bytes; undefined for what is neither. */
export function readSize(text: string): number | undefined {
  const match = /^\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z]*)\s*$/i.exec(text);
  if (!match || !(match[2] in UNITS)) return undefined;
  const value = Number(match[1]) * UNITS[match[2]];
  return Number.isFinite(value) ? value : undefined;
}
