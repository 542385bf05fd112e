"""What a step is given, cut into microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime import microbatch as mb
from penstock.runtime.cells import Feed
from penstock.runtime.hugging_face import opened
from penstock.runtime.loss import Loss
from penstock.runtime.values import share_memory

StageKwargs = Mapping[int, Mapping[str, Any]]


class _Absent:
    """What a target is that was not given, so that None can be one."""

    def __repr__(self) -> str:
        return "no target"


ABSENT: Any = _Absent()


@dataclass(frozen=True)
class Batches:
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

    def split(self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool) -> Feed:
        """A batch, cut along its batch dimension."""
        if self.named:
            args, target = opened(args, target, ABSENT, self.loss.paired)
        count = self.microbatches if microbatches is None else microbatches
        if count < 1:
            raise ScheduleError(f"{count} microbatches: at least 1 is needed")
        given = None if target is ABSENT else target
        kwargs = {stage: dict(each) for stage, each in (stage_kwargs or {}).items()}
        dims = self.dims_of(args)
        everything = (args, given, *kwargs.values())
        total = mb.batch_size(everything, (dims, self.targets, *[self.kwargs] * len(kwargs)))
        sizes = mb.sizes_of(total, count) if total is not None else [1] * count
        feed = Feed(
            mb.split(args, dims, sizes),
            {stage: mb.split(each, self.kwargs, sizes) for stage, each in kwargs.items()},
            None if target is ABSENT else mb.split(given, self.targets, sizes),
            [],
            outputs=outputs,
        )
        feed.guards = _guards(feed)
        return self._weighed(feed, sizes if total is not None else None)

    def ready(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool) -> Feed:
        """Microbatches as they are given."""
        kwargs = {stage: [dict(each) for each in given] for stage, given in (stage_kwargs or {}).items()}
        if self.named and inputs:
            pairs = [opened(each if isinstance(each, tuple) else (each,), ABSENT, ABSENT, self.loss.paired) for each in inputs]
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
        feed = Feed(pieces, kwargs, None if targets is None else list(targets), [], outputs=outputs)
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

    def _weighed(self, feed: Feed, sizes: Sequence[int] | None) -> Feed:
        wrong = [stage for stage in feed.kwargs if stage not in range(self.stages)]
        if wrong:
            raise ScheduleError(f"stage_kwargs for stage {wrong[0]!r}: there are stages 0 to {self.stages - 1}")
        if feed.targets is not None and self.weight is None and len(feed.args) > 1:
            self.loss.warn_of_ignored(feed.targets)
        feed.share.sizes = None if sizes is None else tuple((size, len(list(same))) for size, same in groupby(sizes))
        feed.weights = self.loss.weights(self.weight, sizes, feed.targets, len(feed.args))
        return feed

    def check_target(self, feed: Feed) -> None:
        """Training needs a target, unless the loss does without."""
        if feed.targets is None and not (self.loss.alone and self.weight is None):
            if self.named:
                raise ScheduleError(
                    "the batch has no labels, which a model of transformers' is trained on: give labels in it, or as target="
                )
            raise ScheduleError(f"the {'loss' if self.weight is None else 'weight'} function needs a target, but the step was given none")


Guards = list[tuple[Tensor, int, str]]


def _guards(feed: Feed) -> list[Guards]:
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
                elif any(share_memory(tensor, other) for other in others):
                    guards.append((tensor, tensor._version, "the target or another stage's arguments have too"))
        found.append(guards)
    return found if any(found) else []


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested]
