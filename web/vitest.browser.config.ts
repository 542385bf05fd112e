import { defineConfig } from "vitest/config";

// A browser per file, two files at a time; limits are generous, for the machine may be busy.
export default defineConfig({
  root: import.meta.dirname,
  test: {
    include: ["browser/**/*.test.ts"],
    globalSetup: ["browser/setup.ts"],
    environment: "node",
    minWorkers: 1,
    maxWorkers: 2,
    testTimeout: 120_000,
    hookTimeout: 120_000,
  },
});
