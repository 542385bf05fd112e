"""Running statistics of norm layers in stages whose microbatches run out of order, or on several ranks.

Each copy of a stage in a bidirectional pipeline sees half of the microbatches, but the unpipelined model updates its running
statistics once per microbatch, in their order. So every forward of such a stage writes into separate statistics, and at the end of
the step all of them are folded into the layer's in the order of microbatches, on every rank that holds the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.nn.parameter import is_lazy

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.runtime.model.module_state import ModuleState, ModuleVersions
from penstock.runtime.model.tied_parameters import Gather
from penstock.runtime.model.transforms import Recomputed
from penstock.runtime.torch_internals.modules import BatchNorm, InstanceNorm, NormBase, own_buffers

_KNOWN = (BatchNorm.forward, SyncBatchNorm.forward, InstanceNorm.forward)
"""The forwards that are known to update running statistics as `_fold` does."""
_NAMES = ("running_mean", "running_var", "num_batches_tracked")
_ONE_COPY = "use a schedule with one copy of each stage that keeps the order of microbatches, such as 1f1b or zbv"
_START_AGAIN = "the others cannot go on without the ranks that were lost, so start again from the last checkpoint"
LayerKey = tuple[int, str]
"""A norm layer: its stage, and its name there."""
_Buffers = dict[str, list[Any]]
"""The buffers of each norm layer, in the order of their names."""


@dataclass(frozen=True)
class ForwardStatistics:
    """The statistics that one forward has written, starting from zero."""

    mean: Tensor
    variance: Tensor
    count: Tensor | None
    """How often the layer was called in this forward; None if it does not count its calls."""

    @property
    def calls(self) -> int:
        """How often the layer was called; one call if a layer that does not count has written anything."""
        return int(bool(self.mean.any() or self.variance.any()) if self.count is None else self.count)


class RunningStatistics:
    """The running statistics of one rank's stages, whose modules are given by stage.

    `counts` says of a microbatch whether its statistics count, if not all do: of several replicas, those of the first count.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        placement: Placement,
        gather: Gather,
        *,
        counts: Callable[[int], bool] | None = None,
    ) -> None:
        self._counts, self._advice = counts, _ONE_COPY if counts is None else _START_AGAIN
        self.modules = {stage: module.module if isinstance(module, Recomputed) else module for stage, module in modules.items()}
        several = {stage for stage in self.modules if len({copy[stage] for copy in placement.copies}) > 1}
        self._several = several if counts is None else set(self.modules)
        """The stages that several ranks hold, or of whose microbatches some do not count."""
        self._norms = {stage: dict(_list_norm_layers(module)) for stage, module in self.modules.items()}
        self.gathers = False
        """Whether ranks exchange their statistics at the end of a step."""
        if len(placement.copies) > 1:
            has_norms = any(self._norms[stage] for stage in self._several)
            self.gathers = any(gather("norm layers", has_norms))
        self._written: dict[LayerKey, dict[int, ForwardStatistics]] = {}
        """The statistics that this step's forwards have written, by microbatch: one that is run again for a whole backward counts once."""
        self._checked: set[int] = set()
        """The stages whose first forward was checked for all changes of state."""

    def keeps_any(self, stage: int) -> bool:
        """Whether a stage has layers with running statistics."""
        return bool(self._norms[stage])

    # Forwards ---------------------------------------------------------------------------------------------------------

    def find_scattered(self, actions: Sequence[Action]) -> set[int]:
        """Return the stages of this rank that do not run all microbatches in order here."""
        order: dict[int, list[int]] = {stage: [] for stage in self.modules}
        for action in actions:
            for part in action.parts:
                if part.kind is Kind.F and part.microbatch is not None:
                    order[part.stage].append(part.microbatch)
        return self._several | {stage for stage, microbatches in order.items() if microbatches != sorted(microbatches)}

    def wrap_forward(self, stage: int, microbatch: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward of a scattered stage so that it writes into separate statistics."""
        module, norms = self.modules[stage], self._norms[stage]

        def forward(*args: Any, **kwargs: Any) -> Any:
            active = {name: part for name, part in norms.items() if part.training and part.running_mean is not None}
            skip = {f"{name}.{key}" if name else key for name in active for key in _NAMES}
            with _refuse_other_changes(stage, module, skip, self._advice, first=stage not in self._checked):
                originals: _Buffers = {name: [own_buffers(part)[key] for key in _NAMES] for name, part in active.items()}
                zeros: _Buffers = {
                    name: [None if buffer is None else torch.zeros_like(buffer) for buffer in buffers]
                    for name, buffers in originals.items()
                }
                try:
                    _set_buffers(active, zeros)
                    output = call(*args, **kwargs)
                finally:
                    _set_buffers(active, originals)
            self._checked.add(stage)
            for name, part in active.items():
                mean, variance, count = zeros[name]
                statistics = ForwardStatistics(mean, variance, None if isinstance(part, InstanceNorm) else count)
                self._written.setdefault((stage, name), {})[microbatch] = statistics
            return output

        return forward

    # Steps ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self, gather: Gather) -> list[tuple[Tensor, Tensor]]:
        """Return each buffer with its value after the step, the same on all ranks."""
        own, self._written = self._written, {}
        by_layer: dict[LayerKey, dict[int, ForwardStatistics]] = {}
        for share in gather("running statistics", own) if self.gathers else [own]:
            for key, written in share.items():
                by_layer.setdefault(key, {}).update(written)
        folded: list[tuple[Tensor, Tensor]] = []
        for (stage, name), forwards in by_layer.items():
            if stage in self._norms:
                counted = [forwards[m] for m in sorted(forwards) if self._counts is None or self._counts(m)]
                folded += _fold(self._norms[stage][name], counted)
        return folded

    def reset(self) -> None:
        """Drop what a failed step has written."""
        self._written = {}


@torch.no_grad()
def write_statistics(folded: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the values of `RunningStatistics.fold` into the buffers."""
    for buffer, value in folded:
        buffer.copy_(value)


def _fold(part: NormBase, forwards: Sequence[ForwardStatistics]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each buffer of one layer with its value after these forwards, in this order."""
    assert part.running_mean is not None
    assert part.running_var is not None
    mean, variance, before = part.running_mean, part.running_var, 0
    if part.momentum is None and part.num_batches_tracked is not None:
        before = int(part.num_batches_tracked)
    count = before
    for forward in forwards:
        calls = forward.calls
        if not calls:
            continue
        keep, take = (1 - part.momentum) ** calls if part.momentum is not None else 1.0, 1.0
        if part.momentum is None and not isinstance(part, InstanceNorm):  # the mean over all calls
            keep, take = count / (count + calls), calls / (count + calls)
        mean = mean * keep + forward.mean.to(mean.device) * take
        variance = variance * keep + forward.variance.to(variance.device) * take
        count += calls
    yield part.running_mean, mean
    yield part.running_var, variance
    if part.num_batches_tracked is not None and not isinstance(part, InstanceNorm):
        yield part.num_batches_tracked, part.num_batches_tracked + (count - before)


def _list_norm_layers(module: nn.Module) -> Iterator[tuple[str, NormBase]]:
    """Yield the norm layers that keep running statistics in a known way."""
    for name, part in module.named_modules():
        if isinstance(part, NormBase) and type(part).forward in _KNOWN and part.running_mean is not None and not is_lazy(part.running_mean):
            yield name, part


def _set_buffers(parts: dict[str, NormBase], buffers: _Buffers) -> None:
    for name, part in parts.items():
        own_buffers(part).update(zip(_NAMES, buffers[name], strict=True))


@contextmanager
def _refuse_other_changes(stage: int, module: nn.Module, skip: set[str], advice: str, first: bool) -> Iterator[None]:
    """Refuse a forward that changes state which cannot be merged. The `first` is checked by value, and may set what was None or missing."""
    state = ModuleState.capture(module) if first else None
    versions = None if first else ModuleVersions.capture(module, skip=skip)
    yield
    if state is not None:
        changed = [name for name in state.list_changed(set_first=False) if name not in skip]
        if changed:
            state.restore()
    else:
        assert versions is not None
        replaced, in_place = versions.changes(set_first=False)
        changed = [*replaced.names(), *in_place]
        replaced.restore()
    if changed:
        raise ScheduleError(
            f"the forward of stage {stage} changes {changed[0]!r}, but this rank does not run all of the stage's microbatches in order, as "
            f"the unpipelined model does. Only running statistics of norm layers can be merged from several ranks: {advice}"
        )
