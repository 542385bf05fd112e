"""What this rank holds of a model, under the model's own names."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.runtime.pipeline import Pipeline

Model = Pipeline | nn.Module
"""A pipeline, or a plain module on one process."""
Ties = list[tuple[str, ...]]
"""Names of one parameter each, the first one being that of the model's first layer that has it."""
_Place = tuple[int, int]
_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What compiled and checkpointed modules put into the names of those within."""


@dataclass(frozen=True)
class Held:
    """The layers that this rank has, by name; a plain module is one layer without a name."""

    layers: tuple[tuple[str, nn.Module], ...]

    @classmethod
    def of(cls, model: Model) -> Held:
        if isinstance(model, nn.Module):
            return cls((("", model),))
        parts = [part for index in model.stages if (part := model.partition.parts[index]) is not None]
        return cls(tuple((f"{name}.", layer) for part in parts for name, layer in zip(part.layers, part.modules, strict=True)))

    def state(self) -> dict[str, Any]:
        """Every parameter, persistent buffer and further state. The tensors are the model's own."""
        return {original(prefix + key): value for prefix, layer in self.layers for key, value in layer.state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Give all modules their state, with whatever they do to it."""
        for prefix, layer in self.layers:
            layer.load_state_dict({key: state[original(prefix + key)] for key in layer.state_dict()})

    def parameters(self) -> dict[int, str]:
        """The first name of every parameter, by its identity."""
        names: dict[int, str] = {}
        for prefix, layer in self.layers:
            for name, parameter in layer.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False):
                names.setdefault(id(parameter), original(name))
        return names


def original(name: str) -> str:
    """The name as the model's author wrote it."""
    for wrapped in _WRAPPED:
        name = name.replace(wrapped, "")
    return name


Known = dict[Hashable, list[tuple[_Place, str]]]
"""For each parameter with what tells it from others, its places and names."""


def known_names(model: Model) -> Known:
    """All names that this rank knows its parameters by."""
    found: Known = {}
    if isinstance(model, nn.Module):
        for k, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
            found.setdefault(id(parameter), []).append(((0, k), original(name)))
        return _numbered(found)
    first: dict[int, Hashable] = {}
    for index in model.stages:
        part = model.partition.parts[index]
        for k, (name, parameter) in enumerate(part.parameters if part is not None else ()):
            key = first.setdefault(id(parameter), model.shared.place.get(name, (index, k)))
            found.setdefault(key, []).append(((index, k), original(name)))
    return found


def _numbered(found: Known) -> Known:
    """By the first place instead of an identity, which is another on every rank."""
    return {min(names)[0]: names for names in found.values()}


def ties_of(everyone: Sequence[Known]) -> Ties:
    """The parameters that have several names, over all ranks."""
    merged: dict[Hashable, set[tuple[_Place, str]]] = {}
    for theirs in everyone:
        for key, names in theirs.items():
            merged.setdefault(key, set()).update(names)
    ordered = (list(dict.fromkeys(name for _, name in sorted(names))) for names in merged.values())
    return [tuple(names) for names in ordered if len(names) > 1]
