"""Transformed stages: compiled ones, and recomputed ones, which keep only their inputs and run their forward again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.passes.merge_backward import MergeBackward
from penstock.runtime.batch.result import collect, unwrap_stage_output
from penstock.runtime.model.module_state import ModuleState, ModuleVersions, name_running_statistics
from penstock.runtime.model.partition import Part, Partition
from penstock.runtime.tensors.boundary import copy_tensor, detach_tree, memory_overlaps
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import read_version
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline

Compile = bool | Mapping[str, Any] | Callable[[nn.Module], Any] | None
"""Whether to compile a stage: with `torch.compile`, with options for it, or with another function."""


def transform_stages(partition: Partition, plan: Any, compile_choice: Any, recompute: Recompute) -> Partition:
    """Compile and recompute the stages as chosen: for all of them, or as a sequence with one choice per stage.

    `recompute` may have one choice per layer instead, and defaults to the plan's.
    """
    hows, flags = _check_compile(compile_choice, len(partition)), _choose_recomputed(partition, plan, recompute)
    return Partition(tuple(map(_transform, partition.parts, hows, flags)))


def _transform(part: Part | None, how: Compile, flags: Sequence[bool]) -> Part | None:
    if part is None:
        return None
    if any(flags) and len(flags) > 1:
        return replace(part, module=RecomputedLayers(part.module, flags, partial(_compile, how)))
    module = _compile(how, part.module)
    return replace(part, module=Recomputed(module) if any(flags) else module)


def refuse_full_graphs(choice: Any) -> None:
    """Refuse `fullgraph=True` for stages that run on slices: the prefix of a layer is kept between two compiled graphs."""
    for how in choice if isinstance(choice, Sequence) else [choice]:
        if isinstance(how, Mapping) and how.get("fullgraph"):
            raise ScheduleError(
                "compile with fullgraph=True, but with slices each layer that attends to earlier ones breaks the graph to keep its keys "
                "and values: leave fullgraph out"
            )


def _check_compile(choice: Any, stages: int) -> list[Compile]:
    """The choice for each stage."""
    choices = list(choice) if isinstance(choice, Sequence) else [choice] * stages
    if len(choices) != stages or not all(how is None or isinstance(how, (bool, Mapping)) or callable(how) for how in choices):
        raise ScheduleError(
            f"compile={choice!r} for {stages} stages: give True, options for torch.compile, a function, or one of these per stage"
        )
    return choices


def _compile(how: Compile, module: nn.Module) -> nn.Module:
    if how is None or how is False:
        return module
    compiler = torch.compile if how is True else partial(torch.compile, **how) if isinstance(how, Mapping) else how
    compiled = compiler(module)
    if not isinstance(compiled, nn.Module):
        raise ScheduleError(f"the function in compile= returned a {type(compiled).__name__} for a stage: it must return a module")
    return compiled


@dataclass(frozen=True)
class MergedBackward:
    """Stages that cannot split their backward and run I and W as one B, with the predicted timelines of the whole pipeline."""

    stages: tuple[int, ...]
    before: Timeline
    """With the backwards split, as in the schedule."""
    after: Timeline
    """With them merged, as it runs."""
    measured: bool
    """Whether the costs are a plan's rather than F = I = W = 1."""
    reason: str = "are compiled and cannot split their backward"

    @property
    def cost(self) -> float:
        """How much longer the step takes, as a fraction."""
        return self.after.makespan / self.before.makespan - 1 if self.before.makespan else 0.0

    def __str__(self) -> str:
        costs = "the plan's costs" if self.measured else "F = I = W = 1"
        return (
            f"stages {list(self.stages)} {self.reason}: they run I and W as one B. "
            f"With {costs} a step takes {self.after.makespan:.6g} in place of {self.before.makespan:.6g} ({self.cost:+.1%}), "
            f"and idles {self.after.bubble:.1%} in place of {self.before.bubble:.1%}"
        )


def predict_merged_backward(
    table: Table, unsplit: Sequence[int], plan: Any = None, whole: Mapping[int, str] | None = None
) -> MergedBackward | None:
    """Predict the cost of stages that cannot split their backward; None if the schedule does not split it.

    `unsplit` are compiled stages; `whole` are others, each with what it does that prevents splitting.
    """
    whole = whole or {}
    unsplit = sorted({*unsplit, *whole})
    splits = table.rows.stage[table.rows.is_kind(Kind.I)]
    stages = tuple(stage for stage in unsplit if bool((splits == stage).any()))
    if not stages:
        return None
    own = getattr(plan, "costs", None)
    costs = own if isinstance(own, Costs) else Costs()
    start = Program.start(table)
    joined = MergeBackward(stages, apart=True).apply(start)
    before, after = (simulate(p if p.lowered else lower(p.schedule()), costs) for p in (start, joined))
    merged = MergedBackward(stages, before, after, isinstance(own, Costs))
    if not whole:
        return merged
    reasons = [
        f"stage {stage} {whole[stage]} in its forward or loss" if stage in whole else f"stage {stage} is compiled" for stage in stages
    ]
    return replace(merged, reason=f"cannot split their backward ({', '.join(reasons)})")


# Recomputed stages ----------------------------------------------------------------------------------------------------


Recompute = bool | Sequence[bool] | None
"""`bool`, one `bool` per stage, or one per layer of the model; None for the plan's choice."""


def _choose_recomputed(partition: Partition, plan: Any, choice: Recompute) -> list[Sequence[bool]]:
    """For each stage, whether it is recomputed as a whole, or whether each of its layers is recomputed by itself."""
    flags = _check_flags(getattr(plan, "recompute", None) if choice is None else choice)
    by_stage = [flags] * len(partition) if isinstance(flags, bool) else flags
    if len(by_stage) == len(partition):
        return [[flag] for flag in by_stage]
    counts = [1 if part is None else len(_list_units(part.module)) or 1 for part in partition.parts]
    if len(by_stage) != sum(counts):
        raise ScheduleError(
            f"recompute has {len(by_stage)} values for {len(partition)} stages of {sum(counts)} layers: give True, False, one of these per "
            "stage, or one per layer"
        )
    return [by_stage[start:end] for start, end in pairwise([0, *accumulate(counts)])]


def _check_flags(choice: Any) -> bool | list[bool]:
    """One choice for everything, or a list of choices; refuses anything else, such as the numbers of layers or stages."""
    flags = False if choice is None else choice.tolist() if hasattr(choice, "tolist") else choice
    if isinstance(flags, bool):
        return flags
    if not isinstance(flags, Sequence) or isinstance(flags, str) or not all(isinstance(flag, bool) for flag in flags):
        raise ScheduleError(f"recompute={choice!r}: give True, False, one of these per stage, or one per layer")
    return list(flags) or False


def _list_units(module: nn.Module) -> list[dict[Any, nn.Module]]:
    """The modules of each layer of a stage that can recompute single layers (`LayerSequence.list_units`)."""
    return module.list_units() if hasattr(module, "list_units") else []  # type: ignore[operator]


@dataclass(frozen=True)
class OutputAndLoss:
    """The detached output of a recomputed last stage, and its loss."""

    output: Any
    loss: Tensor


class Recomputed(nn.Module):
    """A module that keeps only its inputs, and runs its forward again before its backward.

    The second forward draws the same random numbers and starts from the same buffers and attributes; its changes of state and its side
    losses and metrics are dropped. If `loss` is set, the forward computes it too and returns an `OutputAndLoss`: otherwise the loss
    would hold the output, which is most of what the last stage of a language model holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss: Callable[[Any], Tensor] | None = None
        """The loss of the next forward."""
        self._state, self._inputs = _ChangedState(module), _ChangedInputs()

    @property
    def changed_inputs(self) -> set[int]:
        """The ids of inputs of the last forward whose copies the module has changed in place."""
        return self._inputs.originals

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, self.loss = self.loss, None
        call = self.module if loss is None else partial(_run_with_loss, self.module, loss)
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        before = self._state.capture()
        run = partial(self._inputs.run, call)
        output = checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Recomputation(before)), **kwargs)
        self._state.note_changes(before)
        return output


class RecomputedLayers(Recomputed):
    """A stage of which some layers keep only their inputs: each runs its forward again, by itself, when its backward begins.

    So the stage holds the inputs of all these layers, and in its backward the activations of one of them at a time. A stage that is
    recomputed as a whole holds its own input only, but in its backward the activations of all of its layers. If the last layer of the
    model is one of them, its loss is recomputed with it. `compiled` compiles a module: every layer is compiled by itself.
    """

    def __init__(self, module: nn.Module, flags: Sequence[bool], compiled: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(module)
        made: dict[tuple[nn.Module, bool], nn.Module] = {}  # the state of a layer that occurs twice is watched once
        self._calls: dict[Any, Callable[..., Any]] = {}
        for number, (unit, recompute) in enumerate(zip(_list_units(module), flags, strict=True)):
            if recompute and not unit:
                raise ScheduleError(
                    f"recompute= has True for layer {number} of a stage of {len(flags)} layers, the end of a model that computes its loss "
                    "elsewhere: recompute the whole stage with one bool per stage, or give False for its last layer"
                )
            for key, layer in unit.items():
                if (layer, recompute) not in made:
                    made[layer, recompute] = Recomputed(compiled(layer)) if recompute else compiled(layer)
                self._calls[key] = made[layer, recompute]
        self._layers = nn.ModuleList(made.values())
        if flags[-1]:
            self._calls[key] = partial(self._run_last, made[layer, True])

    @property
    def changed_inputs(self) -> set[int]:
        return {ident for layer in self._layers if isinstance(layer, Recomputed) for ident in layer.changed_inputs}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: Any = self.module
        before, stage.calls = stage.calls, self._calls
        try:
            return stage(*args, **kwargs)
        finally:
            stage.calls, self.loss = before, None

    def _run_last(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the last layer, which is recomputed together with the loss if there is one."""
        layer.loss = self.loss
        return layer(*args, **kwargs)


class _ChangedInputs:
    """Copies the inputs that a module changes in place, so that its forward can be run again."""

    def __init__(self) -> None:
        self.changed: set[int] | None = None
        """The indices of leaves that were seen to change; None until the module has run once."""
        self.originals: set[int] = set()
        """The ids of inputs of the last forward whose copies were changed."""

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        copied = tensors.keys() if self.changed is None else tensors.keys() & self.changed
        if copied:
            copies = {id(tensors[number]): copy_tensor(tensors[number]) for number in copied}  # one that occurs twice stays one
            leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        before = {number: read_version(leaves[number]) for number in tensors}
        output = call(*args, **kwargs)
        changed = {number for number, version in before.items() if read_version(leaves[number]) != version}
        self.changed = changed | (self.changed or set())
        self.originals = {id(tensors[number]) for number in changed}
        for number in changed:
            if any(other is not tensors[number] and memory_overlaps(tensors[number], other) for other in tensors.values()):
                raise ScheduleError(
                    "a recomputed stage changes in place a tensor that shares memory with another of its inputs, but is run again from "
                    "copies that do not: clone it before changing it"
                )
        if changed - copied:
            raise ScheduleError(
                "a recomputed stage has changed an input in place for the first time, and cannot be run again from it: run the step again, "
                "which gives the stage a copy, or clone the input in the stage"
            )
        return output


class _ChangedState:
    """Learns which buffers and attributes a module's forward changes, and captures them before each forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.watched: set[str] | None = None
        """The names of state that was seen to change; None until the module has run once."""
        self.others: ModuleVersions | None = None
        self.pending: WeakSet[ModuleState] = WeakSet()
        """The states before forwards that have yet to be run again."""

    def capture(self) -> ModuleState:
        """Capture the state before a forward, as far as forwards are known to change it."""
        if self.watched is None:
            self.others = ModuleVersions.capture(self.module)
            return ModuleState.capture(self.module)
        names = self.watched | set(name_running_statistics(self.module))
        self.others = ModuleVersions.capture(self.module, skip=names)
        return ModuleState.capture_only(self.module, names)

    def note_changes(self, before: ModuleState) -> None:
        """Note what a forward has changed, and drop everything else from the state before it.

        State that changes for the first time was the same for all forwards that have yet to be run again.
        """
        self.pending.add(before)
        assert self.others is not None
        replaced, in_place = self.others.changes()
        if self.watched is None:
            self.watched = set(before.keep_changed(in_place))  # a value may have been written that it had before
            return
        for state in self.pending:
            state.extend(replaced)
        self.watched = {*self.watched, *in_place, *replaced.names()}
        if in_place:
            raise ScheduleError(
                f"a recomputed stage has changed {in_place[0]!r} for the first time in a later forward than its first, and cannot be run "
                "again from what it was: run the step again, which keeps a copy, or do not recompute the stage"
            )


def _run_with_loss(module: nn.Module, loss: Callable[[Any], Tensor], *args: Any, **kwargs: Any) -> OutputAndLoss:
    output = unwrap_stage_output(module(*args, **kwargs))
    return OutputAndLoss(detach_tree(output), loss(output))


class _Recomputation:
    """The context of the second forward: it starts from the state before the first, and leaves nothing behind."""

    def __init__(self, before: ModuleState) -> None:
        self.before = before
        self.stack = ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(collect())
        self.stack.enter_context(self.before.stand_in())

    def __exit__(self, *exc: object) -> None:
        self.stack.close()
