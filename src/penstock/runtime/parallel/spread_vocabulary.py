"""A rank's part of a vocabulary that is spread over the ranks of a pipeline: its rows of both ends, and the lane of its collectives.

The ranks' threads wait for collectives as they wait for messages: others go on meanwhile, and a failure of any rank or the deadline ends
the wait. A failed step abandons the lane, because some ranks have joined collectives that others never will, and the first step after any
failure opens a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.ir.table import Table
from penstock.runtime.batch.loss import TokenCrossEntropy, is_on_host
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.device.timing import clock
from penstock.runtime.model.spread_ends import SpreadEnds
from penstock.runtime.model.tied_parameters import Gather, Place
from penstock.runtime.parallel.collective_lane import CollectiveLane, JoinedCollective, MeetingPoint, ProcessLane, ThreadLane
from penstock.runtime.parallel.vocabulary import SpreadEmbedding, SpreadHead
from penstock.runtime.tensors.tensor_rows import TensorRows
from penstock.runtime.torch_internals.tensors import assert_on_device
from penstock.runtime.transport.group import Group
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.subgroup import ProcessSubgroup, Subgroup, get_subgroup
from penstock.runtime.transport.threads import VirtualGroup

_WAIT = "all ranks to join a collective of the vocabulary"
_LOOK = 0.05
"""Seconds between two looks for failures of other processes."""


class SpreadVocabulary:
    """A rank's rows of the embedding and of the head, as far as they are spread. Every rank of the pipeline makes one, at the same time."""

    def __init__(
        self,
        ends: SpreadEnds,
        entropy: TokenCrossEntropy | None,
        table: Table,
        *,
        group: Group,
        rank: int,
        deadline: float,
        shares: Sequence[float] = (),
    ) -> None:
        """`entropy` is the loss, which the ranks compute together if the head is spread; `shares` the part of the rows of each rank."""
        self.group, self.rank, self.deadline = group, rank, deadline
        lane: CollectiveLane = self._open_lane()
        self._lane: CollectiveLane | None = lane
        """None after a failed step, until the next one."""
        self._generation = group.generation
        """That of the group when the lane was opened: a rank may learn of a failure between steps, and have its lane still."""
        self.names = {"embedding": "", "head": ""}
        """The names of the two layers in the model."""
        self.are_tied = ends.are_tied
        """Whether both share one weight."""
        self.entropy, self.first_input, self.logit_map = entropy, ends.first_input, ends.logits
        self.args: list[tuple[Any, ...]] = []
        """The arguments of each microbatch of the step."""
        self.tokens: list[Tensor] = []
        """The tokens of each microbatch of the step, as the embedding needs them."""
        self.targets: list[Tensor] | None = None
        """The target of each position of each microbatch of the step, as the head needs them."""
        self._rows = {"embedding": 0, "head": 0}
        self.stages = table.stages
        self.embedding: SpreadEmbedding | None = None
        self.head: SpreadHead | None = None
        rank_of = table.placement.rank_of
        if ends.embedding is not None:
            self.names["embedding"], words = ends.embedding
            self._rows["embedding"] = len(words.weight)
            owner, padding = rank_of(0, 0), words.padding_idx
            self.embedding = SpreadEmbedding(words.weight, lane=lane, owner=owner, padding_idx=padding, shares=shares)
        if ends.head is not None:
            assert entropy is not None
            self.names["head"], linear = ends.head
            self._rows["head"] = len(linear.weight)
            rows = self.embedding if self.are_tied and self.embedding is not None else linear.weight
            self.head = SpreadHead(
                rows,
                linear.bias,
                lane=lane,
                owner=rank_of(table.stages - 1, 0),
                ignore_index=entropy.ignore_index,
                logit_scale=ends.logits.scale,
                logit_cap=ends.logits.cap,
                shares=shares,
            )

    # Parameters -------------------------------------------------------------------------------------------------------

    def _list_rows(self) -> Iterator[tuple[str, Place, slice, nn.Parameter]]:
        """The name of each whole parameter, its place behind or before all stages, this rank's rows of it, and these.

        A weight that both ends share has the embedding's name.
        """
        if self.embedding is not None:
            yield f"{self.names['embedding']}.weight", (-1, self.embedding.first), self.embedding.rows, self.embedding.weight
        if self.head is not None:
            if not self.are_tied:
                yield f"{self.names['head']}.weight", (self.stages, self.head.first), self.head.rows, self.head.weight
            if self.head.bias is not None:
                yield f"{self.names['head']}.bias", (self.stages + 1, self.head.first), self.head.rows, self.head.bias

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's rows under the model's own names with the numbers of the rows: `embedding.weight[0:1000]`."""
        return ((f"{name}[{rows.start}:{rows.stop}]", parameter) for name, _, rows, parameter in self._list_rows())

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's rows."""
        return (parameter for _, parameter in self.named_parameters())

    def places(self) -> dict[str, Place]:
        """The place of each of these parameters in the order of the model."""
        return {f"{name}[{rows.start}:{rows.stop}]": place for name, place, rows, _ in self._list_rows()}

    def describe_rows(self) -> dict[str, tuple[str, slice]]:
        """The name of the whole parameter and the place in it of each of these parameters."""
        return {f"{name}[{rows.start}:{rows.stop}]": (name, rows) for name, _, rows, _ in self._list_rows()}

    def row_shards(self) -> dict[str, TensorRows]:
        """This rank's rows under the names of the whole parameters; a weight that both ends share has both names, as in a state dict."""
        totals = self._rows["embedding"], self._rows["head"]
        shards = {name: TensorRows(parameter, rows.start, totals[stage >= 0]) for name, (stage, _), rows, parameter in self._list_rows()}
        if self.are_tied:
            shards[f"{self.names['head']}.weight"] = shards[f"{self.names['embedding']}.weight"]
        return shards

    def pair_tensors(self, ends: SpreadEnds, stages: Sequence[int]) -> list[tuple[Tensor, TensorRows | None]]:
        """The tensors of both ends that this rank needs values of, with its rows of parameters; with stage 0, buffers of the embedding."""
        pairs: list[tuple[Tensor, TensorRows | None]] = []
        if ends.embedding is not None and self.embedding is not None:
            words, total = ends.embedding[1], self._rows["embedding"]
            pairs.append((words.weight, TensorRows(self.embedding.weight, self.embedding.first, total)))
            pairs += [(buffer, None) for buffer in words.buffers() if 0 in stages]
        if ends.head is not None and self.head is not None:
            linear, first, total = ends.head[1], self.head.first, self._rows["head"]
            if not self.are_tied:
                pairs.append((linear.weight, TensorRows(self.head.weight, first, total)))
            if self.head.bias is not None:
                pairs.append((linear.bias, TensorRows(self.head.bias, first, total)))
        return pairs

    def gather_weights(self, gather: Gather) -> dict[str, Tensor]:
        """The whole parameters by name, on every rank."""
        everyone = gather("vocabulary", {name: parameter.detach().cpu() for name, _, _, parameter in self._list_rows()})
        return {name: torch.cat([rows[name] for rows in everyone]) for name in everyone[0]}

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin_step(self, feed: StepInput, *, flat: bool, training: bool) -> None:
        """Refuse a batch that shares of a vocabulary cannot be computed for, and open a new lane if the last step has failed.

        With `flat`, targets may have one dimension only, as for `torch.nn.functional.cross_entropy`.
        """
        self.end_step()
        self.args = feed.args
        if self.embedding is not None:
            self.tokens = self._take_tokens(feed, self.embedding)
        if self.head is not None:
            assert self.entropy is not None
            feed.share.wants_logits = feed.outputs
            if feed.targets is None and training:
                raise ScheduleError("every rank has a share of the head and the loss: give every rank the target of the step")
            for targets in feed.targets or ():
                if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype is torch.bool:
                    raise ScheduleError("the target of a head that is spread over the ranks is a tensor of token numbers")
                if flat and targets.dim() != 1:
                    raise ScheduleError(
                        f"targets have {targets.dim()} dimensions, for which cross_entropy expects the vocabulary in dimension 1 of the "
                        "output: give loss_fn=TokenCrossEntropy()"
                    )
            self.targets = None if feed.targets is None else [targets.long() for targets in feed.targets]
            if self.targets is not None:
                _check_range(self.targets, self._rows["head"], "target", ignored=self.entropy.ignore_index)
                self.targets = list(map(self.entropy.align, self.targets))
        if self.head is not None and not training:
            self._agree_on_targets(feed)
        self.group.enter(self.rank, self.deadline)
        if self._lane is None or self._generation != self.group.generation:
            self.abandon()
            self._lane, self._generation = self._open_lane(), self.group.generation
            for layer in (self.embedding, self.head):
                if layer is not None:
                    layer.restart(self._lane)

    def end_step(self) -> None:
        """Let go of the batch."""
        self.args, self.tokens, self.targets = [], [], None

    def _take_tokens(self, feed: StepInput, embedding: SpreadEmbedding) -> list[Tensor]:
        """The tokens of each microbatch; refuses a step without them, and rows whose gradient no rank could compute."""
        if embedding.frozen and embedding.weight.requires_grad:
            raise ScheduleError(
                f"the rows of {self.names['embedding']}.weight were frozen when the pipeline was created, so no rank gets their "
                "gradient: set requires_grad before, and create another pipeline"
            )
        everything = [self.first_input.find_tokens(args) for args in feed.args]
        for tokens in everything:
            if not isinstance(tokens, Tensor) or tokens.is_floating_point():
                raise ScheduleError(
                    "every rank has a share of the embedding: give every rank the tokens, as the only positional argument of the step, or "
                    "to a transformers model as input_ids in it"
                )
            if tokens.dtype not in (torch.int64, torch.int32):
                raise ScheduleError(f"the tokens are {tokens.dtype}, but an embedding takes torch.int64 or torch.int32: give tokens.long()")
        _check_range(everything, self._rows["embedding"], "token")
        return everything

    def _agree_on_targets(self, feed: StepInput) -> None:
        """Refuse an evaluation with targets on some ranks only, whose COMBINEs would not fit together."""
        given: list[bool] = self.group.gather(self.rank, "targets of the vocabulary", feed.targets is not None, self.deadline)
        if any(given) and not all(given):
            described = self.group.describe_rank(given.index(False))
            raise ScheduleError(f"every rank has a share of the head and the loss, but {described} got no target: give all or none one")

    def record_times(self, records: bool) -> None:
        """Note when the collectives of the next step begin and end, or leave it."""
        assert self._lane is not None
        self._lane.times = [] if records else None

    def list_times(self) -> list[tuple[Any, Any]]:
        """When each collective of the last step, which was recorded, began on this rank and when it ended."""
        assert self._lane is not None
        assert self._lane.times is not None
        self._lane.settle()
        return self._lane.times

    def abandon(self) -> None:
        """Leave a step that has failed. The next one opens a new lane together with all other ranks, which raise the failure too."""
        if self._lane is not None:
            self._lane.abandon()
            self._lane = None

    # Lanes ------------------------------------------------------------------------------------------------------------

    def _open_lane(self) -> CollectiveLane:
        """A lane between all ranks, which all open at the same time."""
        gather: Callable[[str, Any], list[Any]] = partial(self.group.gather, self.rank, deadline=self.deadline)
        parent, rank = self._find_parent()
        if isinstance(parent, VirtualGroup):
            shared = gather("lane of the vocabulary", MeetingPoint(self.group.ranks, self.deadline) if self.rank == 0 else None)[0]
            virtual = ThreadLane(self.rank, shared)
            virtual.on_join, virtual.before_take = parent.notify, partial(self._wait_for_threads, parent, rank)
            virtual.on_take = self._note_waited
            return virtual
        assert isinstance(parent, Processes)
        members = self.group if isinstance(self.group, ProcessSubgroup) else get_subgroup(parent, parent.members)
        name = gather("lane of the vocabulary", uuid4().hex)[0]  # each pipeline's, and again after failures
        lane = ProcessLane(members.connect(f"vocabulary/{name}", self.deadline))
        lane.before_take, lane.on_take = partial(self._wait_for_processes, parent), self._note_waited
        return lane

    def _find_parent(self) -> tuple[Group, int]:
        """The group that the pipeline's is a part of, as in a mesh, or another order of, as in a cluster plan; this rank's number in it."""
        if isinstance(self.group, Subgroup):
            return self.group.parent, self.group.members[self.rank]
        return self.group, self.rank

    def _wait_for_threads(self, group: VirtualGroup, rank: int, collective: JoinedCollective) -> None:
        """Let other virtual ranks run until all have joined: the last one runs the collective."""
        group.wait(rank, collective.future.done, _WAIT, self.deadline)
        if collective.future.exception() is not None:
            group.enter(rank, self.deadline)  # raises the failure that has ended the collective

    def _wait_for_processes(self, group: Processes, collective: JoinedCollective) -> None:
        """Wait for a collective, or until another rank of the group fails, which has all ranks of a mesh."""
        while not collective.future.done():
            wait([collective.future], _LOOK)
            if not collective.future.done():
                group.check_wait(_WAIT, self.deadline)
        group.activity(group.rank).waits = None
        error = collective.future.exception()
        if isinstance(error, RuntimeError):
            group.raise_lost(group.rank, _WAIT, error)

    def _note_waited(self) -> None:
        """Count the time so far as a wait, not as work."""
        activity = self.group.activity(self.rank)
        activity.began = clock()
        if activity.watch is not None:
            activity.watch.begin_again()


def _check_range(numbers: Sequence[Tensor], rows: int, what: str, ignored: int | None = None) -> None:
    """Refuse numbers outside of the vocabulary. Those on a device are checked there, because the host would wait for them."""
    together = torch.cat([part.flatten() for part in numbers])
    if not is_on_host(together):
        inside = (together >= 0) & (together < rows)
        inside = inside if ignored is None else inside | (together == ignored)
        with suppress(NotImplementedError):  # on devices that have no such check
            assert_on_device(inside.all(), f"a {what} is outside of the vocabulary of {rows} rows")
        return
    counted = together if ignored is None else together[together != ignored]
    if counted.numel():
        low, high = (int(end) for end in torch.aminmax(counted))
        if low < 0 or high >= rows:
            raise ScheduleError(f"{what} {low if low < 0 else high} is outside of the vocabulary of {rows} rows")
