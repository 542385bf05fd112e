"""Compiled stages, and what it costs that a stage runs its backward in one piece."""

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
"""Whether to compile a stage: as `torch.compile` does, with these options of its, or by a function of one's own."""


def compile_stages(partition: Partition, given: Any) -> Partition:
    """The partition with its stages compiled; a sequence says it for each stage."""
    each = given if isinstance(given, Sequence) else [given] * len(partition)
    if len(each) != len(partition) or not all(_is_known(how) for how in each):
        raise ScheduleError(
            f"compile={given!r} for {len(partition)} stages: give True, options for torch.compile, a function, or one of these each"
        )
    return Partition(tuple(_compiled(part, how) for part, how in zip(partition.parts, each, strict=True)))


def _is_known(how: Any) -> bool:
    return how is None or isinstance(how, (bool, Mapping)) or callable(how)


def _compiled(part: Part | None, how: Compile) -> Part | None:
    if part is None or how is None or how is False:
        return part
    make = torch.compile if how is True else partial(torch.compile, **how) if isinstance(how, Mapping) else how
    module = make(part.module)
    if not isinstance(module, nn.Module):
        raise ScheduleError(f"the function that compile= gives made a {type(module).__name__} of a stage: it must give a module")
    return replace(part, module=module)


@dataclass(frozen=True)
class MergedBackward:
    """Stages that cannot split their backward: they run I and W as one B, and the whole is timed anew."""

    stages: tuple[int, ...]
    before: Timeline
    """As the schedule was written."""
    after: Timeline
    """As it runs."""
    measured: bool
    """Whether the costs are a plan's, rather than F = I = W = 1."""
    reason: str = "are compiled and cannot split their backward"

    @property
    def cost(self) -> float:
        """How much longer the step takes, as a share."""
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
    """What becomes of a schedule where these stages cannot split their backward; None where it does not ask them to.

    `whole` adds stages that are not compiled, each with what it does that needs its backward whole.
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
    before, after = (simulate(each if each.lowered else lower(each.schedule()), costs) for each in (start, joined))
    lost = MergedBackward(stages, before, after, isinstance(own, Costs))
    if not whole:
        return lost
    reasons = [
        f"stage {stage} {whole[stage]} in its forward or loss" if stage in whole else f"stage {stage} is compiled" for stage in stages
    ]
    return replace(lost, reason=f"cannot split their backward ({', '.join(reasons)})")
