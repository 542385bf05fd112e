"""Cutting a model into stages: by layers, by a list of modules, or as a plan says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import PlacementError, nearest
from penstock.runtime.sequence.token_wise import DECLARATION, check_sliceable
from penstock.runtime.torch_internals.modules import own_children


@dataclass(frozen=True)
class Layers:
    """A model's layers by name, with what runs before and after them: `Layers("blocks", head=["embed"], tail=["norm", "head"])`.

    Each part takes the output of the one before it; the first takes the batch. `sizes` is the number of parts per stage, head and tail
    included; by default they are balanced by parameters. `unused` names the parts of the model that do not run.
    """

    layers: str
    head: Sequence[str] = ()
    tail: Sequence[str] = ()
    sizes: Sequence[int] | None = None
    unused: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """One stage's module, and the layers in it with their names in the model."""

    module: nn.Module
    layers: tuple[str, ...]
    modules: tuple[nn.Module, ...] = field(repr=False)
    unpack: bool = False
    """Whether a tuple from the stage before becomes several arguments, as for modules that were written as stages."""

    @property
    def parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """The current parameters under the model's own names; one with several names occurs several times."""
        return tuple(
            (f"{prefix}.{name}", parameter)
            for prefix, layer in zip(self.layers, self.modules, strict=True)
            for name, parameter in layer.named_parameters(remove_duplicate=False)
        )

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in {id(p): p for _, p in self.parameters}.values())


class LayerSequence(nn.Module):
    """Layers one after the other, each called with the output of the one before.

    A keyword argument is passed to every layer that takes it.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls: Mapping[Any, Callable[..., Any]] = {}
        """Functions to run in place of layers during one forward, by the keys of `list_units`: recomputed layers, for example."""

    def list_units(self) -> list[dict[Any, nn.Module]]:
        """The modules of each layer, under a key for each. A stage's module that has this and `calls` can recompute single layers."""
        return [{place: layer} for place, layer in enumerate(self.layers)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            for call in self.iterate():
                args = (call(*args),)
            return args[0]
        selected = [_select_kwargs(layer, kwargs) for layer in self.layers]
        unknown = [name for name in kwargs if not any(name in names for names in selected)]
        if unknown:
            raise TypeError(f"no layer of the stage takes the keyword argument {unknown[0]!r}")
        for call, layer_kwargs in zip(self.iterate(), selected, strict=True):
            args = (call(*args, **layer_kwargs),)
        return args[0]

    def iterate(self) -> Iterable[Callable[..., Any]]:
        """Yield the layers, or the functions that run in their place, each just before it runs."""
        if not self.calls:
            return self.layers
        return [self.calls.get(place, layer) for place, layer in enumerate(self.layers)]


def _select_kwargs(layer: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a layer takes."""
    known = inspect.signature(layer.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in known}


@dataclass(frozen=True)
class Partition:
    """One module per stage; None for a stage that is not on this rank."""

    parts: tuple[Part | None, ...]

    def __str__(self) -> str:
        """Return one line per stage: its layers and its number of parameters."""
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

    def list_tied(self) -> list[list[tuple[int, str, nn.Parameter]]]:
        """Return the parameters that several stages share, each with its stages and its names there."""
        seen: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
        for stage, part in enumerate(self.parts):
            for name, parameter in part.parameters if part is not None else ():
                holders = seen.setdefault(id(parameter), [])
                if not holders or holders[-1][0] != stage:
                    holders.append((stage, name, parameter))
        return [holders for holders in seen.values() if len(holders) > 1]


def partition(model: Any, stages: int, split: Any = None, without: Sequence[str] = ()) -> Partition:
    """Cut a model into stages: a whole module, a sequence with one module per stage, or a map with this rank's stages.

    `split` says how to cut a whole module: numbers of layers per stage, `Layers`, or an object with a method `cut(model, stages)`; by
    default its layers are balanced by parameters. The layers named in `without` are in no stage: the ends of a spread vocabulary.
    """
    _check_materialised(model)
    if isinstance(model, Mapping):
        return _cut_by_map(model, stages)
    if isinstance(model, (list, tuple)) or (isinstance(model, nn.ModuleList) and split is None):
        if len(model) != stages:
            raise PlacementError(f"{len(model)} modules for {stages} stages: give one per stage")
        return _cut_by_map(dict(enumerate(model)), stages)
    if hasattr(split, "cut"):
        return split.cut(model, stages)  # type: ignore[no-any-return]
    if not isinstance(model, nn.Module):
        raise PlacementError(f"a model is a module, a list of modules or a map of modules by stage, got {type(model).__name__}")
    names, layers = list_layers(model, split)
    layers = [layer for name, layer in zip(names, layers, strict=True) if name not in without]
    names = [name for name in names if name not in without]
    cuts = cut_units([[layer] for layer in layers], stages, split.sizes if isinstance(split, Layers) else split, model, unit="layer")
    _check_coverage(model, names, layers, (*(split.unused if isinstance(split, Layers) else ()), *without))
    return Partition(tuple(_make_part([names[k] for k in chosen], [layers[k] for k in chosen]) for chosen in cuts))


def cut_units(
    units: Sequence[Sequence[nn.Module]], stages: int, sizes: Sequence[int] | None, model: Any, *, unit: str, more: str = ""
) -> list[range]:
    """Return the units of each stage: as many as `sizes` says, by default balanced by parameters. `unit` names one in errors."""
    if sizes is None:  # a unit without parameters has some weight too
        weights = [1 + sum(parameter.numel() for module in modules for parameter in module.parameters()) for modules in units]
        sizes = balance_layers(weights, stages, type(model).__name__)
    if len(sizes) != stages or sum(sizes) != len(units) or min(sizes) < 1:
        raise PlacementError(
            f"split {list(sizes)} for {stages} stages of {len(units)} {unit}s{more}: give each stage at least one and use every {unit} once"
        )
    ends = [0, *accumulate(sizes)]
    return [range(start, end) for start, end in pairwise(ends)]


def _check_materialised(model: Any) -> None:
    """Refuse layers that get their shapes from a first batch, which only one rank would see."""
    modules = model.values() if isinstance(model, Mapping) else model if isinstance(model, (list, tuple)) else [model]
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()) if isinstance(module, nn.Module) else ():
            if is_lazy(tensor):
                raise PlacementError(f"{name!r} has no shape before its layer has run: run the model on a sample, then make the pipeline")


def list_layers(model: nn.Module, split: Any) -> tuple[list[str], list[nn.Module]]:
    """Return the names and modules of the model's layers in the order in which they run."""
    if isinstance(split, Layers):
        inner = _find(model, split.layers)
        if not isinstance(inner, (nn.ModuleList, nn.Sequential)):
            raise PlacementError(f"{split.layers!r} is a {type(inner).__name__}, not a list of layers")
        names = [*split.head, *(f"{split.layers}.{name}" for name in own_children(inner)), *split.tail]
        return names, [_find(model, name) for name in names]
    if split is not None and not isinstance(split, Sequence):
        raise PlacementError(f"split is a list with the number of layers per stage, or Layers(...), got {type(split).__name__}")
    if not isinstance(model, nn.ModuleList) and getattr(type(model), "forward", None) is not nn.Sequential.forward:
        raise PlacementError(
            f"a {type(model).__name__} does not say in which order its layers run: "
            'give split=Layers("blocks", head=[...], tail=[...]), an nn.Sequential, or a list with one module per stage'
        )
    # Not named_children(), which leaves out a layer that occurs a second time.
    return list(own_children(model)), [layer for layer in own_children(model).values() if layer is not None]


def _find(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        known = [path for path, _ in model.named_modules() if path]
        raise PlacementError(f"the model has no part {name!r}: {nearest(name, known)}") from None


def _make_part(names: Sequence[str], layers: Sequence[nn.Module], unpack: bool = False) -> Part:
    return Part(layers[0] if len(layers) == 1 else LayerSequence(layers), tuple(names), tuple(layers), unpack)


def balance_layers(weights: Sequence[int], stages: int, what: str) -> list[int]:
    """Return the number of layers per stage that makes the largest sum of weights as small as possible."""
    if len(weights) < stages:
        raise PlacementError(f"{what} has {len(weights)} layers, too few for {stages} stages")
    sums = [0, *accumulate(weights)]
    largest = [sums]
    """By stages and layers, counted from one and zero: the smallest possible largest sum of the first layers in the first stages."""
    starts: list[list[int]] = [[0] * len(sums)]
    """The same for where the last of these stages starts."""
    for count in range(1, stages):
        before, values, places = largest[-1], [0] * len(sums), [0] * len(sums)
        for end in range(count + 1, len(sums) - (stages - 1 - count)):  # the stages behind need a layer each
            values[end], places[end] = min((max(before[start], sums[end] - sums[start]), start) for start in range(count, end))
        largest.append(values)
        starts.append(places)
    ends = [len(weights)]
    for count in range(stages - 1, -1, -1):
        ends.append(starts[count][ends[-1]])
    return [end - start for end, start in pairwise(ends)][::-1]


def _check_coverage(model: nn.Module, names: Sequence[str], layers: Sequence[nn.Module], unused: Sequence[str]) -> None:
    """Check that every layer, parameter and buffer of the model is in a stage, and no layer in two under one name."""
    for number, name in enumerate(names):
        around = [name[:at] for at, letter in enumerate(name) if letter == "."]
        twice = next((other for other in around if other in names), name if name in names[:number] else None)
        if twice is not None:
            raise PlacementError(f"{name!r} of the model would run twice, as itself and in {twice!r}: name it once in the split")
    covered = [*layers, *(_find(model, name) for name in unused)]
    inside = {id(module) for layer in covered for module in layer.modules()}
    tensors = {id(tensor) for layer in covered for tensor in (*layer.parameters(), *layer.buffers())}
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) not in tensors]
    missing += [
        name for name, module in model.named_modules() if not own_children(module) and id(module) not in inside and module is not model
    ]
    if missing:
        raise PlacementError(
            f"{missing[0]!r} of the model is in no stage: name the part that it belongs to in the split, as head, layer, tail or unused"
        )


def _cut_by_map(modules: Mapping[int, nn.Module], stages: int) -> Partition:
    wrong = [stage for stage in modules if stage not in range(stages)]
    if wrong:
        raise PlacementError(f"stage {wrong[0]!r} in the map of modules: there are stages 0 to {stages - 1}")
    return Partition(tuple(_make_part([str(k)], [modules[k]], unpack=True) if k in modules else None for k in range(stages)))


def check_slices(cut: Partition) -> None:
    """Refuse stages that cannot run on slices of a sequence, as far as they are on this rank."""
    for part in cut.parts:
        for name, module in zip(part.layers, part.modules, strict=True) if part is not None else ():
            if part is None or getattr(part.module, DECLARATION, False) is not True:
                check_sliceable(name, module)


def apply_plan_split(model: Any, plan: Any, split: Any) -> tuple[Any, Any]:
    """Return the model and its split: the plan's unless another is given. A list with one module per layer is cut too."""
    sizes = None if isinstance(plan, str) else getattr(plan, "partition", None)  # str has a method of that name
    if sizes is None or isinstance(model, Mapping):
        return model, split
    if hasattr(split, "sizes") and split.sizes is None:
        return model, replace(split, sizes=sizes)
    if split is not None:
        return model, split
    if isinstance(model, (list, tuple)):
        return (nn.Sequential(*model), sizes) if len(model) == sum(sizes) > len(sizes) else (model, None)
    return model, sizes
