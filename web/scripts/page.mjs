// Builds the page that ships with the Python package, or with --check says whether the one there is what the source makes.
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { build } from "vite";

const target = fileURLToPath(new URL("../../src/penstock/studio/page.html", import.meta.url));
const most = 400_000;

const made = await build({ configFile: fileURLToPath(new URL("../vite.config.ts", import.meta.url)), logLevel: "warn", build: { write: false } });
const html = made.output.find((item) => item.fileName.endsWith(".html")).source;
const bytes = Buffer.byteLength(html);
if (bytes > most) throw new Error(`the page has ${bytes} bytes, more than ${most}`);
if (!process.argv.includes("--check")) {
  await writeFile(target, html);
  console.log(`${bytes} bytes written to ${target}`);
} else if ((await readFile(target, "utf8").catch(() => "")) !== html) {
  console.error(`${target} is not what the source makes: run \`npm run build\` in web/ and commit it`);
  process.exitCode = 1;
} else {
  console.log(`the page matches its source, ${bytes} bytes`);
}
