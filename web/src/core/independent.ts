import type { Durations } from "./durations.ts";
import type { Lanes } from "./lanes.ts";
import type { Graph, Timing } from "./types.ts";

/**
 * Time a graph in which no link or lane is shared: a rank runs on as far as it can, in any order of ranks, with the same result.
 * Gives the node that each rank came to, its end if nothing hangs.
 */
export function runIndependent(graph: Graph, takes: Durations, times: Timing, link: Int32Array, links: number, lanes: Lanes): Int32Array {
  const { bounds, rank: rankOf, need_at, need, send_at, gather_at, gather, received, sender, user, receive, slot, retire, meet, meet_at, join } = graph;
  const { start, end, depart, arrive, collectiveStart, collectiveEnd } = times;
  const ranks = bounds.length - 1;
  const at = bounds.slice(0, ranks);
  const now = new Float64Array(ranks);
  const lane = new Float64Array(lanes.count);
  const free = new Float64Array(links);
  /** Of each collective of all ranks: how many have joined it, and when the last of them did. */
  const [arrived, latest] = [new Int32Array(meet_at.length - 1), new Float64Array(meet_at.length - 1)];
  const queued = new Uint8Array(ranks).fill(1);
  const stack = Array.from({ length: ranks }, (_, k) => ranks - 1 - k);
  while (stack.length) {
    const rank = stack.pop() as number;
    queued[rank] = 0;
    const last = bounds[rank + 1];
    let node = at[rank];
    let clock = now[rank];
    ahead: for (; node < last; node++) {
      let begin = takes.idle ? clock + takes.idle[node] : clock;
      for (let k = need_at[node]; k < need_at[node + 1]; k++) {
        const arrival = arrive[need[k]];
        if (arrival < 0) break ahead;
        if (arrival > begin) begin = arrival;
      }
      const stop = send_at[node + 1];
      for (let message = send_at[node]; message < stop; message++) {
        const earlier = slot[message];
        if (earlier < 0) continue;
        const taken = start[receive[earlier]];
        if (taken < 0) break ahead;
        if (taken > begin) begin = taken;
        if (arrive[earlier] > begin) begin = arrive[earlier];
      }
      const sent = retire[node];
      if (sent >= 0) {
        const taken = start[receive[sent]];
        if (taken < 0) break ahead;
        if (taken > begin) begin = taken;
        if (arrive[sent] > begin) begin = arrive[sent];
      }
      for (let k = gather_at[node]; k < gather_at[node + 1]; k++) {
        if (collectiveEnd[gather[k]] > begin) begin = collectiveEnd[gather[k]];
        else if (meet[gather[k]] >= 0 && collectiveEnd[gather[k]] < 0) break ahead;
      }
      clock = begin + takes.node[node];
      start[node] = begin;
      end[node] = clock;
      for (let message = send_at[node]; message < stop; message++) {
        const way = link[message];
        const leave = clock > free[way] ? clock : free[way];
        depart[message] = leave;
        arrive[message] = leave + takes.message[message];
        free[way] = arrive[message];
        const other = rankOf[user[message]];
        if (at[other] === user[message] && !queued[other]) {
          queued[other] = 1;
          stack.push(other);
        }
      }
      if (received[node] >= 0) {
        const other = rankOf[sender[received[node]]];
        if (!queued[other] && at[other] < bounds[other + 1]) {
          queued[other] = 1;
          stack.push(other);
        }
      }
      const beside = lanes.of[node];
      if (meet[node] >= 0) {
        const number = meet[node];
        arrived[number]++;
        if (clock > latest[number]) latest[number] = clock;
        if (arrived[number] === ranks) {
          const from = latest[number] > lane[beside] ? latest[number] : lane[beside];
          lane[beside] = from + takes.collective[node];
          for (let k = meet_at[number]; k < meet_at[number + 1]; k++) {
            collectiveStart[join[k]] = from;
            collectiveEnd[join[k]] = lane[beside];
            const other = rankOf[join[k]];
            if (other !== rank && !queued[other] && at[other] < bounds[other + 1]) {
              queued[other] = 1;
              stack.push(other);
            }
          }
        }
      } else if (beside >= 0) {
        collectiveStart[node] = clock > lane[beside] ? clock : lane[beside];
        lane[beside] = collectiveStart[node] + takes.collective[node];
        collectiveEnd[node] = lane[beside];
      }
    }
    at[rank] = node;
    now[rank] = clock;
  }
  return at;
}
