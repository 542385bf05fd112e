import { effect } from "@preact/signals";
import { render } from "preact";
import { App } from "./parts/App.tsx";
import { handle } from "./parts/handle.ts";
import { Stage } from "./parts/stage.ts";
import { Loader } from "./state/loader.ts";
import { PlanState } from "./state/plan.ts";
import { lacksCluster, readPlan, setPlan } from "./state/planLink.ts";
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
takeForm();
void loader.start(documents, location.hash).then(carryCluster).then(keepAddress);
handle(studio, stage);
proveChanges(studio);

/** The plan's form as the address has it. */
function takeForm(): void {
  const said = new URLSearchParams(location.hash.slice(1));
  plan.wanted.value = readPlan(said);
  void plan.readCluster();
  if (lacksCluster(said)) studio.say("The link was made with a cluster that is too long for it: open the cluster's file again before you plan.", "error");
}

/** The cluster that the studio was started with is the one to plan for, unless the address has another. */
function carryCluster(): void {
  const given = studio.given.value.find((view) => view.cluster !== null)?.cluster;
  const said = new URLSearchParams(location.hash.slice(1));
  if (given && !studio.offline && !said.has("plan.cluster") && !lacksCluster(said)) void plan.takeCluster(given);
}

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
    takeForm();
    void loader.start(documents, location.hash);
  });
}
