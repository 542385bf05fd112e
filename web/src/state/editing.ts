import { batch, computed, signal } from "@preact/signals";
import { applyEdit, applyEdits, checkedView, decodeEdits, describeEdit, type Edit, EditError, type Finding, notEditable, type Order, orderOf, type View } from "../core/index.ts";

/** Actions up to which an order is checked and timed again at every move of a drag; larger ones when the pointer rests. */
export const QUICK = 30_000;

/** What the server's verifier says of the changed order. */
export interface Verdict {
  /** The order that was proved or refused. */
  order: Order;
  proof: string | null;
  program: string | null;
  findings: Finding[];
}

/** The changes to the first schedule: what was done, what was undone, and what a drag would do. */
export class Editing {
  /** Whether dragging moves actions. */
  readonly mode = signal(false);
  readonly edits = signal<readonly Edit[]>([]);
  readonly undone = signal<readonly Edit[]>([]);
  /** The move that a drag would make. */
  readonly preview = signal<Edit | null>(null);
  readonly verdict = signal<Verdict | null>(null);
  /** Whether the whole proof is shown: after a remedy was applied, until it is closed. */
  readonly proofOpen = signal(false);
  /** Whether the schedule as it was is shown below. */
  readonly original = signal(false);
  private readonly base = signal<View | null>(null);
  /** The order after each change, the unchanged one first. */
  private readonly orders = signal<readonly Order[]>([]);

  /** Takes another schedule; the changes of the one before are forgotten. */
  reset(base: View | null): void {
    batch(() => {
      this.base.value = base;
      this.orders.value = [];
      this.edits.value = [];
      this.undone.value = [];
      this.preview.value = null;
      this.verdict.value = null;
      this.original.value = false;
      this.proofOpen.value = false;
      if (!base || notEditable(base)) this.mode.value = false;
    });
  }

  get unchanged(): View | null {
    return this.base.value;
  }

  /** Whether the order on screen is the page's own. */
  readonly active = computed(() => this.base.value !== null && (this.mode.value || this.edits.value.length > 0));

  readonly order = computed<Order | null>(() => {
    const base = this.base.value;
    if (!base || !this.active.value) return null;
    return this.orders.value[this.edits.value.length] ?? orderOf(base);
  });

  /** The order with its findings, after all changes. */
  readonly view = computed<View | null>(() => {
    const [base, order] = [this.base.value, this.order.value];
    return base && order ? this.titled(checkedView(base, order)) : null;
  });

  /** The order as it would be after the drag. */
  readonly previewed = computed<View | null>(() => {
    const [base, order, edit] = [this.base.value, this.order.value, this.preview.value];
    if (!base || !order || !edit) return null;
    return this.titled(checkedView(base, applyEdit(order, edit, base.table.edges)));
  });

  /** What is drawn: the order during a drag if it can run, else as it stands, with the findings of the verifier. */
  readonly shown = computed<View | null>(() => {
    if (this.previewed.value?.timed) return this.previewed.value;
    const [view, findings] = [this.view.value, this.findings.value];
    return view && findings.length !== view.findings.length ? { ...view, findings, numFindings: findings.length } : view;
  });

  private titled(view: View): View {
    const { memoryLimit, costs, units, devices, cluster } = this.base.value!;
    const title = this.edits.value.length ? `${this.base.value!.title}, edited` : this.base.value!.title;
    return { ...view, title, memoryLimit, costs, units, devices, cluster };
  }

  /** Why nothing can be changed, in words; null if it can. */
  get refusal(): string | null {
    const base = this.base.value;
    return base ? notEditable(base) : "nothing is shown";
  }

  /** Makes a change, or several in a row; throws an `EditError` and changes nothing if one cannot be made. */
  apply(...edits: Edit[]): void {
    const base = this.base.value;
    if (!base) throw new EditError("nothing is shown that could be changed");
    const refusal = notEditable(base);
    if (refusal) throw new EditError(refusal);
    const orders = [...(this.orders.value.length ? this.orders.value.slice(0, this.edits.value.length + 1) : [orderOf(base)])];
    for (const edit of edits) orders.push(applyEdit(orders[orders.length - 1], edit, base.table.edges));
    batch(() => {
      this.orders.value = orders;
      this.edits.value = [...this.edits.value, ...edits];
      this.undone.value = [];
      this.preview.value = null;
    });
  }

  undo(): boolean {
    const { edits, undone } = this;
    if (!edits.value.length) return false;
    batch(() => {
      undone.value = [edits.value[edits.value.length - 1], ...undone.value];
      edits.value = edits.value.slice(0, -1);
    });
    return true;
  }

  redo(): boolean {
    const [next, ...rest] = this.undone.value;
    if (!next) return false;
    this.apply(next);
    this.undone.value = rest;
    return true;
  }

  /** Goes back or forward until so many changes are made. */
  goTo(count: number): void {
    batch(() => {
      while (this.edits.value.length > count && this.undo());
      while (this.edits.value.length < count && this.redo());
    });
  }

  /** Takes changes from an address or a file; those that do not fit the schedule are refused as a whole. */
  take(text: string): void {
    const base = this.base.value;
    if (!base) return;
    const refusal = notEditable(base);
    if (refusal) throw new EditError(refusal);
    const edits = decodeEdits(text);
    applyEdits(orderOf(base), edits, base.table.edges);
    this.apply(...edits);
  }

  /** Every change that is made or was undone, in words. */
  readonly list = computed<string[]>(() => {
    const base = this.base.value;
    if (!base) return [];
    let order = this.orders.value[0] ?? orderOf(base);
    return [...this.edits.value, ...this.undone.value].map((edit) => {
      const text = describeEdit(order, edit);
      order = applyEdit(order, edit, base.table.edges);
      return text;
    });
  });

  /** The findings of the order on screen: the verifier's if it has answered, else the page's own. */
  readonly findings = computed<Finding[]>(() => {
    const [view, verdict] = [this.view.value, this.verdict.value];
    if (!view) return [];
    if (verdict?.order !== this.order.value) return view.findings;
    return verdict.findings.map((finding) => view.findings.find((own) => sameFinding(own, finding)) ?? finding);
  });
}

function sameFinding(one: Finding, other: Finding): boolean {
  return one.rule === other.rule && one.rank === other.rank && one.step === other.step && one.message === other.message;
}
