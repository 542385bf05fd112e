"""Gradients beyond one stage: the norm over all stages, and putting things back after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime.tensors.dtensor import reduce_partial, shard_coordinates, to_local

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


@dataclass
class GradientBackup:
    """The gradients before a step."""

    saved: list[tuple[nn.Parameter, Tensor | None, Tensor | None]]

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter]) -> GradientBackup:
        """Only gradients that are there are copied, as when they are accumulated over steps."""
        return cls([(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters])

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, grad, copy in self.saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            parameter.grad = grad


class BufferBackup:
    """The buffers of modules before a step, to be put back if it fails.

    One that a step has left as it was is not copied again while nobody changes it, so that tables and masks cost nothing. Norm layers
    change their statistics without a trace, and are always copied.
    """

    def __init__(self) -> None:
        self._constant: dict[int, int] = {}
        """The versions of buffers that steps leave alone, by id."""
        self._copies: list[tuple[Tensor, Tensor, int]] = []

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Copy what a step may change."""
        self._copies = []
        for module in modules:
            statistics = isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False):
                if statistics or self._constant.get(id(buffer)) != buffer._version:
                    self._copies.append((buffer, buffer.clone(), -1 if statistics else buffer._version))

    def settle(self) -> None:
        """A step is over: see what it has left alone."""
        for buffer, before, version in self._copies:
            if version == buffer._version and id(buffer) not in self._constant and torch.equal(buffer, before):
                self._constant[id(buffer)] = version
            else:
                self._constant.pop(id(buffer), None)
        self._copies = []

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, before, _ in self._copies:
            buffer.copy_(before)
        self._copies = []


class HookGuard:
    """Parameters with hooks that run when a gradient is complete, in a step in which they must not change the weights.

    An optimizer in such a hook updates a weight after the backward of each microbatch. Forwards of later microbatches have run by then,
    with a weight that the loop over microbatches would have updated first; and copies of the weight on other ranks get other gradients,
    which are only summed at the step's end. Hooks that leave the weights alone are allowed.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        """The parameters whose hooks were seen to leave them alone."""
        self._marks: list[tuple[str, nn.Parameter, int, int]] = []
        self._copies: dict[int, Tensor] = {}

    def begin(self, parameters: Iterable[tuple[str, nn.Parameter]], *, alone: bool) -> None:
        """Note the weights before a step. Those of hooks that were not seen at work before are copied.

        `alone` says that the step is one microbatch of weights that no other rank has.
        """
        hooked = [] if alone else [(name, p) for name, p in parameters if p._post_accumulate_grad_hooks]
        self._marks = [(name, p, p._version, to_local(p.detach()).data_ptr()) for name, p in hooked]
        self._copies = {id(p): to_local(p.detach()).clone() for _, p in hooked if id(p) not in self._known}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Refuse what runs inside if hooks change weights, and put back those that were copied. A failure may come of it, too."""
        try:
            yield
        except PipelineError:  # of another rank, which says why
            self._put_back(self._changed())
            raise
        except Exception as error:
            self._refuse(self._changed(), error)
            raise
        self._refuse(self._changed(), None)
        self._known |= self._copies.keys()
        self._copies = {}

    def _changed(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter, version, address in self._marks if self._has_changed(parameter, version, address)]

    @torch.no_grad()
    def _put_back(self, changed: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Restore the weights; whether there were copies of all."""
        copies, self._copies = self._copies, {}
        for _, parameter in changed:
            if id(parameter) in copies:
                to_local(parameter.detach()).copy_(copies[id(parameter)])
        return all(id(parameter) in copies for _, parameter in changed)

    def _refuse(self, changed: Sequence[tuple[str, nn.Parameter]], cause: Exception | None) -> None:
        if not changed:
            return
        kept = self._put_back(changed)
        now = "The weights are as before the step, but the state of the optimizer is not" if kept else "The weights have been changed"
        raise ScheduleError(
            f"a hook that runs when a gradient is complete has changed {changed[0][0]!r}, as an optimizer in it does: a pipeline runs "
            "forwards of later microbatches before the backwards of earlier ones, so that they would use weights that are out of date, and "
            f"copies of a weight would be updated apart. Call the optimizer after the step. {now}"
        ) from cause

    def _has_changed(self, parameter: nn.Parameter, version: int, address: int) -> bool:
        value = to_local(parameter.detach())
        if parameter._version != version or value.data_ptr() != address:
            return True
        copy = self._copies.get(id(parameter))
        return copy is not None and not torch.equal(value, copy)


Key = tuple[tuple[int, int], tuple[tuple[str, int], ...]]
"""A parameter's place, and which part of it a rank holds: its number along each dimension of the mesh that splits it."""


def clip_grad_norm(pipeline: Pipeline, max_norm: float, norm_type: float) -> Tensor:
    """Norms of all parameters, each once, in the model's own order; so the result does not depend on the ranks."""
    norms: dict[Key, Tensor] = {}
    for name, parameter in pipeline.local_parameters():
        if parameter.grad is not None:
            grad = reduce_partial(parameter.grad)
            norms[pipeline.shared.place[name], shard_coordinates(grad)] = torch.linalg.vector_norm(to_local(grad), norm_type)
    if pipeline.grid is not None and pipeline.data.scattered:
        for group in (pipeline.grid.data, pipeline.grid.tensor):
            norms = _merged(group.gather(group.rank, "clip_grad_norm_", norms, pipeline.deadline))
    merged = _merged(pipeline.gather("clip_grad_norm_", norms))
    ordered = [merged[place] for place in sorted(merged)]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in pipeline.named_parameters():
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
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
