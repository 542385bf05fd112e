// Starts what the browser tests look at: the real server, and pages that were exported by the command.
import { spawn, type ChildProcess } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { TestProject } from "vitest/node";
import { findBrowser } from "./page.ts";
import { python, run } from "./penstock.ts";

declare module "vitest" {
  interface ProvidedContext {
    /** Where the servers listen: one for each file that runs at the same time, because a server makes one plan at a time. */
    studios: string[];
    /** A folder with the exported pages and the files to open. */
    folder: string;
  }
}

const LIMIT = 120_000;
/** Files that run at the same time. */
export const AT_ONCE = 2;

export default async function setup(project: TestProject): Promise<() => void> {
  const folder = mkdtempSync(join(tmpdir(), "penstock-page-"));
  // Files that run at the same time, in this run or another, must not start a browser that one of them is still unpacking.
  process.env.TMPDIR = folder;
  const command = ["-m", "penstock", "studio", "--port", "0", "--no-open"];
  const servers = Array.from({ length: AT_ONCE }, () => spawn(python(), command, { stdio: ["ignore", "pipe", "pipe"] }));
  const addresses = Promise.all(servers.map(listening));
  addresses.catch(() => undefined); // said below, if nothing else went wrong first
  const end = (): void => {
    for (const server of servers) server.kill("SIGINT");
    rmSync(folder, { recursive: true });
  };
  try {
    await findBrowser();
    run("prepare.py", folder);
    project.provide("studios", await addresses);
    project.provide("folder", folder);
  } catch (error) {
    end();
    throw error;
  }
  return end;
}

/** The address that the server says it listens at. */
function listening(server: ChildProcess): Promise<string> {
  return new Promise((done, failed) => {
    let said = "";
    const timer = setTimeout(() => failed(new Error(`the server does not start: ${said}`)), LIMIT);
    const read = (part: Buffer): void => {
      said += part.toString();
      const found = /http:\/\/[^\s/]+:\d+\//.exec(said);
      if (!found) return;
      clearTimeout(timer);
      done(found[0]);
    };
    server.stdout!.on("data", read);
    server.stderr!.on("data", read);
    server.on("exit", (code) => failed(new Error(`the server ended with ${code}: ${said}`)));
  });
}
