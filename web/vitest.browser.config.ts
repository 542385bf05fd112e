import { defineConfig } from "vitest/config";

// One browser for all files, one after the other; limits are generous, for the machine may be busy.
export default defineConfig({
  root: import.meta.dirname,
  test: {
    include: ["browser/**/*.test.ts"],
    globalSetup: ["browser/setup.ts"],
    environment: "node",
    fileParallelism: false,
    testTimeout: 120_000,
    hookTimeout: 120_000,
  },
});
