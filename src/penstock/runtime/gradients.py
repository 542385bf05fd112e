"""Gradients beyond one stage: shared parameters, the norm over all stages, and putting things back after a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


@dataclass
class Backup:
    """The gradients before a step."""

    saved: list[tuple[nn.Parameter, Tensor | None, Tensor | None]]

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter]) -> Backup:
        """Only gradients that are there are copied, as when they are accumulated over steps."""
        return cls([(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters])

    def restore(self) -> None:
        for parameter, grad, copy in self.saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            parameter.grad = grad


@dataclass
class Shared:
    """Parameters that several ranks hold a copy of: tied ones, and both copies of a bidirectional pipeline.

    Their gradients are summed once at the end of a step. A parameter that is one object for all its holders, as with
    virtual ranks that share a model, sums by itself.
    """

    keys: dict[str, nn.Parameter] = field(default_factory=dict)
    """This rank's copies of parameters that have others elsewhere, by a name that all ranks agree on."""
    active: bool = False
    """Whether any rank has such copies."""
    one_object: bool = False
    """Whether any parameter is the same object on several ranks, so that steps must begin together."""
    before: dict[str, Tensor | None] = field(default_factory=dict)

    @classmethod
    def find(cls, pipeline: Pipeline) -> Shared:
        names = _shared_names(pipeline)
        held = {name: (id(p), pipeline.rank) for name, p in names.items()}
        by_name: dict[str, list[tuple[int, int]]] = {}
        for theirs in pipeline.gather("shared", held):
            for name, holder in theirs.items():
                by_name.setdefault(name, []).append(holder)
        several = {name: holders for name, holders in by_name.items() if len(holders) > 1}
        apart = {name for name, holders in several.items() if len({ident for ident, _ in holders}) == len(holders)}
        return cls({name: p for name, p in names.items() if name in apart}, bool(apart), any(name not in apart for name in several))

    def begin(self, pipeline: Pipeline) -> None:
        """Set aside what was accumulated before, so that only this step's gradients are summed."""
        if self.one_object:
            pipeline.gather("begin", None)  # nobody adds to a gradient that another has yet to back up
        self.before = {}
        for name, parameter in self.keys.items():
            self.before[name], parameter.grad = parameter.grad, None

    def sum(self, pipeline: Pipeline) -> None:
        """Sum the copies' gradients in the order of ranks, the same on each."""
        if not self.active:
            return
        found = pipeline.gather("sum", {name: p.grad for name, p in self.keys.items()})
        totals: dict[str, Tensor | None] = {}
        for name in self.keys:
            total = self.before[name]
            for theirs in found:
                grad = theirs.get(name)
                if grad is not None:
                    total = grad.clone() if total is None else total + grad
            totals[name] = total
        pipeline.gather("summed", None)
        for name, parameter in self.keys.items():
            parameter.grad = totals[name]
        self.before = {}


def _shared_names(pipeline: Pipeline) -> dict[str, nn.Parameter]:
    """This rank's parameters that another stage or another copy holds too, under the name of the lowest stage that has them."""
    names: dict[str, nn.Parameter] = {}
    local = set(pipeline.stages)
    for holders in pipeline.partition.tied():
        if any(stage in local for stage, _, _ in holders):
            names[holders[0][1]] = holders[0][2]
    if len(pipeline.table.placement.copies) > 1:
        for stage in local:
            part = pipeline.partition.parts[stage]
            for name, parameter in part.parameters if part is not None else ():
                names.setdefault(name, parameter)
    return names


def clip_grad_norm(pipeline: Pipeline, max_norm: float, norm_type: float) -> Tensor:
    """Norms of all parameters, each once, in the order of their names' stages; so the result does not depend on the ranks."""
    norms = {name: torch.linalg.vector_norm(p.grad, norm_type) for name, p in pipeline.named_parameters() if p.grad is not None}
    ids = {name: id(p) for name, p in pipeline.named_parameters()}
    everyone = pipeline.gather("norms", (norms, ids, _canonical(pipeline)))
    merged: dict[str, Tensor] = {}
    for theirs, _, canonical in everyone:
        for name, norm in theirs.items():
            merged.setdefault(canonical.get(name, name), norm)
    ordered = [merged[name] for name in sorted(merged)]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    done = {ident for theirs in everyone[: pipeline.rank] for ident in theirs[1].values()}
    for _, parameter in pipeline.named_parameters():
        if parameter.grad is not None and id(parameter) not in done:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    pipeline.gather("clipped", None)
    return total


def _canonical(pipeline: Pipeline) -> dict[str, str]:
    """For tied parameters, the name that stands for all of theirs."""
    return {name: holders[0][1] for holders in pipeline.partition.tied() for _, name, _ in holders}
