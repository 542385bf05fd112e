import { defineConfig } from "vite";
import { inline } from "./scripts/inline.ts";

// One file without requests of its own: script and styles stand in the HTML, names carry no hashes of the machine.
export default defineConfig({
  root: import.meta.dirname,
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    assetsInlineLimit: Number.MAX_SAFE_INTEGER,
    reportCompressedSize: false,
    rollupOptions: { output: { inlineDynamicImports: true, entryFileNames: "page.js", assetFileNames: "page.[ext]" } },
  },
  plugins: [inline()],
});
