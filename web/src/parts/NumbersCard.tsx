import { figure, percent, signed, timeText } from "../draw/span.ts";
import type { Target } from "../draw/target.ts";
import { linkRows } from "../state/linkRows.ts";
import { firstParting, latenessOfRanks, lengthsByWork } from "../state/lateness.ts";
import { largestDifferences } from "../state/differences.ts";
import type { Shown } from "../state/shown.ts";
import { type Studio, useStudio } from "../state/studio.ts";
import { CAUSES } from "../state/words.ts";
import type { Cause, Device } from "../core/index.ts";
import { change, idle, size, time } from "./Tiles.tsx";

interface Figure {
  name: string;
  of: (shown: Shown) => number;
  text: (value: number, shown: Shown) => string;
  share?: boolean;
  /** Whether it says anything of a timeline; it always does if left out. */
  shown?: (shown: Shown) => boolean;
}

const FIGURES: Figure[] = [
  { name: "makespan", of: (shown) => shown.numbers.makespan, text: time },
  { name: "bubble", of: (shown) => shown.numbers.bubble, text: percent, share: true },
  { name: "bubble of the longest span", of: (shown) => shown.numbers.spanBubble, text: percent, share: true },
  { name: "peak memory", of: (shown) => shown.numbers.peak, text: size },
  { name: "peak host memory", of: (shown) => hostPeak(shown), text: size, shown: (shown) => shown.memory.host !== null },
  { name: "messages", of: (shown) => shown.numbers.messages, text: figure },
  { name: "size of all messages", of: (shown) => shown.numbers.bytes, text: size },
  { name: "idle, all ranks", of: idle, text: time },
];

/** The most that the host holds of any rank. */
function hostPeak(shown: Shown): number {
  return Math.max(0, ...(shown.memory.host ?? []).map((curve) => curve.peak));
}

/** Every figure as a table: of one timeline, or of two and their difference. Of a recorded run, where it differs comes first. */
export function NumbersCard({ go }: { go: (target: Target) => void }) {
  const studio = useStudio();
  const panels = studio.rested.value;
  if (!panels.length || panels.some((shown) => !shown.timed)) return null;
  return (
    <>
      {panels[0].beside && <Lateness predicted={panels[0]} measured={panels[0].beside} go={go} />}
      <section class="card numbers" aria-labelledby="numbers-title">
        <h2 id="numbers-title">{panels.length > 1 ? "Differences" : "Numbers"}</h2>
        {panels.length > 1 && (
          <p class="quiet small">
            {panels[0].beside ? "predicted" : "above"}: {panels[0].beside ? panels[0].view.title : panels[0].label}
            <br />
            {panels[0].beside ? "measured" : "below"}: {panels[0].beside ? measuredName(studio, panels[1]) : panels[1].label}
          </p>
        )}
        <div class="wide">
          <FigureTable panels={panels} />
        </div>
        {panels.length > 1 ? (
          <RankDifferences panels={panels} />
        ) : (
          <>
            <h3>Rank by rank</h3>
            <div class="wide"><RankTable shown={panels[0]} /></div>
            {panels[0].view.devices && <Devices devices={panels[0].view.devices} />}
            <Links shown={panels[0]} />
          </>
        )}
      </section>
    </>
  );
}

/** Where measured times come from: the file that was laid over the schedule, and what it says of itself. */
function measuredName(studio: Studio, measured: Shown): string {
  const { source } = measured.timing;
  const name = studio.recording.value?.name;
  return name === undefined ? source : source === "measured" ? name : `${name}, ${source}`;
}

function FigureTable({ panels }: { panels: Shown[] }) {
  const causes = (Object.keys(CAUSES) as Cause[]).filter((cause) => panels.some((shown) => shown.numbers.idle[cause] > 0));
  const figures = FIGURES.filter(({ shown: says }) => !says || panels.some(says));
  const rows: Figure[] = [...figures, ...causes.map((cause) => ({ name: `idle: ${CAUSES[cause]}`, of: (shown: Shown) => shown.numbers.idle[cause], text: time }))];
  return (
    <table data-testid="figures">
      <caption class="unseen">Figures</caption>
      <thead>
        <tr>
          <th scope="col">figure</th>
          {panels.map((shown, k) => <th key={k} scope="col">{panels.length > 1 ? <Head label={shown.label} place={placeOf(panels, k)} /> : "value"}</th>)}
          {panels.length > 1 && <th scope="col">difference</th>}
        </tr>
      </thead>
      <tbody>
        {rows.map(({ name, of, text, share }) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            {panels.map((shown, k) => <td key={k}>{text(of(shown), shown)}</td>)}
            {panels.length > 1 && <td>{change(of(panels[0]), of(panels[1]), !share)}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** What a column is of: one of two panels, or of a prediction and the run beside it. */
function placeOf(panels: Shown[], k: number): string {
  return panels[0].beside ? (k ? "measured" : "predicted") : k ? "below" : "above";
}

/** Letters of a label that has room in a narrow column. */
const SHORT = 10;

/** A panel's label, or its place if the card has no room for it. */
function Head({ label, place }: { label: string; place: string }) {
  if (label.length <= SHORT) return <>{label}</>;
  return (
    <>
      <span class="full">{label}</span>
      <span class="brief">{place}</span>
    </>
  );
}

function RankTable({ shown }: { shown: Shown }) {
  const { numbers, memory, view } = shown;
  return (
    <table data-testid="ranks">
      <caption class="unseen">Rank by rank</caption>
      <thead>
        <tr>
          {["rank", "stages", "busy", "idle", "peak memory", memory.host ? "on the host" : "at"].map((name) => <th key={name} scope="col">{name}</th>)}
        </tr>
      </thead>
      <tbody>
        {numbers.busy.map((busy, rank) => (
          <tr key={rank}>
            <th scope="row">{rank}</th>
            <td>{stagesOf(view.copies, rank)}</td>
            <td>{shown.time(busy)}</td>
            <td>{percent(numbers.makespan ? 1 - busy / numbers.makespan : 0)}</td>
            <td>{shown.size(numbers.peaks[rank])}</td>
            <td>{memory.host ? shown.size(memory.host[rank].peak) : shown.time(memory.ranks[rank].peakTime)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** What each rank runs on. */
function Devices({ devices }: { devices: Device[] }) {
  return (
    <>
      <h3>Devices</h3>
      <div class="wide">
        <table data-testid="devices">
          <caption class="unseen">Devices</caption>
          <thead>
            <tr>{["rank", "device", "node", "speed"].map((name) => <th key={name} scope="col">{name}</th>)}</tr>
          </thead>
          <tbody>
            {devices.map(({ name, node, speed }, rank) => (
              <tr key={rank}>
                <th scope="row">{rank}</th>
                <td>{name || "–"}</td>
                <td>{node || "–"}</td>
                <td>{speed}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

/** The links that messages take, if they differ. */
function Links({ shown }: { shown: Shown }) {
  const rows = linkRows(shown);
  if (!rows.length) return null;
  return (
    <>
      <h3>Links</h3>
      <div class="wide">
        <table data-testid="links">
          <caption class="unseen">Links</caption>
          <thead>
            <tr>{["link", "latency", "bandwidth", "messages", "shared with"].map((name) => <th key={name} scope="col">{name}</th>)}</tr>
          </thead>
          <tbody>
            {rows.map(({ name, latency, bandwidth, messages, shared, slow }) => (
              <tr key={name}>
                <th scope="row">{name}{slow && <small class="slow"> slow</small>}</th>
                <td>{timeText(latency, shown.view.units.time)}</td>
                <td>{bandwidth === null ? "unlimited" : `${shown.size(bandwidth)}${shown.view.units.time ? `/${shown.view.units.time}` : ""}`}</td>
                <td>{messages}</td>
                <td>{shared || "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function stagesOf(copies: number[][], rank: number): string {
  const found = [...new Set(copies.flatMap((copy) => copy.flatMap((owner, stage) => (owner === rank ? [stage] : []))))];
  return found.length > 6 ? `${found.slice(0, 5).join(", ")}, …` : found.join(", ");
}

/** What is compared of each rank of two timelines. */
const OF_RANKS: { name: string; of: (shown: Shown, rank: number) => number; text: (value: number, shown: Shown) => string; relative: boolean }[] = [
  { name: "Peak memory", of: (shown, rank) => shown.numbers.peaks[rank], text: size, relative: true },
  { name: "Idle time", of: (shown, rank) => 1 - shown.numbers.busy[rank] / shown.numbers.makespan, text: percent, relative: false },
];

function RankDifferences({ panels }: { panels: Shown[] }) {
  const ranks = Math.max(...panels.map((shown) => shown.view.ranks));
  const has = (shown: Shown, rank: number): boolean => rank < shown.view.ranks;
  return (
    <>
      {OF_RANKS.map(({ name, of, text, relative }) => (
        <div key={name} class="rank-differences">
          <h3>{name}, rank by rank</h3>
          <div class="wide">
            <table>
              <caption class="unseen">{name}, rank by rank</caption>
              <thead>
                <tr>
                  <th scope="col">rank</th>
                  {panels.map((_, k) => <th key={k} scope="col">{placeOf(panels, k)}</th>)}
                  <th scope="col">difference</th>
                </tr>
              </thead>
              <tbody>
                {Array.from({ length: ranks }, (_, rank) => (
                  <tr key={rank}>
                    <th scope="row">{rank}</th>
                    {panels.map((shown, k) => <td key={k}>{has(shown, rank) ? text(of(shown, rank), shown) : "–"}</td>)}
                    <td>{panels.every((shown) => has(shown, rank)) ? change(of(panels[0], rank), of(panels[1], rank), relative) : "–"}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </div>
      ))}
    </>
  );
}

const FEW = 8;

/** Where a measured run parts from its prediction, and which work takes longer. */
function Lateness({ predicted, measured, go }: { predicted: Shown; measured: Shown; go: (target: Target) => void }) {
  const select = (node: number): void => go({ what: "measured", panel: 0, index: node });
  const parting = firstParting(predicted, measured);
  const late = latenessOfRanks(predicted, measured);
  const largest = largestDifferences(predicted);
  return (
    <section class="card numbers" aria-labelledby="lateness-title" data-testid="lateness">
      <h2 id="lateness-title">Predicted against measured</h2>
      <h3>The {largest.length === 10 ? "ten " : ""}largest differences</h3>
      {largest.length === 0 && <p>Every action takes as long, and waits as long, as predicted.</p>}
      <ol class="differences" data-testid="differences">
        {largest.map((each, k) => (
          <li key={k}>
            <button class="plain" onClick={() => select(each.node)}>{each.action}</button> on rank {each.rank}{" "}
            <strong class={each.adds > 0 ? "late" : "early"}>{signed(each.adds, measured.time)}</strong>: {each.cause}
          </li>
        ))}
      </ol>
      {parting ? (
        <p>
          They part at{" "}
          <button class="plain" onClick={() => select(parting.node)}>{parting.action}</button>{" "}
          on rank {parting.rank}, which ends {measured.time(Math.abs(parting.late))} {parting.late > 0 ? "later" : "earlier"} than predicted.
        </p>
      ) : (
        <p>Every action ends within a hundredth of the makespan of where it was predicted to end.</p>
      )}
      <p class="quiet">Ranks end late by: {late.map((each, rank) => `${rank}: ${signed(each, measured.time)}`).join(", ")}</p>
      <div class="wide">
        <table>
          <caption class="unseen">What actions take in the mean, by stage and kind</caption>
          <thead>
            <tr>{["work", "count", "predicted", "measured", "difference"].map((name) => <th key={name} scope="col">{name}</th>)}</tr>
          </thead>
          <tbody>
            {lengthsByWork(predicted, measured).slice(0, FEW).map((each) => (
              <tr key={each.name}>
                <th scope="row">{each.name}</th>
                <td>{each.count}</td>
                <td>{measured.time(each.predicted)}</td>
                <td>{measured.time(each.measured)}</td>
                <td>{change(each.predicted, each.measured)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
