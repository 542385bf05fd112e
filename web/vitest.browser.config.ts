import { defineConfig } from "vitest/config";
import { AT_ONCE } from "./browser/setup.ts";

// A browser per file, some files at a time; limits are generous, for the machine may be busy.
export default defineConfig({
  root: import.meta.dirname,
  test: {
    include: ["browser/**/*.test.ts"],
    globalSetup: ["browser/setup.ts"],
    environment: "node",
    minWorkers: 1,
    maxWorkers: AT_ONCE,
    testTimeout: 120_000,
    hookTimeout: 120_000,
  },
});
