"""Which layers make up which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.errors import PlacementError, nearest


@dataclass(frozen=True)
class Layers:
    """A model as a list of layers by name, with what runs before and after it: `Layers("blocks", head=["embed"], tail=["norm", "head"])`.

    Each part takes what the one before it returned.
    """

    layers: str
    head: Sequence[str] = ()
    tail: Sequence[str] = ()


Split = Sequence[int] | Layers | None
"""How to cut a whole model: so many layers for each stage, layers by name, or balanced by parameters."""


@dataclass(frozen=True)
class Part:
    """One stage's module, the names of its layers, and its parameters and buffers under the model's own names."""

    module: nn.Module
    layers: tuple[str, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...] = field(repr=False)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


class Run(nn.Module):
    """Layers one after the other, each given what the one before returned."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, value: Any, **kwargs: Any) -> Any:
        for number, layer in enumerate(self.layers):
            value = layer(value, **kwargs) if number == 0 and kwargs else layer(value)
        return value


@dataclass(frozen=True)
class Partition:
    """A module for each stage; None for a stage that is not on this rank."""

    parts: tuple[Part | None, ...]

    def __str__(self) -> str:
        """A line a stage: its layers and how many parameters they have."""
        lines = []
        for stage, part in enumerate(self.parts):
            if part is None:
                lines.append(f"stage {stage}: on another rank")
                continue
            names = part.layers[0] if len(part.layers) == 1 else f"{part.layers[0]} .. {part.layers[-1]} ({len(part.layers)} layers)"
            lines.append(f"stage {stage}: {names}, {part.size:,} parameters")
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.parts)

    def tied(self) -> list[list[tuple[int, str, nn.Parameter]]]:
        """Parameters that several stages share: for each the stages and the names it has there."""
        seen: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
        for stage, part in enumerate(self.parts):
            for name, parameter in part.parameters if part is not None else ():
                holders = seen.setdefault(id(parameter), [])
                if not holders or holders[-1][0] != stage:
                    holders.append((stage, name, parameter))
        return [holders for holders in seen.values() if len(holders) > 1]


def partition(model: Any, stages: int, split: Any = None) -> Partition:
    """Cut a model into stages: a whole module, a sequence with one module a stage, or a map with this rank's stages."""
    if isinstance(model, Mapping):
        return _from_map(model, stages)
    if isinstance(model, (list, tuple)) or (isinstance(model, nn.ModuleList) and split is None):
        return _from_list(list(model), stages)
    if not isinstance(model, nn.Module):
        raise PlacementError(f"a model is a module, a list of modules or a map of them by stage, got {type(model).__name__}")
    names, layers = _layers(model, split)
    sizes = list(split) if isinstance(split, Sequence) else _balanced([_weight(layer) for layer in layers], stages, type(model).__name__)
    if len(sizes) != stages or sum(sizes) != len(layers) or min(sizes) < 1:
        raise PlacementError(
            f"split {sizes} for {stages} stages of {len(layers)} layers: give each stage at least one and use every layer once"
        )
    parts = []
    first = 0
    for size in sizes:
        chosen = range(first, first + size)
        parts.append(_part(model, [names[k] for k in chosen], [layers[k] for k in chosen]))
        first += size
    made = Partition(tuple(parts))
    _check_coverage(model, made)
    return made


def _layers(model: nn.Module, split: Any) -> tuple[list[str], list[nn.Module]]:
    """The model's layers in the order in which they run."""
    if isinstance(split, Layers):
        inner = _find(model, split.layers)
        if not isinstance(inner, (nn.ModuleList, nn.Sequential)):
            raise PlacementError(f"{split.layers!r} is a {type(inner).__name__}, not a list of layers")
        names = [*split.head, *(f"{split.layers}.{k}" for k in range(len(inner))), *split.tail]
        return names, [_find(model, name) for name in names]
    if not isinstance(model, nn.Sequential):
        raise PlacementError(
            f"a {type(model).__name__} does not say in which order its layers run: "
            'give split=Layers("blocks", head=[...], tail=[...]), an nn.Sequential, or a list with one module a stage'
        )
    return [name for name, _ in model.named_children()], list(model.children())


def _find(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [each for each, _ in model.named_modules() if each]
        raise PlacementError(f"the model has no part {name!r}: {nearest(name, known)}") from None


def _part(model: nn.Module, names: Sequence[str], layers: Sequence[nn.Module]) -> Part:
    module = layers[0] if len(layers) == 1 else Run(layers)
    parameters = [
        (f"{prefix}.{name}", parameter)
        for prefix, layer in zip(names, layers, strict=True)
        for name, parameter in layer.named_parameters(remove_duplicate=False)
    ]
    return Part(module, tuple(names), tuple(parameters))


def _weight(layer: nn.Module) -> int:
    """What a layer counts for when stages are balanced; one without parameters still counts for something."""
    return sum(parameter.numel() for parameter in layer.parameters()) + 1


def _balanced(weights: Sequence[int], stages: int, what: str) -> list[int]:
    """Contiguous runs whose largest sum is as small as can be; the number of layers of each."""
    count = len(weights)
    if count < stages:
        raise PlacementError(f"{what} has {count} layers, too few for {stages} stages")
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[k][n]: the least largest sum of the first n layers in k stages, and where the last of them starts
    best = [(sums[n], 0) for n in range(count + 1)]
    starts: list[list[int]] = []
    for stage in range(2, stages + 1):
        rows = [(0, 0)] * (count + 1)
        for n in range(stage, count + 1):
            rows[n] = min((max(best[j][0], sums[n] - sums[j]), j) for j in range(stage - 1, n))
        best = rows
        starts.append([start for _, start in rows])
    sizes: list[int] = []
    end = count
    for row in reversed(starts):
        sizes.append(end - row[end])
        end = row[end]
    return [end, *reversed(sizes)]


def _check_coverage(model: nn.Module, made: Partition) -> None:
    """Every parameter and buffer of the model is in some stage."""
    inside = {id(each) for part in made.parts if part for each in (*part.module.parameters(), *part.module.buffers())}
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if id(each) not in inside:
            raise PlacementError(
                f"{name!r} of the model is in no stage: name the part that it belongs to in the split, as head, layer or tail"
            )


def _from_list(modules: list[nn.Module], stages: int) -> Partition:
    if len(modules) != stages:
        raise PlacementError(f"{len(modules)} modules for {stages} stages: give one a stage")
    return _from_map(dict(enumerate(modules)), stages)


def _from_map(modules: Mapping[int, nn.Module], stages: int) -> Partition:
    wrong = [stage for stage in modules if stage not in range(stages)]
    if wrong:
        raise PlacementError(f"stage {wrong[0]!r} in the map of modules: there are stages 0 to {stages - 1}")
    return Partition(tuple(_part(modules[k], [str(k)], [modules[k]]) if k in modules else None for k in range(stages)))
