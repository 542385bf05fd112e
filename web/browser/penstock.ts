import { execFileSync } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

/** The interpreter that has Penstock: the one that make names, or that of the repository's environment. */
export function python(): string {
  const own = fileURLToPath(new URL("../../.venv/bin/python", import.meta.url));
  return process.env.PENSTOCK_PYTHON ?? (existsSync(own) ? own : "python3");
}

/** Runs a script of this folder; what it prints. */
export function run(script: string, ...args: string[]): string {
  return execFileSync(python(), [fileURLToPath(new URL(script, import.meta.url)), ...args], { encoding: "utf8" });
}

export interface Figures {
  makespan: number;
  bubble: number;
  peak: number;
  messages: number;
}

export type Timed = "zbv" | "moved" | "skewed" | "half" | "1f1b" | "chunked" | "sharded" | "auto" | "offload" | "spread" | "slower";

export interface Found {
  rule: string;
  rank: number;
  step: number;
  message: string;
}

/** What the library says, as `prepare.py` has written it. */
export function expected(folder: string): Record<Timed, Figures> & { findings: Found[] } {
  return JSON.parse(readFileSync(join(folder, "expected.json"), "utf8")) as Record<Timed, Figures> & { findings: Found[] };
}
