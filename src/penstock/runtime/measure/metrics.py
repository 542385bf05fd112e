"""The metrics of each training step, for the callbacks of `Pipeline(on_step=...)`.

With a callback, every rank notes when its own actions run, as the recorder does, sums them up, and sends the few sums along with its share
of the step's result. No message is added to a step, and every rank builds the same `StepMetrics`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.errors import ScheduleError
from penstock.ir.kind import Kind
from penstock.runtime.batch.result import RankTimes, ResultShare
from penstock.runtime.device.timing import clock
from penstock.runtime.measure.drift import COMPUTE, Drift, DriftWatch
from penstock.runtime.measure.recorder import StepTimes, machine_id

if TYPE_CHECKING:
    from penstock.runtime.execution.executor import Executor

logger = logging.getLogger(__name__)

_BACKWARDS = (Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class RankMetrics:
    """How one rank spent a step, in seconds."""

    forward: float
    backward: float
    """Backwards of all kinds: whole, for the input, and for the weights."""
    overlapped: float
    """Actions that run a forward and a backward together."""
    idle: float
    """The part of the step's makespan in which the rank did not compute."""
    waits: Mapping[int, float]
    """How long the rank waited for messages, by the rank that sent them. The wait for a rank that is late to the step counts too."""

    @property
    def waiting(self) -> float:
        """How long the rank waited for messages of any rank."""
        return sum(self.waits.values())


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one training step, the same on every rank of the pipeline.

    With data ranks, `loss` and `grad_norm` are those of the whole batch, and everything else is of this rank's own pipeline.
    """

    step: int
    """The number of the step, from 1; it goes on after a checkpoint is loaded."""
    loss: float | None
    grad_norm: float | None
    """The norm that `clip_grad_norm_` returned after the step; None if it was not called."""
    seconds: float
    """From the end of the last step to the end of this one, so that the optimizer and loading the batch count. The first step, and a step
    after an evaluation, count from their own start."""
    samples: int | None
    """The batch elements of the step; None if the batch has no tensor to count them by."""
    tokens: float | None
    """The sum of the pipeline's `weight`, valid tokens for example; None without `weight`."""
    makespan: float
    """Seconds from the first action of any rank to the end of the last."""
    bubble: float
    """Idle time over ranks x makespan."""
    ranks: tuple[RankMetrics, ...]
    drifts: tuple[Drift, ...] = ()
    """Ranks that were found in this step to have become slower or faster than before; each change is reported once."""

    @property
    def samples_per_second(self) -> float | None:
        return None if self.samples is None else self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds

    def scalars(self) -> dict[str, float | None]:
        """All numbers by name, those of a rank under `rank0/forward` and the like: what a table or a chart takes."""
        numbers: dict[str, float | None] = {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "makespan": self.makespan,
            "bubble": self.bubble,
        }
        for rank, metrics in enumerate(self.ranks):
            for name in ("forward", "backward", "overlapped", "idle", "waiting"):
                numbers[f"rank{rank}/{name}"] = getattr(metrics, name)
        return numbers


OnStep = Callable[[StepMetrics], None]
"""Receives the metrics of each training step."""


def list_callbacks(on_step: OnStep | Sequence[OnStep] | None) -> tuple[OnStep, ...]:
    """Return the callbacks as a tuple; refuse anything that cannot be called."""
    value: Any = on_step
    callbacks = () if value is None else (value,) if callable(value) else value
    if not isinstance(callbacks, list | tuple) or not all(map(callable, callbacks)):
        raise ScheduleError(f"on_step must be a function of a step's metrics, or a list of them, got {value!r}")
    return tuple(callbacks)


class StepMeter:
    """Takes the metrics of one pipeline's training steps on one rank, and gives them to the callbacks.

    Per step, the pipeline calls `begin`, `take_times` when the rank has run its actions, and `end` with the shares of all ranks.
    The metrics are then complete except for the gradient norm. `deliver` gives them to the callbacks: the pipeline calls it when the
    norm is known, and otherwise before its next step.
    """

    def __init__(self, callbacks: Sequence[OnStep], rank: int) -> None:
        self.callbacks = callbacks
        self.logs_drift = rank == 0
        self._drift = DriftWatch()
        self._machine = zlib.crc32(machine_id().encode())
        self._common = clock()
        self._since: int | None = None
        self._places: dict[Executor, dict[str, list[int]]] = {}
        self._pending: tuple[StepMetrics, Tensor | None] | None = None

    def begin(self) -> None:
        if self._since is None:
            self._since = clock()

    def forget_ranks(self) -> None:
        """Start anew with other ranks, after some were lost or have come back."""
        self._drift, self._places = DriftWatch(), {}

    def pause(self) -> None:
        """Do not count the time from here to the next step, which begins after an evaluation."""
        self._since = None

    def take_times(self, executor: Executor, tokens: float | None) -> RankTimes:
        """Sum up what this rank did in the step that the executor has just run."""
        times = StepTimes.of(executor)
        begun, ended = times.begun, times.ended
        if executor not in self._places:
            self._places[executor] = _find_places(executor)
        places = self._places[executor]
        sums = {name: sum(ended[at] - begun[at] for at in places[name]) for name in COMPUTE}
        computed = places["all"]
        first, last = (begun[computed[0]], ended[computed[-1]]) if computed else (0, 0)
        waits: dict[int, int] = {}
        for (source, _, _), messages in times.received.items():
            waits[source] = waits.get(source, 0) + sum(there - asked for _, asked, there in messages)
        now = clock()
        assert self._since is not None, "a step begins before its times are taken"
        interval, self._since = now - self._since, now
        return RankTimes(self._machine, self._common, first, last, interval, **sums, waits=waits, tokens=tokens)

    def end(self, step: int, shares: Sequence[ResultShare], loss: Tensor | None) -> None:
        """End a step that all ranks have completed."""
        self._common = clock()
        if not self.callbacks and not self.logs_drift:
            return
        metrics = combine_shares(step, shares)
        drifts = self._drift.add(step, (shares[0].microbatches, metrics.samples), metrics.makespan, metrics.ranks)
        if self.logs_drift:
            for drift in drifts:
                logger.warning("%s", drift)
        if self.callbacks:
            self._pending = replace(metrics, drifts=drifts), loss

    def deliver(self, grad_norm: Tensor | None = None) -> None:
        """Give the last step's metrics to the callbacks, unless that was done already."""
        if self._pending is None:
            return
        (metrics, loss), self._pending = self._pending, None
        metrics = replace(metrics, loss=_read(loss), grad_norm=_read(grad_norm))
        for callback in self.callbacks:
            callback(metrics)


def _find_places(executor: Executor) -> dict[str, list[int]]:
    """Where a rank's forwards, backwards, overlapped and all compute actions stand in its program."""
    places: dict[str, list[int]] = {name: [] for name in (*COMPUTE, "all")}
    for at, action in enumerate(executor.actions):
        if action.kind.is_compute or action.sub_actions:
            name = "overlapped" if action.sub_actions else "backward" if action.kind in _BACKWARDS else "forward"
            places[name].append(at)
            places["all"].append(at)
    return places


def _read(value: Tensor | None) -> float | None:
    return None if value is None else float(value.detach())


def combine_shares(step: int, shares: Sequence[ResultShare]) -> StepMetrics:
    """Build the metrics of a step from the shares of all ranks, without the loss and the norm, which need the device."""
    times = [share.times for share in shares if share.times is not None]
    assert len(times) == len(shares), "all ranks take the times of a step, or none"
    ahead = [0 if rank.machine == times[0].machine else rank.common - times[0].common for rank in times]
    working = [(rank.first - offset, rank.last - offset) for rank, offset in zip(times, ahead, strict=True) if rank.first]
    makespan = max(last for _, last in working) - min(first for first, _ in working)
    ranks = tuple(_build_rank_metrics(rank, makespan) for rank in times)
    sizes = next((share.sizes for share in shares if share.sizes is not None), None)
    return StepMetrics(
        step=step,
        loss=None,
        grad_norm=None,
        seconds=times[0].interval / 1e9,
        samples=None if sizes is None else sum(size * count for size, count in sizes),
        tokens=next((rank.tokens for rank in times if rank.tokens is not None), None),
        makespan=makespan / 1e9,
        bubble=sum(rank.idle for rank in ranks) / (len(ranks) * makespan / 1e9),
        ranks=ranks,
    )


def _build_rank_metrics(times: RankTimes, makespan: int) -> RankMetrics:
    idle = makespan - times.forward - times.backward - times.overlapped
    waits = {source: times.waits[source] / 1e9 for source in sorted(times.waits)}
    return RankMetrics(times.forward / 1e9, times.backward / 1e9, times.overlapped / 1e9, idle / 1e9, waits)
