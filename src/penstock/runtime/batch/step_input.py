"""Where a rank keeps what it has made or received until it is used.

What a step is given, cut into microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.model.hugging_face import open_batch
from penstock.runtime.tensors.boundary import memory_overlaps


class _Empty:
    """What is in a cell that nothing has been put into."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()


@dataclass
class StepInput:
    """What one step is fed with: inputs, keyword arguments and targets by microbatch, and how much each counts."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    """What each microbatch's loss is multiplied by, so that the sum is the loss of the whole batch."""
    weights: list[float] | None = None
    """How much each counts against the others; None where losses are added as they are."""
    factor: float = 1.0
    """What gradients are scaled by on top, as a gradient scaler asks for."""
    seed: str | None = None
    """What the random streams of this step are derived from; None leaves random numbers to torch."""
    first: int = 0
    """The number of the first microbatch among those of all data ranks: streams are by that."""
    outputs: bool = False
    losses: bool = True
    share: ResultShare = field(default_factory=ResultShare)
    guards: list[list[tuple[Tensor, int, str]]] = field(default_factory=list)
    """For each microbatch the tensors that no stage may change in place, each with its version and the reason; empty if there are none."""

    @property
    def total(self) -> float:
        return 0.0 if self.weights is None else sum(self.weights)

    def check_unchanged(self, stage: int, microbatch: int, copies: Collection[int]) -> None:
        """Refuse a change in place of an input that is read elsewhere too; `copies` are inputs by id whose copies were changed."""
        for tensor, version, reason in self.guards[microbatch]:
            if tensor._version != version or id(tensor) in copies:
                raise ScheduleError(
                    f"stage {stage} changes in place a tensor of the batch that {reason}: clone it in stage {stage} before changing it"
                )

    def guarded(self, microbatch: int) -> dict[int, str]:
        """Why inputs must not be changed in place, by the address of their memory."""
        guards = self.guards[microbatch]
        return {tensor.untyped_storage().data_ptr(): f"a tensor of the batch that {reason}" for tensor, _, reason in guards}

    def normalise(self, total: float) -> None:
        """Set the scales, out of the weights of all microbatches, those of other data ranks included."""
        if self.weights is None:
            self.scales = [1.0] * len(self.args)
            return
        if total <= 0 or min(self.weights) < 0:
            raise ScheduleError(f"the weights of the microbatches are {self.weights}: they must not be negative, and not all be zero")
        self.scales = [each / total for each in self.weights]


NO_INPUT = StepInput([], {}, None, [])


StageKwargs = Mapping[int, Mapping[str, Any]]


class _Absent:
    """What a target is that was not given, so that None can be one."""

    def __repr__(self) -> str:
        return "no target"


ABSENT: Any = _Absent()


@dataclass(frozen=True)
class BatchSplitter:
    """How batches become microbatches, and what these count."""

    inputs: mb.Dims
    targets: mb.Dims
    kwargs: mb.Dims
    """The batch dimensions of each."""
    loss: Loss
    weight: Callable[..., Any] | None
    stages: int
    microbatches: int
    named: bool
    """Whether arguments have names, as Hugging Face's models take them, the labels among them."""

    def split(
        self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool
    ) -> StepInput:
        """A batch, cut along its batch dimension."""
        if self.named:
            args, target = open_batch(args, target, ABSENT, self.loss.paired)
        count = self.microbatches if microbatches is None else microbatches
        if count < 1:
            raise ScheduleError(f"{count} microbatches: at least 1 is needed")
        given = None if target is ABSENT else target
        kwargs = {stage: dict(each) for stage, each in (stage_kwargs or {}).items()}
        dims = self.dims_of(args)
        everything = (args, given, *kwargs.values())
        total = mb.batch_size(everything, (dims, self.targets, *[self.kwargs] * len(kwargs)))
        sizes = mb.microbatch_sizes(total, count) if total is not None else [1] * count
        feed = StepInput(
            mb.split_batch(args, dims, sizes),
            {stage: mb.split_batch(each, self.kwargs, sizes) for stage, each in kwargs.items()},
            None if target is ABSENT else mb.split_batch(given, self.targets, sizes),
            [],
            outputs=outputs,
        )
        feed.guards = _guards(feed)
        return self._weighed(feed, sizes if total is not None else None)

    def ready(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool) -> StepInput:
        """Microbatches as they are given."""
        kwargs = {stage: [dict(each) for each in given] for stage, given in (stage_kwargs or {}).items()}
        if self.named and inputs:
            pairs = [open_batch(each if isinstance(each, tuple) else (each,), ABSENT, ABSENT, self.loss.paired) for each in inputs]
            inputs = [args for args, _ in pairs]
            targets = [label for _, label in pairs] if targets is None and pairs[0][1] is not ABSENT else targets
        counts = {len(each) for each in (inputs, *([] if targets is None else [targets]), *kwargs.values())}
        if counts == {0} or len(counts) > 1:
            raise ScheduleError(
                f"{sorted(counts)} inputs, targets or keyword arguments: give as many of each as there are microbatches, at least one"
            )
        pieces = [each if isinstance(each, tuple) else (each,) for each in inputs]
        sizes = [self._size(piece, None if targets is None else targets[k]) for k, piece in enumerate(pieces)]
        known = [size for size in sizes if size is not None]
        feed = StepInput(pieces, kwargs, None if targets is None else list(targets), [], outputs=outputs)
        feed.guards = _guards(feed)
        return self._weighed(feed, known if len(known) == len(sizes) else None)

    def _size(self, args: tuple[Any, ...], target: Any) -> int | None:
        return mb.batch_size((args, target), (self.dims_of(args), self.targets))

    def dims_of(self, args: tuple[Any, ...]) -> mb.Dims:
        """The batch dimensions of the arguments; a dict of them is that of the only one."""
        return (self.inputs,) if isinstance(self.inputs, dict) and len(args) == 1 else self.inputs

    @property
    def out_dim(self) -> int:
        """The batch dimension of what comes out."""
        return self.inputs if isinstance(self.inputs, int) else 0

    def _weighed(self, feed: StepInput, sizes: Sequence[int] | None) -> StepInput:
        wrong = [stage for stage in feed.kwargs if stage not in range(self.stages)]
        if wrong:
            raise ScheduleError(f"stage_kwargs for stage {wrong[0]!r}: there are stages 0 to {self.stages - 1}")
        if feed.targets is not None and self.weight is None and len(feed.args) > 1:
            self.loss.warn_of_ignored(feed.targets)
        feed.share.sizes = None if sizes is None else tuple((size, len(list(same))) for size, same in groupby(sizes))
        feed.weights = self.loss.weights(self.weight, sizes, feed.targets, len(feed.args))
        return feed

    def check_target(self, feed: StepInput) -> None:
        """Training needs a target, unless the loss does without."""
        if feed.targets is None and not (self.loss.alone and self.weight is None):
            if self.named:
                raise ScheduleError(
                    "the batch has no labels, which a model of transformers' is trained on: give labels in it, or as target="
                )
            raise ScheduleError(f"the {'loss' if self.weight is None else 'weight'} function needs a target, but the step was given none")


Guards = list[tuple[Tensor, int, str]]


def _guards(feed: StepInput) -> list[Guards]:
    """The tensors of each microbatch whose change in place would be seen elsewhere too: by other microbatches, the loss or other stages."""
    count = len(feed.args)
    columns: list[list[Any]] = [list(feed.args), *map(list, feed.kwargs.values())]
    leaves = [[_tensors(column[k]) for column in columns] for k in range(count)]
    targets = [[] if feed.targets is None else _tensors(feed.targets[k]) for k in range(count)]
    uses = Counter(id(tensor) for parts in leaves for tensor in {id(t): t for part in parts for t in part}.values())
    found: list[Guards] = []
    for parts, target in zip(leaves, targets, strict=True):
        guards: Guards = []
        for place, part in enumerate(parts):
            others = [tensor for other in (*parts[:place], *parts[place + 1 :], target) for tensor in other]
            for tensor in part:
                if uses[id(tensor)] > 1:
                    guards.append((tensor, tensor._version, "other microbatches get too"))
                elif any(memory_overlaps(tensor, other) for other in others):
                    guards.append((tensor, tensor._version, "the target or another stage's arguments have too"))
        found.append(guards)
    return found if any(found) else []


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested]
