"""Messages of a channel are received in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.verifier.context import Context, ordinal, position_in
from penstock.verifier.finding import Finding


def matching(context: Context) -> Iterator[Finding]:
    """The k-th send of each channel is received by the k-th receive; a message with one end missing is left to `complete`."""
    sent, received = context.table.links.messages
    channel = context.channel[sent]
    real = (channel >= 0) & (context.channel[received] == channel)
    sent, received, channel = sent[real], received[real], channel[real]
    as_sent, as_received = np.lexsort((sent, channel)), np.lexsort((received, channel))
    wrong = np.flatnonzero(as_sent != as_received)
    channels = channel[as_sent]
    firsts = np.flatnonzero(np.append(True, channels[wrong][1:] != channels[wrong][:-1])) if len(wrong) else wrong
    place = position_in(channels)
    for first, many in zip(firsts.tolist(), np.diff(np.append(firsts, len(wrong))).tolist(), strict=True):
        at = int(wrong[first])
        ends = int(sent[as_sent[at]]), int(received[as_received[at]]), int(received[as_sent[at]])
        yield _report_crossed(context, ends, int(place[at]) + 1, many)


def _report_crossed(context: Context, ends: tuple[int, int, int], number: int, many: int) -> Finding:
    """Report the first place at which a channel receives in another order than it sends: the send, the receive, and the right receive."""
    sender, receiver, right = ends
    channel = context.channel_name(int(context.channel[sender]))
    message = (
        f"on the channel {channel} the {ordinal(number)} message is sent as {context.name(sender)} "
        f"({context.place(sender)}) but received as {context.name(receiver)} ({context.place(receiver)}); {many} messages are out of order"
    )
    remedy = f"Receive in the order of the sends: run {context.name(right)} ({context.place(right)}) here"
    return context.report("matching", receiver, message, remedy)
