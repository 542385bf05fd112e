"""The input of one step: a batch that is split into microbatches, weighed and guarded against in-place changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.ir.schedule import Schedule
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss, read_numbers
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.slices import SequenceCutter, share_weights, token_shares
from penstock.runtime.tensors.boundary import memory_overlaps
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import read_version

StageKwargs = Mapping[int, Mapping[str, Any]]

"""Keyword arguments by stage and name."""
OpenBatch = Callable[[tuple[Any, ...], Any], tuple[tuple[Any, ...], Any, Any]]
"""Takes the labels out of a batch: called with the arguments and a default, returns the other arguments, the labels, and the number of
labels that the loss is divided by (a number, or a tensor with one element), if the batch has one, else None."""
Guards = list[tuple[Tensor, int, str]]
"""Tensors that no stage may change in place, each with its version before the step and the reason."""


def add_model_kwargs(stage_kwargs: StageKwargs | None, kwargs: Mapping[str, Any]) -> StageKwargs | None:
    """Add the keyword arguments of the model, which its first stage gets, to those of stages."""
    if not kwargs:
        return stage_kwargs
    first = dict((stage_kwargs or {}).get(0, {}))
    twice = sorted(first.keys() & kwargs.keys())
    if twice:
        raise ScheduleError(f"{twice[0]} is given twice: as a keyword argument and in stage_kwargs of stage 0")
    return {**(stage_kwargs or {}), 0: {**first, **kwargs}}


class _Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "no target"


ABSENT: Any = _Absent()
"""The target of a step that was given none; `None` is a possible target."""


@dataclass
class StepInput:
    """The inputs, keyword arguments and targets of a step by microbatch, and the weight of each.

    With slices, all lists have one entry per slice of each microbatch instead.
    """

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    """The factor of each microbatch's loss, so that the sum is the loss of the whole batch."""
    weights: list[float] | None = None
    """The relative weight of each microbatch; None if losses are added as they are."""
    items: float | None = None
    """The divisor of the weighted losses, if the batch has one: the weight of all steps and data ranks that make up one update."""
    factor: float = 1.0
    """A further factor of the gradients, for a gradient scaler."""
    seed: str | None = None
    """The seed of this step's random streams; None leaves random numbers to torch."""
    first: int = 0
    """The index of the first microbatch among those of all data ranks, which random streams are derived from too."""
    outputs: bool = False
    losses: bool = True
    share: ResultShare = field(default_factory=ResultShare)
    guards: list[Guards] = field(default_factory=list)
    """The guarded tensors of each microbatch; empty if there are none."""
    slices: SliceShares | None = None
    """How much slices count in their microbatches; None if sequences are not cut."""
    order: tuple[int, ...] | None = None
    """The caller's number of each microbatch if they run in another order, see `permute`."""
    schedule: Schedule | None = None
    """The schedule of this step, if it is not the pipeline's own."""
    tokens: float | None = None
    """The sum of the weights, if the pipeline was given a function for them and this rank a target."""
    step: int | None = None
    """How many training steps were run before this one, if ranks may be lost and come back."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """The tensors of the input and their versions before the step, if it may have to be run again."""

    @property
    def microbatches(self) -> int:
        return len(self.args) if self.slices is None else len(self.args) // self.slices.count

    @property
    def microbatch_scales(self) -> list[float]:
        """The factor of the loss of each whole microbatch."""
        slices = self.slices
        return self.scales if slices is None else [slices.scale(self, microbatch) for microbatch in range(self.microbatches)]

    def permute(self, order: Sequence[int]) -> None:
        """Run the microbatches in another order: the caller's microbatch `order[k]` becomes microbatch k of the schedule."""
        self.order = self.share.order = tuple(order)
        if self.slices is not None:
            order = self.order = tuple(self.slices.permute(order))
        self.args = [self.args[k] for k in order]
        self.kwargs = {stage: [values[k] for k in order] for stage, values in self.kwargs.items()}
        self.targets = None if self.targets is None else [self.targets[k] for k in order]
        self.weights = None if self.weights is None else [self.weights[k] for k in order]
        self.guards = [self.guards[k] for k in order] if self.guards else []

    def note_versions(self) -> None:
        """Make sure that `renew` notices if a stage changes the input in place."""
        self.versions = [(tensor, read_version(tensor)) for tensor in _list_tensors((self.args, self.kwargs, self.targets))]

    def copy_inference_tensors(self) -> None:
        """Replace the tensors that were made under `torch.inference_mode()`: whether they change could not be watched."""
        everything = self.args, self.kwargs, self.targets
        if any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in pytree.tree_leaves(everything)):
            self.args, self.kwargs, self.targets = pytree.tree_map(_copy_if_inference, everything)

    def renew(self) -> StepInput:
        """Return the same input for another attempt at the step; refused if a stage has changed it in place."""
        if any(read_version(tensor) != version for tensor, version in self.versions):
            raise ScheduleError(
                "the step has to be run again because a rank was lost, but a stage has changed a tensor of the batch in place: clone it "
                "before changing it"
            )
        empty: dict[str, Any] = {name: {} for name in ("losses", "side", "metrics", "outputs", "logits", "whole")}
        return replace(self, share=replace(self.share, times=None, **empty), scales=[])

    def number_of(self, microbatch: int) -> int:
        """The number of a microbatch, or slice, among those of all data ranks, in the caller's order; random streams derive from it."""
        return self.first + (microbatch if self.order is None else self.order[microbatch])

    @property
    def total(self) -> float:
        return 0.0 if self.weights is None else sum(self.weights)

    def normalise(self, total: float) -> None:
        """Set the scales from the weights; `total` is the sum of the weights of all data ranks, unless the batch has another number."""
        if self.weights is None:
            self.scales = [1.0] * len(self.args)
            return
        total = total if self.items is None else self.items
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

    def list_guarded(self, microbatch: int) -> dict[int, str]:
        """Return why inputs must not be changed in place, by the address of their memory."""
        guards = self.guards[microbatch]
        return {tensor.untyped_storage().data_ptr(): f"a tensor of the batch that {reason}" for tensor, _, reason in guards}


@dataclass
class SliceShares:
    """How much the slices of a step count in their microbatches."""

    count: int
    shares: list[float]
    """Each slice's share of its microbatch's side losses: of its tokens, or 1.0 if losses are added as they are."""
    out_dim: int
    """The sequence dimension of outputs."""
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    """The outputs of slices so far, by microbatch, until the last one has run."""

    def permute(self, order: Sequence[int]) -> list[int]:
        """Put the shares into another order of microbatches, and return the order of all slices."""
        units = [microbatch * self.count + part for microbatch in order for part in range(self.count)]
        self.shares = [self.shares[unit] for unit in units]
        return units

    def scale(self, feed: StepInput, microbatch: int) -> float:
        """The factor of the loss of a whole microbatch."""
        return 1.0 if feed.weights is None else sum(feed.scales[microbatch * self.count : (microbatch + 1) * self.count])

    def side_scale(self, feed: StepInput, unit: int) -> float:
        """The factor of the side losses of a slice."""
        return self.scale(feed, unit // self.count) * self.shares[unit]

    def note_loss(self, feed: StepInput, unit: int, loss: Tensor) -> None:
        """Add the loss of a slice to its microbatch's, which the result reports."""
        microbatch, losses = unit // self.count, feed.share.losses
        scale = self.scale(feed, microbatch)
        if not scale:
            losses[microbatch] = loss, scale
            return
        part = feed.scales[unit] / scale
        if part:
            loss = loss if part == 1.0 else loss * part
            losses[microbatch] = losses[microbatch][0] + loss if microbatch in losses else loss, scale

    def note_output(self, feed: StepInput, unit: int, output: Any) -> None:
        """Collect the output of a slice; those of a microbatch are joined after its last one."""
        microbatch = unit // self.count
        outputs = self.outputs.setdefault(microbatch, [])
        outputs.append(output)
        if len(outputs) == self.count:
            feed.share.outputs[microbatch] = mb.merge_outputs(self.outputs.pop(microbatch), self.out_dim)


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
    cutter: SequenceCutter | None = None
    """Cuts microbatches into slices, if the schedule has any."""

    def open(self, args: tuple[Any, ...], target: Any) -> tuple[tuple[Any, ...], Any, Any]:
        """Take the labels out of the arguments, as the target if there is none and the loss takes one, and their number."""
        if self.open_batch is None:
            return args, target, None
        args, labels, items = self.open_batch(args, ABSENT)
        return args, labels if target is ABSENT and self.loss.takes_target else target, items

    def split(
        self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool
    ) -> StepInput:
        """Split a batch along its batch dimension."""
        args, target, items = self.open(args, target)
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
            items=[items],
            outputs=outputs,
        )

    def take_list(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool) -> StepInput:
        """Take microbatches that are ready, of any sizes."""
        kwargs = {stage: [dict(values) for values in by_microbatch] for stage, by_microbatch in (stage_kwargs or {}).items()}
        opened = [self.open(args if isinstance(args, tuple) else (args,), ABSENT) for args in inputs]
        if targets is None and opened and opened[0][1] is not ABSENT:
            targets = [labels for _, labels, _ in opened]
        counts = {len(values) for values in (inputs, *([] if targets is None else [targets]), *kwargs.values())}
        if counts == {0} or len(counts) > 1:
            raise ScheduleError(
                f"{sorted(counts)} inputs, targets or keyword arguments: give as many of each as there are microbatches, at least one"
            )
        args = [args for args, *_ in opened]
        dims = [(self.dims_of(one), self.targets) for one in args]
        sizes = [mb.batch_size((one, None if targets is None else targets[k]), dims[k]) for k, one in enumerate(args)]
        known = [size for size in sizes if size is not None]
        targets = None if targets is None else list(targets)
        items = [count for *_, count in opened]
        return self._weigh(args, kwargs, targets, known if len(known) == len(sizes) else None, items=items, outputs=outputs)

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
        *,
        items: Sequence[Any],
        outputs: bool,
    ) -> StepInput:
        wrong = [stage for stage in kwargs if stage not in range(self.stages)]
        if wrong:
            raise ScheduleError(f"stage_kwargs for stage {wrong[0]!r}: there are stages 0 to {self.stages - 1}")
        if targets is not None and self.weight is None and len(args) > 1:
            self.loss.warn_about_ignore_index(targets)
        weights = self.loss.weights(self.weight, sizes, targets, len(args))
        slices = None
        if self.cutter is not None:
            args, kwargs, targets, weights, slices = self._cut(self.cutter, args, kwargs, targets, weights)
        weights, count = _read_weights(weights, items)
        guards = _find_guards([args, *kwargs.values()], targets)
        share = ResultShare(sizes=None if sizes is None else tuple((size, len(list(same))) for size, same in groupby(sizes)))
        share.slices = 1 if slices is None else slices.count
        return StepInput(args, kwargs, targets, [], weights, count, outputs=outputs, share=share, guards=guards, slices=slices)

    def _cut(
        self,
        cutter: SequenceCutter,
        args: list[tuple[Any, ...]],
        kwargs: dict[int, list[dict[str, Any]]],
        targets: list[Any] | None,
        weights: list[Any] | None,
    ) -> tuple[list[tuple[Any, ...]], dict[int, list[dict[str, Any]]], list[Any] | None, list[float] | None, SliceShares]:
        """Cut all microbatches into slices, and share their weights out among these."""
        parts = []
        for number, inputs in enumerate(args):
            own = {stage: values[number] for stage, values in kwargs.items()}
            dims = cutter.dims.inputs
            dims = (dims,) if isinstance(dims, dict) and len(inputs) == 1 else dims
            parts.append(cutter.cut(inputs, own, None if targets is None else targets[number], dims))
        shared = share_weights(weights, parts, cutter, self.weight)
        shares = [1.0 if weights is None else share for part in parts for share in token_shares(part.lengths, cutter.count)]
        return (
            [piece for part in parts for piece in part.args],
            {stage: [piece for part in parts for piece in part.kwargs[stage]] for stage in parts[0].kwargs},
            None if targets is None else [piece for part in parts for piece in part.targets or ()],
            shared,
            SliceShares(cutter.count, shares, cutter.out_dim),
        )

    def check_target(self, step_input: StepInput) -> None:
        """Refuse a training step without a target, unless the loss function takes none."""
        if step_input.targets is None and not (self.loss.takes_output_only and self.weight is None):
            if self.open_batch is not None:
                raise ScheduleError("the batch has no labels, which a transformers model is trained on: give labels in it, or as target=")
            raise ScheduleError(f"the {'loss' if self.weight is None else 'weight'} function needs a target, but the step was given none")


def _read_weights(weights: Sequence[Any] | None, items: Sequence[Any]) -> tuple[list[float] | None, float | None]:
    """Read the weights, and the number of items that all microbatches have in common; all at once, as far as they are on a device."""
    counted = [count for count in items if count is not None]
    numbers = read_numbers([*(weights or ()), *counted])
    read = len(numbers) - len(counted)
    counts = set(numbers[read:])
    if len(counts) > 1 or len(counted) not in (0, len(items)):
        shown = sorted(map(str, [*counts, *(count for count in items if count is None)]))
        raise ScheduleError(f"the microbatches of a step have different numbers of items, {sorted(set(shown))}: give all the same")
    if any(not count > 0 for count in counts):
        raise ScheduleError(f"num_items_in_batch is {counts.pop()}: give the number of labels that count, of all batches of the update")
    return None if weights is None else numbers[:read], counts.pop() if counts else None


def _find_guards(arguments: Sequence[Sequence[Any]], targets: Sequence[Any] | None) -> list[Guards]:
    """Find the tensors whose in-place change other microbatches, the loss or other stages would see; per microbatch."""
    count = len(arguments[0])
    leaves = [[_list_tensors(values[k]) for values in arguments] for k in range(count)]
    labels = [[] if targets is None else _list_tensors(targets[k]) for k in range(count)]
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


def _copy_if_inference(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _list_tensors(value: Any) -> list[Tensor]:
    """List the tensors of a tree whose in-place changes can be seen."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Tensor)
    return [leaf for leaf in leaves if leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_inference()]
