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

    @property
    def is_compute(self) -> bool:
        """Forward, one of the backwards, or several of them together."""
        return self <= Kind.W or self is Kind.OVERLAP_F_B

    @property
    def is_communication(self) -> bool:
        """One end of a message between two ranks."""
        return Kind.SEND_F <= self <= Kind.RECV_B

    @property
    def has_microbatch(self) -> bool:
        """Whether an action of this kind belongs to one microbatch; the others belong to a whole stage."""
        return self <= Kind.RECV_B or self.is_send_wait or self.is_copy

    @property
    def is_send_wait(self) -> bool:
        """Waits until an earlier send of the rank is done."""
        return self in (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)

    @property
    def is_copy(self) -> bool:
        """Moves an activation to host memory, or back."""
        return self in (Kind.OFFLOAD, Kind.RELOAD)


COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
SEND_WAITS = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)
"""The waits for the kinds in `SENDS`, in the same order."""
COPIES = (Kind.OFFLOAD, Kind.RELOAD)
