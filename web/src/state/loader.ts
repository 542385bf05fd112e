import { batch } from "@preact/signals";
import { fullCosts, isRecording, plainCosts, readDocument, readRecording, type Costs, type Source, type View } from "../core/index.ts";
import { adjusted, excess, isUniform, isUnchanged, shared, UNCHANGED } from "./adjust.ts";
import * as api from "./api.ts";
import { pack, unpack } from "./packed.ts";
import type { Studio } from "./studio.ts";
import { decodeLink, type Choice, type LinkState, type Option, type Other } from "./url.ts";

export const START: Choice = { schedule: "zbv", ranks: 4, microbatches: 8, chunks: null, options: {}, form: "schedule", offload: "" };
const PATIENCE = 250;

/** Brings views into the studio: from the page itself, from the server, from files. */
export class Loader {
  private running: AbortController | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly studio: Studio) {}

  /** What the page opens with. */
  async start(embedded: unknown[] | null, hash: string): Promise<void> {
    const said = decodeLink(hash);
    const wrong = excess(said.adjust);
    const link = wrong === null ? said : { ...said, adjust: UNCHANGED };
    this.studio.dress(link);
    this.studio.editing.reset(this.studio.first.value);
    await this.guarded(async () => {
      if (embedded?.length) {
        const given = this.studio.given.value.length ? this.studio.given.value : embedded.map(readDocument);
        this.studio.given.value = given;
        const [above, below] = link.given ?? [0, 1];
        this.show(given[above] ?? given[0], given[below] ?? null, null);
        this.takeSources(this.studio.first.value!, given[below]);
        this.studio.dress(link);
      }
      if (!this.studio.offline) await this.startServed(link, Boolean(embedded?.length));
    });
    this.takeEdits(link.edits);
    this.studio.selectSpot(link.selected);
    if (wrong !== null) this.studio.say(`The costs of the link cannot be drawn: ${wrong}. The given costs are shown.`, "error");
  }

  /** Changes that a link or a file holds; those that do not fit what is shown are told. */
  private takeEdits(edits: string): void {
    if (!edits) return;
    try {
      this.studio.editing.take(edits);
    } catch (error) {
      this.studio.say(`The changes do not fit this schedule: ${(error as Error).message}.`, "error");
    }
  }

  /** A link says what to load; without one, what the page was opened with stands. */
  private async startServed(link: LinkState, given: boolean): Promise<void> {
    const asked = api.schedules().then((found) => (this.studio.schedules.value = found));
    if (link.file) this.show(await this.read(link.file.name, await unpack(link.file.content)), null, link.file);
    else if (link.first || !given) await this.load(link.first ?? START, link.second);
    await asked;
  }

  /** Controls begin at what the documents were made from. */
  private takeSources(first: View, second: View | undefined): void {
    if (this.studio.offline || first.source.kind !== "schedule") return;
    const { source, ranks, microbatches } = first;
    const form = source.fsdp ? "sharded" : source.lower ? "program" : "schedule";
    batch(() => {
      this.studio.choice.value = { ...named(source), ranks, microbatches, form, offload: String(source.offload ?? "") };
      this.studio.other.value = second?.source.kind === "schedule" ? named(second.source) : null;
      this.studio.costs.value = isUniform(first.costs) ? plainCosts(first.costs) : {};
    });
  }

  /** Leaves an entry in the browser's history from which the changes come back, before another schedule takes the place of theirs. */
  private keepChanges(): void {
    const count = this.studio.editing.edits.value.length;
    if (!count) return;
    history.pushState(null, "", location.href);
    this.studio.say(`${count === 1 ? "One change" : `${count} changes`} to ${this.studio.first.value?.title} are one step back in the browser's history.`);
  }

  /** Shows a schedule, and another below it. */
  async load(choice: Choice, other: Other | null): Promise<void> {
    const signal = this.begin();
    const { limit } = this.studio;
    const first = await api.makeView(choice, this.studio.costs.value, limit.value, signal);
    const second = other ? await this.besides(first, { ...choice, ...other }, signal) : null;
    this.keepChanges();
    batch(() => {
      this.studio.choice.value = choice;
      this.studio.other.value = other;
      this.studio.file.value = null;
      this.studio.show(first, second);
    });
    this.reorderSoon();
  }

  /** A schedule below another, of the same model: what a rank does is divided among its stages. */
  private async besides(first: View, choice: Choice, signal: AbortSignal): Promise<View> {
    const found = await api.makeView(choice, this.studio.costs.value, this.studio.limit.value, signal);
    const costs = sameModel(first, found);
    return { ...found, costs, ...(costs === first.costs ? devicesOf(first) : {}) };
  }

  /** The controls changed; the last change counts. */
  choose(choice: Choice, other: Other | null = this.studio.other.value): Promise<void> {
    return this.guarded(() => this.load(choice, other));
  }

  async compareWith(other: Other | null): Promise<void> {
    const { choice, first } = this.studio;
    await this.guarded(async () => {
      const view = first.value;
      if (!view) return;
      if (other === null) return this.clearSecond(view);
      const own = choice.value ?? { schedule: "", ranks: view.ranks, microbatches: view.microbatches, chunks: null, options: {}, form: view.lowered ? "program" : "schedule", offload: "" };
      const second = await this.besides(view, { ...own, ...other }, this.begin());
      batch(() => {
        this.studio.other.value = other;
        this.studio.show(view, second);
      });
      this.reorderSoon();
    });
  }

  private clearSecond(view: View): void {
    batch(() => {
      this.studio.other.value = null;
      this.studio.show(view, null);
    });
  }

  /** Opens a file in place of what is shown, or below it. */
  async open(file: File, below = false): Promise<void> {
    await this.guarded(async () => {
      const content = await textIn(file);
      if (isRecording(content) && !isTimeline(content)) throw new Error(`${file.name} is a trace: choose the schedule that was run, and drop the trace on its chart, or one trace per rank.`);
      const view = await this.read(file.name, content);
      const { first } = this.studio;
      if (below && first.value) return this.show(first.value, view, this.studio.file.value);
      const packed = await pack(content);
      this.show(view, null, packed === null ? null : { name: file.name, content: packed });
      this.takeEdits(editsIn(content));
    });
  }

  /** Opens a file that was dropped; recorded runs on the chart, in one file or in one per rank, are laid over what is shown. */
  async drop(files: readonly File[], onChart: boolean): Promise<void> {
    const view = this.studio.first.value;
    const canLay = onChart && view?.timed && !view.measured;
    if (canLay && (await Promise.all(files.map(async (file) => isRecording(await textIn(file).catch(() => ""))))).every(Boolean)) return this.lay(files);
    await this.open(files[0]);
  }

  /** Lays a recorded run over what is shown: one file, or one trace of a profiler per rank. */
  async lay(files: readonly File[]): Promise<void> {
    await this.guarded(async () => {
      const texts = await Promise.all(files.map(async (file) => ({ name: file.name, text: await textIn(file) })));
      const recording = readRecording(texts);
      this.studio.record(recording);
      this.studio.say(`${recording.name} ${files.length > 1 ? "are" : "is"} laid over ${this.studio.title.value}.`);
    });
  }

  /** Documents are read here; everything else is asked from the server. */
  private async read(name: string, content: string): Promise<View> {
    const ours = documentIn(content);
    if (ours !== null) return readDocument(ours);
    if (this.studio.offline) {
      throw new api.ApiError(`${name} has to be read by the studio: run \`penstock studio\` and open it there. This page is a file and opens saved views only.`);
    }
    return api.openFile(name, content);
  }

  show(view: View, second: View | null, file: { name: string; content: string } | null): void {
    if (view !== this.studio.first.value) this.keepChanges();
    batch(() => {
      if (view !== this.studio.first.value) this.studio.choice.value = null;
      this.studio.other.value = null;
      this.studio.file.value = file;
      this.studio.tab.value = "timeline";
      this.studio.setSpan(0, 1);
      this.studio.show(view, second);
    });
  }

  /** Asks for orders that depend on costs again, when the sliders have come to rest. */
  reorderSoon(): void {
    clearTimeout(this.timer);
    const { first, second } = this.studio;
    const views = [first.peek(), second.peek()];
    if (this.studio.offline || this.studio.editing.active.peek() || !views.some((view) => view?.dependsOnCosts)) return;
    this.timer = setTimeout(() => void this.guarded(() => this.reorder()), PATIENCE);
  }

  private async reorder(): Promise<void> {
    const { first, second, choice, other, adjust } = this.studio;
    const [view, below, own] = [first.value, second.value, choice.value];
    if (!view || !own || (isUnchanged(adjust.value) && !below)) return;
    const signal = this.begin();
    const again = async (old: View, wanted: Choice): Promise<View> => {
      if (!old.dependsOnCosts) return old;
      const costs = plainCosts(adjusted(old, adjust.value, view.stages));
      return { ...(await api.makeView(wanted, costs, this.studio.limit.value, signal)), costs: old.costs, ...devicesOf(old) };
    };
    const made = await again(view, own);
    this.studio.show(made, below && other.value ? await again(below, { ...own, ...other.value }) : below);
  }

  private begin(): AbortSignal {
    this.running?.abort();
    this.running = new AbortController();
    return this.running.signal;
  }

  say(text: string): void {
    this.studio.say(text);
  }

  /** Runs a body and says what went wrong; the result of a request that another has overtaken is dropped. */
  async guarded(body: () => Promise<void>): Promise<void> {
    const { studio } = this;
    studio.busy.value++;
    try {
      await body();
      if (studio.notice.value?.kind === "error") studio.notice.value = null;
    } catch (error) {
      if (!(error instanceof DOMException && error.name === "AbortError")) studio.say((error as Error).message, "error");
    } finally {
      studio.busy.value--;
    }
  }
}

/** A document's source as the controls have it. */
function named(source: Source): Other {
  return { schedule: source.name, chunks: source.chunks ?? null, options: (source.options ?? {}) as Record<string, Option> };
}

function devicesOf({ devices, cluster }: View): Pick<View, "devices" | "cluster"> {
  return { devices, cluster };
}

/** The first one's costs for the second; each keeps its own where they are given stage by stage and the stages, or their devices, differ. */
export function sameModel(first: View, second: View): Costs {
  const placed = first.devices === null || JSON.stringify(first.copies) === JSON.stringify(second.copies);
  if (placed && first.stages === second.stages && first.unitCount === second.unitCount && first.slices === second.slices) return first.costs;
  if (!isUniform(first.costs)) return second.costs;
  const share = first.stages / first.ranks / (second.stages / second.ranks);
  return fullCosts(shared(first.costs, share, first.slices / second.slices));
}

const GZIP = [0x1f, 0x8b];

/** The text of a file; of a compressed one, what is in it. */
async function textIn(file: File): Promise<string> {
  const head = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  if (!GZIP.every((byte, k) => head[k] === byte)) return file.text();
  try {
    return await new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  } catch {
    throw new Error(`${file.name} cannot be unpacked: it is damaged, or was cut off.`);
  }
}

/** Whether a recorded run is a timeline of Penstock's, which is opened by itself too. */
function isTimeline(content: string): boolean {
  return (JSON.parse(content) as { type?: unknown }).type === "timeline";
}

/** The changes that a saved view holds. */
function editsIn(content: string): string {
  const edits = (documentIn(content) as { edits?: unknown } | null)?.edits;
  return typeof edits === "string" ? edits : "";
}

function documentIn(content: string): unknown {
  if (!content.trimStart().startsWith("{")) return null;
  try {
    const data = JSON.parse(content) as { format?: unknown; type?: unknown };
    return data.format === "penstock" && data.type === "view" ? data : null;
  } catch {
    return null;
  }
}
