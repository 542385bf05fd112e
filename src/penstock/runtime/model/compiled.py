"""Compiling stages, and the predicted cost of stages whose backward cannot be split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.passes.merge_backward import MergeBackward
from penstock.runtime.model.partition import Part, Partition
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline

Compile = bool | Mapping[str, Any] | Callable[[nn.Module], Any] | None
"""Whether to compile a stage: with `torch.compile`, with options for it, or with another function."""


def compile_stages(partition: Partition, choice: Any) -> Partition:
    """Compile the stages as chosen, for all or as a sequence with one choice per stage."""
    choices = choice if isinstance(choice, Sequence) else [choice] * len(partition)
    if len(choices) != len(partition) or not all(how is None or isinstance(how, (bool, Mapping)) or callable(how) for how in choices):
        raise ScheduleError(
            f"compile={choice!r} for {len(partition)} stages: give True, options for torch.compile, a function, or one of these per stage"
        )
    return Partition(tuple(_compile_part(part, how) for part, how in zip(partition.parts, choices, strict=True)))


def _compile_part(part: Part | None, how: Compile) -> Part | None:
    if part is None or how is None or how is False:
        return part
    compiler = torch.compile if how is True else partial(torch.compile, **how) if isinstance(how, Mapping) else how
    module = compiler(part.module)
    if not isinstance(module, nn.Module):
        raise ScheduleError(f"the function in compile= returned a {type(module).__name__} for a stage: it must return a module")
    return replace(part, module=module)


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
