import { effect } from "@preact/signals";
import { render } from "preact";
import { App } from "./parts/App.tsx";
import { handle } from "./parts/handle.ts";
import { Stage } from "./parts/stage.ts";
import { Loader } from "./state/loader.ts";
import { PlanState } from "./state/plan.ts";
import { Studio, StudioProvider } from "./state/studio.ts";
import { Themes } from "./state/theme.ts";
import { encodeLink } from "./state/url.ts";
import "./styles/base.css";
import "./styles/page.css";
import "./styles/parts.css";
import "./styles/plan.css";

const place = document.getElementById("penstock-documents")!;
const documents = JSON.parse(place.textContent ?? "null") as unknown[] | null;
const studio = new Studio(!place.hasAttribute("data-server"));
const loader = new Loader(studio);
const themes = new Themes();
const stage = new Stage(studio, themes);

render(
  <StudioProvider value={studio}>
    <App loader={loader} themes={themes} stage={stage} plan={new PlanState()} />
  </StudioProvider>,
  document.getElementById("app")!,
);
void loader.start(documents, location.hash).then(keepAddress);
handle(studio, stage);

/** The address follows the state, and the state an address that the reader changes. */
function keepAddress(): void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const write = (): void => {
    const said = encodeLink(studio.link());
    if (said !== location.hash.slice(1)) history.replaceState(null, "", said ? `#${said}` : location.pathname + location.search);
  };
  effect(() => {
    studio.link();
    clearTimeout(timer);
    timer = setTimeout(write, 150);
  });
  window.addEventListener("hashchange", () => {
    if (location.hash.slice(1) !== encodeLink(studio.link())) void loader.start(documents, location.hash);
  });
}
