"""The input of one step: a batch that is split into microbatches, weighed and guarded against in-place changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.tensors.boundary import memory_overlaps
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import read_version

StageKwargs = Mapping[int, Mapping[str, Any]]
"""Keyword arguments by stage and name."""
OpenBatch = Callable[[tuple[Any, ...], Any], tuple[tuple[Any, ...], Any]]
"""Takes the labels out of a batch: called with the arguments and a default, returns the other arguments and the labels."""
Guards = list[tuple[Tensor, int, str]]
"""Tensors that no stage may change in place, each with its version before the step and the reason."""


class _Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "no target"


ABSENT: Any = _Absent()
"""The target of a step that was given none; `None` is a possible target."""


@dataclass
class StepInput:
    """The inputs, keyword arguments and targets of a step by microbatch, and the weight of each."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    """What each microbatch's loss is multiplied by, so that the sum is the loss of the whole batch."""
    weights: list[float] | None = None
    """The relative weight of each microbatch; None if losses are added as they are."""
    factor: float = 1.0
    """What gradients are multiplied by on top, as a gradient scaler asks for."""
    seed: str | None = None
    """What the random streams of this step are derived from; None leaves random numbers to torch."""
    first: int = 0
    """The index of the first microbatch among those of all data ranks, which random streams are derived from too."""
    outputs: bool = False
    losses: bool = True
    share: ResultShare = field(default_factory=ResultShare)
    guards: list[Guards] = field(default_factory=list)
    """The guarded tensors of each microbatch; empty if there are none."""

    @property
    def total(self) -> float:
        return 0.0 if self.weights is None else sum(self.weights)

    def normalise(self, total: float) -> None:
        """Set the scales from the weights; `total` is the sum of the weights of all data ranks."""
        if self.weights is None:
            self.scales = [1.0] * len(self.args)
            return
        if total <= 0 or min(self.weights) < 0:
            raise ScheduleError(f"the weights of the microbatches are {self.weights}: they must not be negative, and not all be zero")
        self.scales = [weight / total for weight in self.weights]

    def check_unchanged(self, stage: int, microbatch: int, copies: Collection[int]) -> None:
        """Refuse an in-place change of an input that is read elsewhere too.

        `copies` are the ids of inputs that the stage has copied itself and whose copies it has changed.
        """
        for tensor, version, reason in self.guards[microbatch]:
            if read_version(tensor) != version or id(tensor) in copies:
                raise ScheduleError(
                    f"stage {stage} changes in place a tensor of the batch that {reason}: clone it in stage {stage} before changing it"
                )

    def guarded(self, microbatch: int) -> dict[int, str]:
        """Return why inputs must not be changed in place, by the address of their memory."""
        guards = self.guards[microbatch]
        return {tensor.untyped_storage().data_ptr(): f"a tensor of the batch that {reason}" for tensor, _, reason in guards}


NO_INPUT = StepInput([], {}, None, [])
"""The input between steps."""


@dataclass(frozen=True)
class BatchSplitter:
    """Makes the input of each step of one pipeline: splits a batch into microbatches, or takes them ready-made."""

    inputs: mb.Dims
    targets: mb.Dims
    kwargs: mb.Dims
    """The batch dimensions of each."""
    loss: Loss
    weight: Callable[..., Any] | None
    stages: int
    microbatches: int
    open_batch: OpenBatch | None
    """For models that take one dict of inputs with the labels among them, as those of transformers do."""

    def open(self, args: tuple[Any, ...], target: Any) -> tuple[tuple[Any, ...], Any]:
        """Take the labels out of the arguments, as the target if there is none and the loss takes one."""
        if self.open_batch is None:
            return args, target
        args, labels = self.open_batch(args, ABSENT)
        return args, labels if target is ABSENT and self.loss.takes_target else target

    def split(
        self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool
    ) -> StepInput:
        """Split a batch along its batch dimension."""
        args, target = self.open(args, target)
        count = self.microbatches if microbatches is None else microbatches
        if count < 1:
            raise ScheduleError(f"{count} microbatches: at least 1 is needed")
        kwargs = {stage: dict(values) for stage, values in (stage_kwargs or {}).items()}
        dims = self.dims_of(args)
        everything = (args, None if target is ABSENT else target, *kwargs.values())
        total = mb.batch_size(everything, (dims, self.targets, *[self.kwargs] * len(kwargs)))
        sizes = mb.microbatch_sizes(total, count) if total is not None else [1] * count
        return self._weigh(
            mb.split_batch(args, dims, sizes),
            {stage: mb.split_batch(values, self.kwargs, sizes) for stage, values in kwargs.items()},
            None if target is ABSENT else mb.split_batch(target, self.targets, sizes),
            sizes if total is not None else None,
            outputs,
        )

    def take_list(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool) -> StepInput:
        """Take microbatches that are ready, of any sizes."""
        kwargs = {stage: [dict(values) for values in by_microbatch] for stage, by_microbatch in (stage_kwargs or {}).items()}
        pairs = [self.open(args if isinstance(args, tuple) else (args,), ABSENT) for args in inputs]
        if targets is None and pairs and pairs[0][1] is not ABSENT:
            targets = [labels for _, labels in pairs]
        counts = {len(values) for values in (inputs, *([] if targets is None else [targets]), *kwargs.values())}
        if counts == {0} or len(counts) > 1:
            raise ScheduleError(
                f"{sorted(counts)} inputs, targets or keyword arguments: give as many of each as there are microbatches, at least one"
            )
        args = [args for args, _ in pairs]
        dims = [(self.dims_of(one), self.targets) for one in args]
        sizes = [mb.batch_size((one, None if targets is None else targets[k]), dims[k]) for k, one in enumerate(args)]
        known = [size for size in sizes if size is not None]
        return self._weigh(args, kwargs, None if targets is None else list(targets), known if len(known) == len(sizes) else None, outputs)

    def dims_of(self, args: tuple[Any, ...]) -> mb.Dims:
        """Return the batch dimensions of the arguments; a dict of dimensions is that of a single argument."""
        return (self.inputs,) if isinstance(self.inputs, dict) and len(args) == 1 else self.inputs

    @property
    def out_dim(self) -> int:
        """The batch dimension of outputs."""
        return self.inputs if isinstance(self.inputs, int) else 0

    def _weigh(
        self,
        args: list[tuple[Any, ...]],
        kwargs: dict[int, list[dict[str, Any]]],
        targets: list[Any] | None,
        sizes: Sequence[int] | None,
        outputs: bool,
    ) -> StepInput:
        wrong = [stage for stage in kwargs if stage not in range(self.stages)]
        if wrong:
            raise ScheduleError(f"stage_kwargs for stage {wrong[0]!r}: there are stages 0 to {self.stages - 1}")
        if targets is not None and self.weight is None and len(args) > 1:
            self.loss.warn_about_ignore_index(targets)
        weights = self.loss.weights(self.weight, sizes, targets, len(args))
        guards = _find_guards([args, *kwargs.values()], targets)
        share = ResultShare(sizes=None if sizes is None else tuple((size, len(list(same))) for size, same in groupby(sizes)))
        return StepInput(args, kwargs, targets, [], weights, outputs=outputs, share=share, guards=guards)

    def check_target(self, step_input: StepInput) -> None:
        """Refuse a training step without a target, unless the loss function takes none."""
        if step_input.targets is None and not (self.loss.takes_output_only and self.weight is None):
            if self.open_batch is not None:
                raise ScheduleError("the batch has no labels, which a transformers model is trained on: give labels in it, or as target=")
            raise ScheduleError(f"the {'loss' if self.weight is None else 'weight'} function needs a target, but the step was given none")


def _find_guards(arguments: Sequence[Sequence[Any]], targets: Sequence[Any] | None) -> list[Guards]:
    """Find the tensors whose in-place change other microbatches, the loss or other stages would see; per microbatch."""
    count = len(arguments[0])
    leaves = [[_tensors(values[k]) for values in arguments] for k in range(count)]
    labels = [[] if targets is None else _tensors(targets[k]) for k in range(count)]
    uses = Counter(id(tensor) for parts in leaves for tensor in {id(t): t for part in parts for t in part}.values())
    guards: list[Guards] = []
    for parts, target in zip(leaves, labels, strict=True):
        guards.append([])
        for place, part in enumerate(parts):
            others = [tensor for other in (*parts[:place], *parts[place + 1 :], target) for tensor in other]
            for tensor in part:
                if uses[id(tensor)] > 1:
                    guards[-1].append((tensor, read_version(tensor), "other microbatches get too"))
                elif any(memory_overlaps(tensor, other) for other in others):
                    guards[-1].append((tensor, read_version(tensor), "the target or another stage's arguments have too"))
    return guards if any(guards) else []


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested]
