import type { Plugin } from "vite";

/** Puts the built script and styles into the HTML, so that the page is one file. */
export function inline(): Plugin {
  return {
    name: "inline",
    enforce: "post",
    apply: "build",
    generateBundle(_options, bundle) {
      const html = Object.values(bundle).find((item) => item.fileName.endsWith(".html"));
      if (html?.type !== "asset") throw new Error("the build made no HTML");
      let text = String(html.source);
      for (const item of Object.values(bundle)) {
        if (item === html) continue;
        text = item.type === "chunk" ? withScript(text, item.fileName, item.code) : withStyles(text, item.fileName, String(item.source));
        delete bundle[item.fileName];
      }
      html.source = text;
    },
  };
}

/** The script goes to the end of the body, for it needs what stands there. */
function withScript(html: string, name: string, code: string): string {
  const tag = new RegExp(`<script[^>]*src="[^"]*${name}"[^>]*></script>`);
  const safe = code.trim().replace(/<\/script/g, "<\\/script").replace(/<!--/g, "<\\!--");
  return replaced(html, tag, "").replace("</body>", () => `<script type="module">${safe}</script>\n</body>`);
}

function withStyles(html: string, name: string, code: string): string {
  return replaced(html, new RegExp(`<link[^>]*href="[^"]*${name}"[^>]*>`), `<style>${code.trim()}</style>`);
}

function replaced(html: string, tag: RegExp, by: string): string {
  if (!tag.test(html)) throw new Error(`the HTML has no ${tag}`);
  return html.replace(tag, () => by);
}
