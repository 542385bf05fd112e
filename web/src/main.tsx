import { effect } from "@preact/signals";
import { render } from "preact";
import { App } from "./parts/App.tsx";
import { handle } from "./parts/handle.ts";
import { Stage } from "./parts/stage.ts";
import { Loader } from "./state/loader.ts";
import { PlanState } from "./state/plan.ts";
import { readPlan, setPlan } from "./state/planLink.ts";
import { proveChanges } from "./state/prover.ts";
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
const plan = new PlanState();

render(
  <StudioProvider value={studio}>
    <App loader={loader} themes={themes} stage={stage} plan={plan} />
  </StudioProvider>,
  document.getElementById("app")!,
);
plan.wanted.value = readPlan(new URLSearchParams(location.hash.slice(1)));
void loader.start(documents, location.hash).then(keepAddress);
handle(studio, stage);
proveChanges(studio);

/** What is shown and what is to be planned, as the part of the address after the #. */
function address(): string {
  const form = new URLSearchParams();
  setPlan(form, plan.wanted.value);
  return [encodeLink(studio.link()), form.toString()].filter(Boolean).join("&");
}

/** The address follows the state, and the state an address that the reader changes. */
function keepAddress(): void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const write = (): void => {
    const said = address();
    if (said !== location.hash.slice(1)) history.replaceState(null, "", said ? `#${said}` : location.pathname + location.search);
  };
  effect(() => {
    address();
    clearTimeout(timer);
    timer = setTimeout(write, 150);
  });
  window.addEventListener("hashchange", () => {
    if (location.hash.slice(1) === address()) return;
    plan.wanted.value = readPlan(new URLSearchParams(location.hash.slice(1)));
    void loader.start(documents, location.hash);
  });
}
