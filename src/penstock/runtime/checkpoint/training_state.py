"""All that a training run has to continue with: what of it is saved, and how it is put back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.model_state import Held, Model
from penstock.runtime.checkpoint.optimizer_state import (
    OPTIONS,
    Optimizers,
    Same,
    check_options,
    check_state,
    groups_of,
    leaf,
    listed,
    load_optimizer,
    optimizer_state,
    unwrapped,
)
from penstock.runtime.model.random_streams import capture_random_state, set_random_state
from penstock.runtime.pipeline import Pipeline

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.reading import Reading

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything that can tell its state and take it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


Schedulers = Stateful | Sequence[Stateful] | None


@dataclass(frozen=True)
class Training:
    """What is saved and loaded together."""

    model: Model
    optimizer: Optimizers = None
    scheduler: Schedulers = None
    data: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def others(self) -> dict[str, Stateful]:
        """All besides the model and the optimizers, by the key that it is saved under."""
        schedulers = [] if self.scheduler is None else self.scheduler if isinstance(self.scheduler, Sequence) else [self.scheduler]
        named = {f"scheduler.{k}": each for k, each in enumerate(schedulers)}
        if self.data is not None:
            named["data"] = self.data
        return named | {f"extra.{name}": each for name, each in self.extra.items()}

    # Saving -----------------------------------------------------------------------------------------------------------

    def state(self, rank: int, step: int, first: Mapping[str, str]) -> tuple[dict[str, Any], Same]:
        """This rank's state, and further keys of what is in it. `first` has the name that a tied parameter is saved under."""
        held = Held.of(self.model)
        values = {first.get(name, name): leaf(value) for name, value in held.state().items()}
        missing = next((name for name, value in values.items() if isinstance(value, Tensor) and value.is_meta), None)
        if missing is not None:
            raise CheckpointError(f"{missing} is on the meta device and has no values to save")
        names = {ident: first.get(name, name) for ident, name in held.parameters().items()}
        optimizer, same = optimizer_state(self.optimizer, names)
        state: dict[str, Any] = {"model": values, "optimizer": optimizer}
        state[f"random.{rank}"] = (capture_random_state(),)
        if rank == 0:
            state |= {key: (each.state_dict(),) for key, each in self.others().items()}
            state["training"] = ({"step": step, **self._streams()},)
        return state, {f"optimizer.{key}": [f"optimizer.{other}" for other in others] for key, others in same.items()}

    def _streams(self) -> dict[str, Any]:
        """Where the streams of a pipeline with a seed stand."""
        return {"seed": self.model.seed, "steps": self.model._steps} if isinstance(self.model, Pipeline) else {}

    # Loading ----------------------------------------------------------------------------------------------------------

    def room(self, reading: Reading, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where to read what into, by key: tensors, of which the model's are its own, and what can be refused before they change."""
        held = Held.of(self.model)
        state = reading.optimizer(self._updated(held))
        options = {key: state.pop(key) for key in list(state) if key.startswith(f"optimizer.{OPTIONS}")}
        room: dict[str, Any] = {f"model.{name}": value for name, value in held.state().items()}
        return room | state, options | dict.fromkeys((*self.others(), "training", f"random.{rank}"))

    def _updated(self, held: Held) -> dict[str, nn.Parameter]:
        """The parameters that the optimizers have, by name."""
        groups = [group for optimizer in listed(self.optimizer) for group in groups_of(optimizer, held.parameters())]
        return {name: parameter for names, parameters in groups for name, parameter in zip(names, parameters, strict=True)}

    def load_others(self, rest: Mapping[str, Any], room: Iterable[str]) -> None:
        """Put back all besides the model and the optimizers, which are only compared with what was saved."""
        names = Held.of(self.model).parameters()
        for optimizer in listed(self.optimizer):
            check_options(optimizer, names, _of_optimizer(rest))
            check_state(optimizer, names, _of_optimizer(dict.fromkeys(room)))
        for key, each in self.others().items():
            _check_groups(each, rest[key][0])
            each.load_state_dict(rest[key][0])

    def load(self, room: Mapping[str, Any], rest: Mapping[str, Any], rank: int) -> None:
        """Put back the model and the optimizers, and where the random streams stand."""
        held = Held.of(self.model)
        held.load({key.removeprefix("model."): unwrapped(value) for key, value in room.items() if key.startswith("model.")})
        for optimizer in listed(self.optimizer):
            load_optimizer(optimizer, held.parameters(), _of_optimizer(room) | _of_optimizer(rest))
        self._set_streams(rest["training"][0])
        set_random_state(rest[f"random.{rank}"][0])

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """All besides the model and the optimizers is as before where something fails inside."""
        others = self.others()
        before = {key: copy.deepcopy(each.state_dict()) for key, each in others.items()}
        try:
            yield
        except BaseException:
            for key, each in others.items():
                each.load_state_dict(before[key])
            raise

    def _set_streams(self, said: Mapping[str, Any]) -> None:
        if not isinstance(self.model, Pipeline):
            return
        self.model._steps = said.get("steps", said["step"])
        if said.get("seed", self.model.seed) != self.model.seed:
            logger.warning("saved with seed %s, loaded with seed %s: random numbers will not continue", said["seed"], self.model.seed)


def _of_optimizer(room: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("optimizer."): value for key, value in room.items() if key.startswith("optimizer.")}


def _check_groups(scheduler: Any, state: Any) -> None:
    """A scheduler's rates belong to the optimizer's groups by their number, so every rank must have all groups."""
    saved, mine = isinstance(state, dict) and state.get("base_lrs"), getattr(scheduler, "base_lrs", None)
    if isinstance(saved, list) and isinstance(mine, list) and len(saved) != len(mine):
        raise CheckpointError(
            f"the scheduler was saved with {len(saved)} groups of the optimizer's, and has {len(mine)}: "
            "give the optimizer the same groups on every rank, empty ones where a rank has no such parameters"
        )
