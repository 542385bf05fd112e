import { defineConfig } from "vitest/config";

export default defineConfig({
  root: import.meta.dirname,
  esbuild: { jsx: "automatic", jsxImportSource: "preact" },
  test: { include: ["tests/**/*.test.ts"], environment: "node" },
});
