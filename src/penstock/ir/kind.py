"""The kinds of actions."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """The kinds of action; the name is the text form, the value is what packed arrays hold."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's own letter for the backward of the input
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRAD = 10
    OVERLAP_F_B = 11
    WAIT_SEND_F = 12
    WAIT_SEND_B = 13
    WAIT_REDUCE_GRAD = 14
    OFFLOAD = 15
    RELOAD = 16
    S = 17
    T = 18
    BROADCAST = 19
    COMBINE = 20

    @property
    def is_compute(self) -> bool:
        """Forward, one of the backwards, several of them together, or a rank's share of a spread vocabulary."""
        return self <= Kind.W or self is Kind.OVERLAP_F_B or self in (Kind.S, Kind.T)

    @property
    def is_communication(self) -> bool:
        """One end of a message between two ranks."""
        return Kind.SEND_F <= self <= Kind.RECV_B

    @property
    def has_microbatch(self) -> bool:
        """Whether an action of this kind belongs to one microbatch; the others belong to a whole stage."""
        return self <= Kind.RECV_B or self.is_send_wait or self.is_copy or self.is_spread

    @property
    def is_send_wait(self) -> bool:
        """Waits until an earlier send of the rank is done."""
        return self in (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)

    @property
    def is_copy(self) -> bool:
        """Moves an activation to host memory, or back."""
        return self in (Kind.OFFLOAD, Kind.RELOAD)

    @property
    def is_spread(self) -> bool:
        """Stands on every rank once per microbatch: a share of the spread embedding or head, or a collective that all ranks join."""
        return Kind.S <= self <= Kind.COMBINE

    @property
    def is_join(self) -> bool:
        """Joins a collective of all ranks; its result is waited for where it is used."""
        return self in (Kind.BROADCAST, Kind.COMBINE)


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
"""The computations of a stage, which run on its rank."""
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
SEND_WAITS = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)
"""The waits for the kinds in `SENDS`, in the same order."""
COPIES = (Kind.OFFLOAD, Kind.RELOAD)
SHARES = (Kind.S, Kind.T)
"""The computations of each rank's share of the vocabulary: S makes logits or embeddings, T the gradients of the share's weights."""
JOINS = (Kind.BROADCAST, Kind.COMBINE)
"""The collectives around them: BROADCAST gives every rank what the shares need, COMBINE puts together what they have made."""
SPREAD = (*SHARES, *JOINS)
WORK = (*COMPUTE, *SHARES)
"""Every kind that occupies the rank's compute lane."""
