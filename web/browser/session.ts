import type { Browser, BrowserContextOptions, Page } from "playwright-core";
import { afterAll, afterEach, beforeAll, expect, inject } from "vitest";
import { launch, open, type Watched } from "./page.ts";

/** Where the server listens that no other file uses at the same time. */
export function studio(): string {
  const addresses = inject("studios");
  return addresses[(Number(process.env.VITEST_POOL_ID ?? 1) - 1) % addresses.length];
}

/** One browser for the tests of a file, and a page of its own for each; whatever goes wrong on a page fails its test. */
export class Session {
  private browser: Browser | null = null;
  private now: Watched | null = null;

  constructor() {
    beforeAll(async () => {
      this.browser = await launch();
    });
    afterAll(() => this.browser?.close());
    afterEach(() => this.close());
  }

  async open(address: string, options: BrowserContextOptions = {}): Promise<Page> {
    await this.close();
    this.now = await open(this.browser!, address, options);
    return this.now.page;
  }

  get requests(): string[] {
    return this.now?.requests ?? [];
  }

  private async close(): Promise<void> {
    const { now } = this;
    this.now = null;
    expect(now?.faults ?? []).toEqual([]);
    await now?.page.context().close();
  }
}
