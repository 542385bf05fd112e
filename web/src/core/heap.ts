/** Ranks by the time they stand at, the earliest first; at the same time the lower rank. */
export class RankHeap {
  private readonly ranks: number[] = [];

  constructor(private readonly now: Float64Array) {}

  get size(): number {
    return this.ranks.length;
  }

  push(rank: number): void {
    const { ranks } = this;
    let place = ranks.push(rank) - 1;
    while (place > 0) {
      const above = (place - 1) >> 1;
      if (!this.before(ranks[place], ranks[above])) break;
      this.swap(place, above);
      place = above;
    }
  }

  pop(): number {
    const { ranks } = this;
    const first = ranks[0];
    const last = ranks.pop() as number;
    if (ranks.length) {
      ranks[0] = last;
      this.sink();
    }
    return first;
  }

  private sink(): void {
    const { ranks } = this;
    for (let place = 0; ; ) {
      let below = 2 * place + 1;
      if (below >= ranks.length) return;
      if (below + 1 < ranks.length && this.before(ranks[below + 1], ranks[below])) below++;
      if (!this.before(ranks[below], ranks[place])) return;
      this.swap(below, place);
      place = below;
    }
  }

  private before(one: number, other: number): boolean {
    return this.now[one] < this.now[other] || (this.now[one] === this.now[other] && one < other);
  }

  private swap(one: number, other: number): void {
    [this.ranks[one], this.ranks[other]] = [this.ranks[other], this.ranks[one]];
  }
}
