import { computes } from "../core/figures.ts";
import { needsOf, unblocksOf, type Link } from "../core/links.ts";
import type { View } from "../core/types.ts";

export interface Related {
  needs: Link[];
  unblocks: Link[];
}

/** What an action needs and what needs it, as computations: sends and receives between them are passed over. */
export function relatedOf(view: View, node: number): Related {
  if (!view.timed) return { needs: [], unblocks: [] };
  return { needs: unique(needs(view, node)), unblocks: unique(unblocks(view, node)) };
}

/** The computation that makes a message. */
export function makerOf(view: View, message: number): number {
  return view.entries.node[view.messages.maker[message]];
}

function needs(view: View, node: number): Link[] {
  return needsOf(view, node).flatMap((link) => {
    if (link.message >= 0) return [{ node: makerOf(view, link.message), message: link.message }];
    const received = view.graph.received[link.node];
    if (received >= 0) return [{ node: makerOf(view, received), message: received }];
    return computes(view, node) && sends(view, link.node) ? [] : [link]; // its receive says the same
  });
}

function unblocks(view: View, node: number): Link[] {
  return unblocksOf(view, node).flatMap((link) => {
    if (link.message >= 0 || computes(view, link.node)) return [link];
    const users = unblocksOf(view, link.node);
    const sent = users.find((each) => each.message >= 0);
    return sent ? users.map(({ node: user }) => ({ node: user, message: sent.message })) : [link];
  });
}

/** Whether a node is a send: what it sends was computed before. */
function sends(view: View, node: number): boolean {
  return !computes(view, node) && view.graph.send_at[node] < view.graph.send_at[node + 1];
}

function unique(links: Link[]): Link[] {
  const seen = new Set<string>();
  return links.filter(({ node, message }) => {
    const key = `${node}/${message}`;
    return !seen.has(key) && seen.add(key);
  });
}
