"""Running statistics of norm layers in stages whose microbatches do not come in order, or come on several ranks.

Both copies of a bidirectional pipeline's stage see half of the microbatches each. The model without a pipeline updates its running
statistics once for each microbatch, in their order. So every forward of such a stage writes into statistics of its own, and at the
step's end all of them are folded into the layer's in the order of microbatches, on every rank that holds the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.model.module_state import ModuleState, ModuleVersions
from penstock.runtime.model.recompute import Recomputed

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

_KNOWN = (_BatchNorm.forward, SyncBatchNorm.forward, _InstanceNorm.forward)
"""Forwards whose way of updating running statistics is known."""
_NAMES = ("running_mean", "running_var", "num_batches_tracked")
Key = tuple[int, str]
"""A norm layer: its stage, and its name there."""
_Buffers = dict[str, list[Any]]
"""The buffers of each norm layer, in the order of their names."""


@dataclass(frozen=True)
class ForwardStatistics:
    """What one forward made of statistics that began with zero."""

    microbatch: int
    mean: Tensor
    variance: Tensor
    count: Tensor | None
    """How often the layer was called in this forward, if it counts."""

    @property
    def calls(self) -> int:
        """As counted; once if something was written by a layer that does not count."""
        return int(bool(self.mean.any() or self.variance.any()) if self.count is None else self.count)


class RunningStatistics:
    """The running statistics of one rank's stages during a step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.modules = {index: _inner(stage.module) for index, stage in pipeline.stages.items()}
        placement = pipeline.table.placement
        self._several = {stage for stage in self.modules if len({copy[stage] for copy in placement.copies}) > 1}
        """Stages that several ranks hold."""
        self._norms = {stage: dict(_norm_layers(module)) for stage, module in self.modules.items()}
        self.gathers = False
        """Whether ranks put their records together at the end of a step."""
        if len(placement.copies) > 1:
            mine = any(self._norms[stage] for stage in self._several)
            self.gathers = any(pipeline.gather("norm layers", mine))
        self._records: dict[Key, dict[int, ForwardStatistics]] = {}
        """By microbatch: a forward that is run again for a whole backward counts once."""
        self._seen: set[int] = set()
        """The stages whose first forward was looked at closely."""

    def keeps_any(self, stage: int) -> bool:
        """Whether a stage has layers with running statistics."""
        return bool(self._norms[stage])

    # Forwards ---------------------------------------------------------------------------------------------------------

    def scattered(self, actions: Sequence[Action]) -> set[int]:
        """The stages of this rank that do not run all microbatches in their order here."""
        order: dict[int, list[int]] = {stage: [] for stage in self.modules}
        for action in actions:
            for part in action.parts:
                if part.kind is Kind.F and part.microbatch is not None:
                    order[part.stage].append(part.microbatch)
        return self._several | {stage for stage, microbatches in order.items() if microbatches != sorted(microbatches)}

    def around(self, stage: int, microbatch: int, call: Callable[..., Any]) -> Callable[..., Any]:
        """A scattered stage's forward, with statistics of its own."""
        module, norms = self.modules[stage], self._norms[stage]

        def apart(*args: Any, **kwargs: Any) -> Any:
            active = {name: part for name, part in norms.items() if part.training and part.running_mean is not None}
            skip = {f"{name}.{key}" if name else key for name in active for key in _NAMES}
            with _refuse_other_changes(stage, module, skip, first=stage not in self._seen):
                held: _Buffers = {name: [part._buffers[key] for key in _NAMES] for name, part in active.items()}
                fresh: _Buffers = {name: [None if each is None else torch.zeros_like(each) for each in held[name]] for name in active}
                try:
                    _put(active, fresh)
                    made = call(*args, **kwargs)
                finally:
                    _put(active, held)
            self._seen.add(stage)
            for name, part in active.items():
                mean, variance, count = fresh[name]
                record = ForwardStatistics(microbatch, mean, variance, None if isinstance(part, _InstanceNorm) else count)
                self._records.setdefault((stage, name), {})[microbatch] = record
            return made

        return apart

    # Steps ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fold(self, pipeline: Pipeline) -> list[tuple[Tensor, Tensor]]:
        """The statistics that a step has led to, the same on all ranks: each buffer with its new value."""
        mine, self._records = self._records, {}
        found: dict[Key, list[ForwardStatistics]] = {}
        for theirs in pipeline.gather("running statistics", mine) if self.gathers else [mine]:
            for key, records in theirs.items():
                found.setdefault(key, []).extend(records.values())
        folded: list[tuple[Tensor, Tensor]] = []
        for (stage, name), records in found.items():
            if stage in self._norms:
                folded += _fold(self._norms[stage][name], sorted(records, key=lambda record: record.microbatch))
        return folded

    def reset(self) -> None:
        """The step has failed: nothing of it is kept."""
        self._records = {}


@torch.no_grad()
def write_statistics(folded: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give buffers their new values."""
    for buffer, value in folded:
        buffer.copy_(value)


def _fold(part: _NormBase, records: Sequence[ForwardStatistics]) -> Iterator[tuple[Tensor, Tensor]]:
    """One layer's statistics after the forwards, in this order."""
    assert part.running_mean is not None
    assert part.running_var is not None
    mean, variance, before = part.running_mean, part.running_var, 0
    if part.momentum is None and part.num_batches_tracked is not None:
        before = int(part.num_batches_tracked)
    count = before
    for record, calls in ((record, record.calls) for record in records):
        if not calls:
            continue
        keep, take = (1 - part.momentum) ** calls if part.momentum is not None else 1.0, 1.0
        if part.momentum is None and not isinstance(part, _InstanceNorm):  # the mean of all, of which the record has the newest
            keep, take = count / (count + calls), calls / (count + calls)
        mean = mean * keep + record.mean.to(mean.device) * take
        variance = variance * keep + record.variance.to(variance.device) * take
        count += calls
    yield part.running_mean, mean
    yield part.running_var, variance
    if part.num_batches_tracked is not None and not isinstance(part, _InstanceNorm):
        yield part.num_batches_tracked, part.num_batches_tracked + (count - before)


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Recomputed) else module


def _norm_layers(module: nn.Module) -> Iterator[tuple[str, _NormBase]]:
    """The norm layers that keep running statistics in a way that is known."""
    for name, part in module.named_modules():
        if (
            isinstance(part, _NormBase)
            and type(part).forward in _KNOWN
            and part.running_mean is not None
            and not is_lazy(part.running_mean)
        ):
            yield name, part


def _put(parts: dict[str, _NormBase], buffers: _Buffers) -> None:
    for name, part in parts.items():
        part._buffers.update(zip(_NAMES, buffers[name], strict=True))


@contextmanager
def _refuse_other_changes(stage: int, module: nn.Module, skip: set[str], first: bool) -> Iterator[None]:
    """Refuse a forward that changes state which cannot be merged. The first is looked at closely, and may set what was None or missing."""
    state = ModuleState.capture(module) if first else None
    versions = None if first else ModuleVersions.capture(module, skip=skip)
    yield
    if state is not None:
        changed = [name for name in state.changed(set_first=False) if name not in skip]
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
            "the model without a pipeline does. Only running statistics of norm layers can be put together from several ranks: use a "
            "schedule with one copy of each stage that keeps the order of microbatches, such as 1f1b or zbv"
        )
