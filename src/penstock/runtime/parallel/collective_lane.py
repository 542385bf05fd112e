"""Lanes: the collectives that all ranks of a pipeline join, beside their computation and in the order in which they are joined.

A collective is a generator. It computes a rank's part, yields an `Exchange` where it needs the values of other ranks, gets the result
back, and returns the rank's result. All ranks join the same collectives in the same order, so their exchanges fit together. A `ProcessLane`
runs the generators of one process in a thread. A `ThreadLane` belongs to a virtual rank: the last rank to join a collective runs the
generators of all ranks side by side, so that no thread waits for another.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PipelineError
from penstock.runtime.device.connections import broadcast_options
from penstock.runtime.device.streams import create_streams, on_stream, record_event, record_use, use_stream, wait_event
from penstock.runtime.device.timing import mark_time

_LOOK = timedelta(seconds=0.2)
"""How long a thread waits for a collective of processes before it checks whether the lane was abandoned."""
_ABANDONED = "the collectives were abandoned after a failure"


class Broadcast(NamedTuple):
    """The value of one rank on all ranks. The values of the others, which have its shape and type, are overwritten."""

    value: Tensor
    source: int


class Sum(NamedTuple):
    """The sum of all ranks' values, on one rank or on all of them. Other ranks get some tensor of that shape. May change the value."""

    value: Tensor
    target: int | None = None


class Largest(NamedTuple):
    """The largest of all ranks' values, element by element, on all ranks. May change the value."""

    value: Tensor


Exchange = Broadcast | Sum | Largest
Collective = Generator[Exchange, Tensor, Any]
"""Yields exchanges, gets their results, and returns the result of this rank."""


def exchange_nothing(value: Any = None) -> Collective:
    """A collective that only keeps its place in the order."""
    yield from ()
    return value


class JoinedCollective(NamedTuple):
    """A collective that a rank has joined."""

    number: int
    """How many the rank had joined before it."""
    future: Future[tuple[Any, Any]]
    """The result, and the event in the lane's stream after which it is there."""


class CollectiveLane(ABC):
    """One rank's end of a lane.

    On a GPU the collectives run on a stream of their own. Use it as a context manager, or call `close` when the last one has been taken.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.joined = 0
        """How many collectives this rank has joined."""
        self.on_join: Callable[[], None] | None = None
        """Called by the rank's thread when it has joined a collective."""
        self.before_take: Callable[[JoinedCollective], None] | None = None
        """Called by the rank's thread before it takes the result of a collective, to wait for it in another way; may raise."""
        self.on_take: Callable[[], None] | None = None
        """Called by the rank's thread when it has the result of a collective, and so has its stream."""
        self.times: list[tuple[Any, Any]] | None = None
        """When each collective began on this rank and when it ended, as `mark_time` tells it; None unless these are recorded."""
        self._last: Future[tuple[Any, Any]] | None = None

    def join(self, steps: Collective, *tensors: Tensor) -> JoinedCollective:
        """Run a collective when all ranks have joined it and those before it are done; its first steps use these tensors."""
        self._last = self._submit(steps, tensors)
        collective = JoinedCollective(self.joined, self._last)
        self.joined += 1
        if self.on_join is not None:
            self.on_join()
        return collective

    def take(self, collective: JoinedCollective) -> Any:
        """The result of a collective, for this thread's stream to use. Waits for it, and raises the error that it has raised."""
        if self.before_take is not None:
            self.before_take(collective)
        value, done = self._wait_for(collective.future)
        wait_event(done)
        if self.on_take is not None:
            self.on_take()
        record_use(value)
        return value

    def settle(self) -> None:
        """Wait until all collectives that this rank has joined have ended, and raise the error of the last one."""
        if self._last is not None:
            self._wait_for(self._last)

    @abstractmethod
    def _submit(self, steps: Collective, tensors: Sequence[Tensor]) -> Future[tuple[Any, Any]]:
        """Take a collective into the lane."""

    def _wait_for(self, future: Future[tuple[Any, Any]]) -> tuple[Any, Any]:
        return future.result()

    @abstractmethod
    def close(self) -> None:
        """Release what the lane holds, once all collectives have ended."""

    @abstractmethod
    def abandon(self) -> None:
        """Close after a failure: collectives that not all ranks will join are not waited for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessLane(CollectiveLane):
    """The collectives of processes, by a process group of torch.distributed, by default that of all processes.

    The group should have no other traffic, because a message between two of its ranks may come between its collectives. It may also be one
    that torch.distributed does not know, such as a `torch.distributed.ProcessGroupGloo`.
    """

    def __init__(self, group: Any = None) -> None:
        world: Any = dist.group.WORLD
        if group is None and world is None:
            raise PipelineError("torch.distributed is not initialised: call init_process_group first, or give a process group")
        self.group = world if group is None else group
        super().__init__(self.group.rank(), self.group.size())
        self._is_own = group is not None
        self._abandoned = False
        stream = create_streams(2)[1]
        self._thread = ThreadPoolExecutor(1, f"collectives of rank {self.rank}", initializer=use_stream, initargs=(stream,))

    def _submit(self, steps: Collective, tensors: Sequence[Tensor]) -> Future[tuple[Any, Any]]:
        return self._thread.submit(self._run, steps, tensors, record_event(), self.times)

    def _run(self, steps: Collective, tensors: Sequence[Tensor], ready: Any, times: list[tuple[Any, Any]] | None) -> tuple[Any, Any]:
        wait_event(ready)
        record_use(tensors)
        begun = None if times is None else mark_time()
        with torch.no_grad():
            value = self._run_steps(steps)
        if times is not None:
            times.append((begun, mark_time()))
        return value, record_event()

    def _run_steps(self, steps: Collective) -> Any:
        try:
            exchange = next(steps)
            while True:
                exchange = steps.send(self._run_exchange(exchange))
        except StopIteration as end:
            return end.value

    def _run_exchange(self, exchange: Exchange) -> Tensor:
        """Gloo's waits cannot be interrupted, so this one is made of short ones; NCCL's do not block."""
        value, work = exchange.value, self._start(exchange)
        while value.is_cpu and not work.is_completed():
            with suppress(RuntimeError):  # not yet
                work.wait(_LOOK)
            if self._abandoned:
                raise PipelineError(_ABANDONED)
        work.wait()
        return value

    def _start(self, exchange: Exchange) -> Any:
        """Start a collective of torch.distributed, in place."""
        match exchange:
            case Broadcast(value, source):
                return self.group.broadcast([value], broadcast_options(source))
            case Sum(value, None):
                return self.group.allreduce([value])
            case Sum(value, int(target)):
                reduce_options = dist.ReduceOptions()
                reduce_options.rootRank = target
                return self.group.reduce([value], reduce_options)
            case Largest(value):
                options: Any = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                return self.group.allreduce([value], options)

    def close(self) -> None:
        self._thread.shutdown()

    def abandon(self) -> None:
        """Also aborts the group, which must be one of this lane's own: collectives in progress would last until their deadline."""
        self._abandoned = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._is_own:
            self.group.abort()


class _JoinedPart(NamedTuple):
    """A virtual rank's part of a collective."""

    steps: Collective
    tensors: Sequence[Tensor]
    ready: Any
    """The event in the rank's stream after which the tensors are there."""
    future: Future[tuple[Any, Any]]
    times: list[tuple[Any, Any]] | None


class MeetingPoint:
    """Where virtual ranks, which are threads of one process on one device, join collectives. One stream runs those of all ranks."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._parts: dict[int, dict[int, _JoinedPart]] = {}
        """For each collective that not all ranks have joined, the parts of those that have."""
        self._stream = create_streams(2)[1]
        self._lock = threading.Lock()
        self._abandoned = False

    def join(self, number: int, rank: int, part: _JoinedPart) -> None:
        """Add a rank's part, and run the collective if it is the last one."""
        with self._lock:
            if self._abandoned:
                part.future.set_exception(PipelineError(_ABANDONED))
                return
            parts = self._parts.setdefault(number, {})
            parts[rank] = part
            if len(parts) == self.ranks:
                del self._parts[number]
                self._run([parts[rank] for rank in range(self.ranks)])

    def abandon(self) -> None:
        """End the waits for collectives that not all ranks have joined."""
        with self._lock:
            self._abandoned = True
            waiting = [part for parts in self._parts.values() for part in parts.values()]
            self._parts.clear()
        for part in waiting:
            part.future.set_exception(PipelineError(_ABANDONED))

    def _run(self, parts: Sequence[_JoinedPart]) -> None:
        try:
            with on_stream(self._stream), torch.no_grad():
                for part in parts:
                    wait_event(part.ready)
                    record_use(part.tensors)
                recorded = [part.times for part in parts if part.times is not None]
                begun = mark_time() if recorded else None
                values = _run_side_by_side([part.steps for part in parts])
                ended = mark_time() if recorded else None
                for times in recorded:
                    times.append((begun, ended))
                done = record_event()
        except Exception as error:
            for part in parts:
                part.future.set_exception(error)
            return
        for part, value in zip(parts, values, strict=True):
            part.future.set_result((value, done))


def _run_side_by_side(parts: Sequence[Collective]) -> list[Any]:
    """What the generators of all ranks return: each runs up to its next exchange, then the exchange is made."""
    results: list[Any] = [None] * len(parts)
    while True:
        exchanges: list[Exchange] = []
        values = []
        for steps, result in zip(parts, results, strict=True):
            try:
                exchanges.append(steps.send(result))
            except StopIteration as end:
                values.append(end.value)
        if not exchanges:
            return values
        results = _exchange_values(exchanges, len(parts))


def _exchange_values(exchanges: Sequence[Exchange], ranks: int) -> list[Tensor]:
    """Each rank's result of an exchange."""
    kinds = {type(exchange) for exchange in exchanges}
    if len(exchanges) != ranks or len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__.lower() for kind in kinds))
        raise PipelineError(
            f"{len(exchanges)} of {ranks} ranks are at a {names}: every rank must join the same collectives in the same order"
        )
    values = [exchange.value for exchange in exchanges]
    match exchanges[0]:
        case Broadcast(_, source):
            return [value if rank == source else value.copy_(values[source]) for rank, value in enumerate(values)]
        case Sum(_, target):
            total = sum(values[1:], start=values[0])
            return [total if target in (None, rank) else value for rank, value in enumerate(values)]
        case Largest():
            return [torch.stack(values).amax(dim=0)] * ranks


class ThreadLane(CollectiveLane):
    """The collectives of virtual ranks: `ThreadLane.create(ranks)` gives one lane per rank."""

    def __init__(self, rank: int, shared: MeetingPoint) -> None:
        super().__init__(rank, shared.ranks)
        self._shared = shared

    @classmethod
    def create(cls, ranks: int, timeout: float = 60.0) -> list[ThreadLane]:
        """One lane per rank. A rank that takes a collective that not all ranks have joined within `timeout` seconds gets an error."""
        shared = MeetingPoint(ranks, timeout)
        return [cls(rank, shared) for rank in range(ranks)]

    def _submit(self, steps: Collective, tensors: Sequence[Tensor]) -> Future[tuple[Any, Any]]:
        future: Future[tuple[Any, Any]] = Future()
        self._shared.join(self.joined, self.rank, _JoinedPart(steps, tensors, record_event(), future, self.times))
        return future

    def _wait_for(self, future: Future[tuple[Any, Any]]) -> tuple[Any, Any]:
        if wait([future], self._shared.timeout).not_done:
            raise PipelineError(f"not all of {self.ranks} ranks have joined a collective within {self._shared.timeout:g} s")
        return future.result()

    def close(self) -> None:
        """Nothing to do: the stream is shared."""

    def abandon(self) -> None:
        self._shared.abandon()
