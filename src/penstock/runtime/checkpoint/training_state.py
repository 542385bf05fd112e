"""Everything that a training run needs to continue: what of it is saved, and how it is restored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.model_state import ModelState
from penstock.runtime.checkpoint.optimizer_state import (
    OPTIONS,
    Aliases,
    Optimizers,
    check_options,
    check_state,
    list_optimizers,
    load_optimizer,
    named_groups,
    optimizer_state,
    unwrap_collection,
    wrap_collection,
)
from penstock.runtime.model.random_streams import capture_random_state, set_random_state

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.reading import CheckpointReader


class Stateful(Protocol):
    """An object whose state can be saved: a scheduler, a data loader, a gradient scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Schedulers = Stateful | Sequence[Stateful] | None


@dataclass(frozen=True)
class TrainingState:
    """The objects that are saved and loaded together.

    A load goes through `allocate`, `load_others` (under `restore_others_on_error`) and `load_tensors`, in this order, so that a
    scheduler or data loader can reject the saved state before any tensor has changed.
    """

    model: ModelState
    optimizer: Optimizers = None
    scheduler: Schedulers = None
    data: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def others(self) -> dict[str, Stateful]:
        """Everything but the model and the optimizers, by the key that it is saved under."""
        schedulers = [] if self.scheduler is None else self.scheduler if isinstance(self.scheduler, Sequence) else [self.scheduler]
        others = {f"scheduler.{k}": scheduler for k, scheduler in enumerate(schedulers)}
        if self.data is not None:
            others["data"] = self.data
        return others | {f"extra.{name}": stateful for name, stateful in self.extra.items()}

    # Saving -----------------------------------------------------------------------------------------------------------

    def collect(self, rank: int, step: int, first: Mapping[str, str]) -> tuple[dict[str, Any], Aliases]:
        """This rank's state by key, and further keys of values in it. `first` maps the names of a tied parameter to its first one."""
        values = {first.get(name, name): wrap_collection(value) for name, value in self.model.values().items()}
        missing = next((name for name, value in values.items() if isinstance(value, Tensor) and value.is_meta), None)
        if missing is not None:
            raise CheckpointError(f"{missing} is on the meta device and has no values to save")
        names = {ident: first.get(name, name) for ident, name in self.model.first_names().items()}
        optimizer, aliases = optimizer_state(self.optimizer, names)
        state: dict[str, Any] = {"model": values, "optimizer": optimizer}
        state[f"random.{rank}"] = (capture_random_state(),)
        if rank == 0:
            state |= {key: (stateful.state_dict(),) for key, stateful in self.others().items()}
            state["training"] = ({"step": step, **self.model.stream_position()},)
        return state, {f"optimizer.{key}": [f"optimizer.{other}" for other in others] for key, others in aliases.items()}

    # Loading ----------------------------------------------------------------------------------------------------------

    def allocate(self, reader: CheckpointReader, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The destinations to read into, by key: tensors, of which the model's are its own; and values that can be rejected first."""
        state = reader.allocate_optimizer(self._optimized_parameters())
        options = {key: state.pop(key) for key in list(state) if key.startswith(f"optimizer.{OPTIONS}")}
        tensors: dict[str, Any] = {f"model.{name}": value for name, value in self.model.values().items()}
        return tensors | state, options | dict.fromkeys((*self.others(), "training", f"random.{rank}"))

    def _optimized_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimizers, by name."""
        first_names = self.model.first_names()
        groups = [group for optimizer in list_optimizers(self.optimizer) for group in named_groups(optimizer, first_names)]
        return {name: parameter for names, parameters in groups for name, parameter in zip(names, parameters, strict=True)}

    def load_others(self, values: Mapping[str, Any], tensor_keys: Iterable[str]) -> None:
        """Load everything but the model and the optimizers; optimizers are only compared with the saved options and keys."""
        names = self.model.first_names()
        for optimizer in list_optimizers(self.optimizer):
            check_options(optimizer, names, _optimizer_entries(values))
            check_state(optimizer, names, _optimizer_entries(dict.fromkeys(tensor_keys)))
        for key, stateful in self.others().items():
            _check_groups(stateful, values[key][0])
            stateful.load_state_dict(values[key][0])

    def load_tensors(self, tensors: Mapping[str, Any], values: Mapping[str, Any], rank: int) -> None:
        """Load the model, the optimizers and the random state."""
        entries = {key.removeprefix("model."): unwrap_collection(value) for key, value in tensors.items() if key.startswith("model.")}
        self.model.load(entries)
        for optimizer in list_optimizers(self.optimizer):
            load_optimizer(optimizer, self.model.first_names(), _optimizer_entries(tensors) | _optimizer_entries(values))
        self.model.set_stream_position(values["training"][0])
        set_random_state(values[f"random.{rank}"][0])

    @contextmanager
    def restore_others_on_error(self) -> Iterator[None]:
        """Restore everything but the model and the optimizers if something fails inside."""
        others = self.others()
        before = {key: copy.deepcopy(stateful.state_dict()) for key, stateful in others.items()}
        try:
            yield
        except BaseException:
            for key, stateful in others.items():
                stateful.load_state_dict(before[key])
            raise


def _optimizer_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("optimizer."): value for key, value in entries.items() if key.startswith("optimizer.")}


def _check_groups(scheduler: Any, state: Any) -> None:
    """Check the number of groups: a scheduler keeps its rates by group index, so every rank must have all groups."""
    saved, mine = isinstance(state, dict) and state.get("base_lrs"), getattr(scheduler, "base_lrs", None)
    if isinstance(saved, list) and isinstance(mine, list) and len(saved) != len(mine):
        raise CheckpointError(
            f"the scheduler was saved with {len(saved)} optimizer groups, but has {len(mine)} here: "
            "give the optimizer the same groups on every rank, empty ones if a rank has no such parameters"
        )
