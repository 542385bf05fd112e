"""Delays summed up by stage and kind, by channel, and by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.ir.kind import Kind
from penstock.simulator.comparison.lateness import ACTION, AFTER, BETWEEN, MESSAGE, OPTIMIZER, SLACK, Delay


@dataclass(frozen=True)
class Total:
    """The sum of several delays of one sort: computations of a stage and kind, messages between two ranks, or pauses of a rank."""

    what: str
    name: str
    delays: list[Delay]

    @property
    def added(self) -> float:
        return sum(delay.added for delay in self.delays)


def totals(delays: Iterable[Delay]) -> list[Total]:
    """Sum up delays. The largest sums come first, and slack, which nothing causes, comes last."""
    by_name: dict[tuple[str, str], list[Delay]] = {}
    for delay in delays:
        by_name.setdefault((delay.what, name_of(delay)), []).append(delay)
    sums = [Total(what, name, group) for (what, name), group in by_name.items()]
    return sorted(sums, key=lambda total: (total.what == SLACK, -abs(total.added)))


def name_of(delay: Delay) -> str:
    """The name under which a delay is counted."""
    if delay.what == ACTION and delay.action is not None:
        return work_name((part.stage, part.kind) for part in delay.action.parts)
    if delay.what == MESSAGE:
        return channel_name(delay.source, delay.rank, delay.way)
    return {
        BETWEEN: f"rank {delay.rank} between actions",
        AFTER: f"rank {delay.rank} after its last action",
        OPTIMIZER: f"the optimizer's step of rank {delay.rank}",
        SLACK: "slack in the prediction",
    }[delay.what]


def work_name(work: Iterable[tuple[int, Kind]]) -> str:
    """
    >>> work_name([(3, Kind.F), (0, Kind.B)])
    'stage 3 F & stage 0 B'
    """
    return " & ".join(f"stage {stage} {kind.name}" for stage, kind in work)


def channel_name(source: int | None, target: int, kind: Kind | None) -> str:
    """
    >>> channel_name(0, 1, Kind.SEND_F)
    'activations from rank 0 to 1'
    """
    return f"{'activations' if kind is Kind.SEND_F else 'gradients'} from rank {source} to {target}"
