"""The step of all replicas together, after ranks were lost: one input for the microbatches of all, and each replica's part of the result.

Microbatch k of replica d is microbatch k x replicas + d of the joint step. A rank has the batch of its own replica only, so ranks that run
microbatches of another replica are sent what they need of it by a survivor of that replica. For random streams and results, microbatches
keep the numbers that they have without a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.planner.losses import Survivors
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.step_input import Guards, StepInput

Part = str | int
"""A part of a batch: `args`, `targets`, or the keyword arguments of a stage, by its number."""
ARGS, TARGETS = "args", "targets"
Exchange = Callable[[int, int, Any], Any]
"""Sends a value from one survivor to another: called on both with the two ranks, and the value on the sender; returns it on both."""


@dataclass(frozen=True)
class Offer:
    """The parts of its replica's batch that one survivor has, which it tells all others."""

    parts: frozenset[Part]
    weights: tuple[float, ...] | None
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, step_input: StepInput) -> Offer:
        parts: set[Part] = {stage for stage, values in step_input.kwargs.items() if any(values)}
        parts |= {ARGS} if any(step_input.args) else set()
        parts |= {TARGETS} if step_input.targets is not None else set()
        return cls(frozenset(parts), None if step_input.weights is None else tuple(step_input.weights), step_input.order)


@dataclass(frozen=True)
class BatchTransfer:
    """A part of some microbatches that one survivor sends to another."""

    source: int
    target: int
    replica: int
    part: Part
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class JointBatch:
    """How a step's batch is distributed over the survivors; the same on each."""

    survivors: Survivors
    placement: Placement
    """Of one pipeline."""
    graph: StageGraph
    offers: Sequence[Offer]
    """Of each survivor."""
    count: int
    """Microbatches per replica."""

    def list_transfers(self) -> list[BatchTransfer]:
        """Everything that has to be sent, in an order that is the same on all ranks; refused if no survivor has it."""
        needed: dict[tuple[int, int, int, Part], list[int]] = {}
        stages = self._list_stages()
        for replica in {replica for _, replica in self.survivors.lost}:
            for microbatch in range(self.count):
                for part, stage in stages:
                    place = self.placement.rank_of(stage, microbatch), replica
                    if place not in self.survivors.ranks:
                        target = self.survivors.find_taker(place, microbatch)
                        needed.setdefault((replica, self._find_source(replica, part), target, part), []).append(microbatch)
        order = sorted(needed, key=lambda key: (*key[:3], str(key[3])))
        return [
            BatchTransfer(source, target, replica, part, tuple(needed[replica, source, target, part]))
            for replica, source, target, part in order
        ]

    def _list_stages(self) -> list[tuple[Part, int]]:
        """The parts that any rank was given, and the stage that takes each."""
        offered = {part for offer in self.offers for part in offer.parts}
        ends = [stage for stage in range(self.graph.stages) if not self.graph.outputs_of(stage)]
        fronts = [stage for stage in range(self.graph.stages) if not self.graph.inputs_of(stage)]
        stages: list[tuple[Part, int]] = [(ARGS, stage) for stage in fronts if ARGS in offered]
        stages += [(TARGETS, stage) for stage in ends if TARGETS in offered]
        return stages + [(part, part) for part in sorted(part for part in offered if isinstance(part, int))]

    def _list_members(self, replica: int) -> list[int]:
        """The survivors of a replica, at least one."""
        return [rank for rank, (_, own) in enumerate(self.survivors.places) if own == replica]

    def _find_source(self, replica: int, part: Part) -> int:
        members = self._list_members(replica)
        for rank in members:
            if part in self.offers[rank].parts:
                return rank
        what = {ARGS: "the inputs", TARGETS: "the target"}.get(str(part), f"the keyword arguments of stage {part}")
        raise PipelineError(
            f"a rank of replica {replica} is lost, and none of the others was given {what}: give every rank of a pipeline the whole batch, "
            "so that the others can go on when one is lost"
        )

    def _find_weights(self, replica: int) -> tuple[float, ...] | None:
        """The weights of a replica's microbatches: those of a rank that was given the target, if there is one."""
        offers = [self.offers[rank] for rank in self._list_members(replica)]
        return next((offer for offer in offers if TARGETS in offer.parts), offers[0]).weights

    def merge(self, own: StepInput, rank: int, exchange: Exchange) -> StepInput:
        """The joint input on a survivor, from that of its own replica and what others send."""
        data, replica = self.survivors.data, self.survivors.places[rank][1]
        numbers = [k * data + replica for k in range(self.count)]
        total = self.count * data
        args: list[Any] = [()] * total
        targets: list[Any] | None = None if not any(TARGETS in offer.parts for offer in self.offers) else [None] * total
        kwargs: dict[int, list[Any]] = {part: [{}] * total for part, _ in self._list_stages() if isinstance(part, int)}
        merged: dict[Part, list[Any] | None] = dict(kwargs.items())
        merged[ARGS], merged[TARGETS] = args, targets
        parts: list[Part] = [ARGS, TARGETS, *own.kwargs]
        for part in parts:
            place, values = merged.get(part), _read(own, part)
            if place is not None and values:
                for number, value in zip(numbers, values, strict=True):
                    place[number] = value
        for transfer in self.list_transfers():
            if rank not in (transfer.source, transfer.target):
                continue
            sent = [_read(own, transfer.part)[k] for k in transfer.microbatches] if rank == transfer.source else None
            received = exchange(transfer.source, transfer.target, sent)
            place = merged[transfer.part]
            if rank == transfer.target and place is not None:
                for k, value in zip(transfer.microbatches, received, strict=True):
                    place[k * data + transfer.replica] = value
        return self._build(own, numbers, args, kwargs, targets)

    def _build(
        self, own: StepInput, numbers: Sequence[int], args: list[Any], kwargs: dict[int, list[Any]], targets: list[Any] | None
    ) -> StepInput:
        data, total = self.survivors.data, len(args)
        by_replica = [self._find_weights(replica) for replica in range(data)]
        weights: list[float] | None = None
        if all(replica is not None for replica in by_replica):
            weights = [(by_replica[j % data] or ())[j // data] for j in range(total)]
        guards: list[Guards] = [[] for _ in range(total)] if own.guards else []
        for number, guard in zip(numbers, own.guards, strict=False):
            guards[number] = guard
        joint = replace(own, args=args, kwargs=kwargs, targets=targets, weights=weights, guards=guards, share=replace(own.share))
        orders = [self.offers[self._list_members(replica)[0]].order for replica in range(data)]
        joint.order = joint.share.order = tuple(j % data * self.count + _number_of(orders[j % data], j // data) for j in range(total))
        joint.first = 0
        joint.normalise(joint.total)
        return joint

    # Results ----------------------------------------------------------------------------------------------------------

    def take_replica(self, share: ResultShare, replica: int) -> ResultShare:
        """A replica's part of what a rank has computed in a joint step, numbered as in the replica's own batch."""
        first = replica * self.count
        own = range(first, first + self.count)
        by_place = {
            name: {(stage, m - first): value for (stage, m), value in values.items() if m in own} for name, values in share.metrics.items()
        }
        return replace(
            share,
            losses={m - first: value for m, value in share.losses.items() if m in own},
            side={(stage, m - first): value for (stage, m), value in share.side.items() if m in own},
            metrics={name: values for name, values in by_place.items() if values},
            outputs={m - first: value for m, value in share.outputs.items() if m in own},
        )

    def keep_own(self, shares: Sequence[ResultShare], replica: int) -> list[ResultShare]:
        """The shares of all survivors, without what those of other replicas tell of their batches, which may differ."""
        return [
            share
            if own == replica
            else replace(share, sizes=None, times=None if share.times is None else replace(share.times, tokens=None))
            for share, (_, own) in zip(shares, self.survivors.places, strict=True)
        ]


def _read(step_input: StepInput, part: Part) -> Sequence[Any]:
    if isinstance(part, int):
        return step_input.kwargs[part]
    return step_input.args if part == ARGS else step_input.targets or ()


def _number_of(order: tuple[int, ...] | None, microbatch: int) -> int:
    return microbatch if order is None else order[microbatch]
