"""Gradients beyond one stage: the norm over all stages, and putting things back after a failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.runtime.parts import local, part_of, whole_parts

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


@dataclass
class Backup:
    """The gradients and buffers before a step."""

    saved: list[tuple[nn.Parameter, Tensor | None, Tensor | None]]
    buffers: list[tuple[Tensor, Tensor]]

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor] = ()) -> Backup:
        """Only gradients that are there are copied, as when they are accumulated over steps; and buffers, which are small mostly."""
        copies = [(buffer, buffer.clone()) for buffer in buffers]
        return cls([(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters], copies)

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, before in self.buffers:
            buffer.copy_(before)
        for parameter, grad, copy in self.saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            parameter.grad = grad


Key = tuple[tuple[int, int], tuple[tuple[str, int], ...]]
"""A parameter's place, and which part of it a rank holds: its number along each dimension of the mesh that splits it."""


def clip_grad_norm(pipeline: Pipeline, max_norm: float, norm_type: float) -> Tensor:
    """Norms of all parameters, each once, in the model's own order; so the result does not depend on the ranks."""
    norms: dict[Key, Tensor] = {}
    for name, parameter in pipeline.local_parameters():
        if parameter.grad is not None:
            grad = whole_parts(parameter.grad)
            norms[pipeline.shared.place[name], part_of(grad)] = torch.linalg.vector_norm(local(grad), norm_type)
    if pipeline.grid is not None and pipeline.data.scattered:
        for group in (pipeline.grid.data, pipeline.grid.tensor):
            norms = _merged(group.gather(group.rank, "clip_grad_norm_", norms, pipeline.deadline))
    merged = _merged(pipeline.gather("clip_grad_norm_", norms))
    ordered = [merged[place] for place in sorted(merged)]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in pipeline.named_parameters():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
    if pipeline.shared.one_object:
        pipeline.gather("clipped", None)  # nobody goes on with a gradient that its owner has yet to scale
    return total


def _merged(everyone: list[dict[Key, Tensor]]) -> dict[Key, Tensor]:
    """Each part once, the first that is found."""
    found: dict[Key, Tensor] = {}
    for theirs in everyone:
        for key, norm in theirs.items():
            found.setdefault(key, norm)
    return found
