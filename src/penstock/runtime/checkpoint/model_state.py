"""One rank's part of a model, under the parameter names of the unpipelined model."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from penstock.runtime.model.partition import Part

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

logger = logging.getLogger(__name__)

Place = tuple[int, int]
"""A stage, and the index of a parameter in it."""
ParameterNames = dict[Hashable, list[tuple[Place, str]]]
"""The places and names of each parameter, by a key that is the same on all ranks for the same parameter."""
TiedNames = list[tuple[str, ...]]
"""The names of each tied parameter, starting with its name in the first layer that has it."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compiled and checkpointed modules add to parameter names."""


@dataclass(frozen=True)
class ModelState:
    """The layers of one rank, and the names that checkpoints save their parameters and buffers under.

    Nothing else in this folder reads a `Pipeline`. `Checkpoints` also takes a `ModelState` made by other code, of stages that belong to
    no pipeline.
    """

    stages: Mapping[int, Part] = field(default_factory=dict)
    """This rank's stages by number."""
    shared: Mapping[str, Hashable] = field(default_factory=dict)
    """For each parameter that other stages or ranks may share, by name, the key that all of them know it by."""
    module: nn.Module | None = None
    """A plain module in place of stages."""
    pipeline: Pipeline | None = None
    """The pipeline that the stages belong to; its place in the random streams is saved and loaded too."""

    @classmethod
    def of(cls, model: Model) -> ModelState:
        if isinstance(model, ModelState):
            return model
        if isinstance(model, nn.Module):
            return cls(module=model)
        stages = {index: part for index in model.stages if (part := model.partition.parts[index]) is not None}
        return cls(stages, model.shared.place, pipeline=model)

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The layers, each with the prefix of its names; a plain module is one layer without a prefix."""
        if self.module is not None:
            return [("", self.module)]
        parts = self.stages.values()
        return [(f"{name}.", layer) for part in parts for name, layer in zip(part.layers, part.modules, strict=True)]

    def values(self) -> dict[str, Any]:
        """All parameters, persistent buffers and extra state by name. The tensors are the model's own."""
        return {original_name(prefix + key): value for prefix, layer in self.layers() for key, value in layer.state_dict().items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Load values into all layers through their `load_state_dict`, so that hooks run."""
        for prefix, layer in self.layers():
            layer.load_state_dict({key: values[original_name(prefix + key)] for key in layer.state_dict()})

    def first_names(self) -> dict[int, str]:
        """The first name of each parameter, by object identity."""
        names: dict[int, str] = {}
        for prefix, layer in self.layers():
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), original_name(prefix + name))
        return names

    def parameter_names(self) -> ParameterNames:
        """All names of this rank's parameters, for `find_ties` to combine with those of the other ranks."""
        if self.module is not None:
            named = [((0, k), *each) for k, each in enumerate(self.module.named_parameters(remove_duplicate=False))]
        else:
            named = [((index, k), *each) for index, part in self.stages.items() for k, each in enumerate(part.parameters)]
        keys: dict[int, Hashable] = {}
        names: ParameterNames = {}
        for place, name, parameter in named:
            key = keys.setdefault(id(parameter), self.shared.get(name, place))
            names.setdefault(key, []).append((place, original_name(name)))
        return names

    # Of a pipeline ----------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> str:
        """The name of the pipeline's schedule; empty without a pipeline."""
        return "" if self.pipeline is None else self.pipeline.table.name

    def stream_position(self) -> dict[str, Any]:
        """The seed of a pipeline, and how far it is in the streams of that seed."""
        return {} if self.pipeline is None else {"seed": self.pipeline.seed, "steps": self.pipeline.steps}

    def set_stream_position(self, saved: Mapping[str, Any]) -> None:
        """Continue a pipeline's random streams at a saved position; `saved` has the step, and what `stream_position` gave."""
        if self.pipeline is None:
            return
        self.pipeline.steps = saved.get("steps", saved["step"])
        seed = self.pipeline.seed
        if saved.get("seed", seed) != seed:
            logger.warning("saved with seed %s, loaded with seed %s: random numbers will not continue", saved["seed"], seed)


Model: TypeAlias = "Pipeline | nn.Module | ModelState"
"""What can be saved and loaded; a plain module is on one process."""


def original_name(name: str) -> str:
    """Remove what wrappers of torch add to a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def find_ties(everyone: Sequence[ParameterNames]) -> TiedNames:
    """The parameters that have several names, from the `parameter_names` of all ranks."""
    merged: dict[Hashable, set[tuple[Place, str]]] = {}
    for theirs in everyone:
        for key, names in theirs.items():
            merged.setdefault(key, set()).update(names)
    ordered = (list(dict.fromkeys(name for _, name in sorted(names))) for names in merged.values())
    return [tuple(names) for names in ordered if len(names) > 1]
