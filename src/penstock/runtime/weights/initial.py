"""Initial values that do not depend on who draws them: the same for the whole model and for the stages of a rank.

What torch draws for a layer depends on everything drawn before it. Here every module, or every layer, draws from its own stream,
derived from the seed and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.torch_internals.modules import own_buffers, own_children, own_parameters
from penstock.runtime.weights.source import OwnedTensors, drop, move, named_tensors, put, put_built


@dataclass(frozen=True)
class Initial:
    """Initial values from the modules' own `reset_parameters`, or from `init(name, module)`, each drawn from a stream of (seed, name).

    `Initial(seed=0)(model)` fills a plain model, and `Pipeline(model, ..., weights=Initial(seed=0))` fills the stages of each rank of a
    model built on the meta device with the same values. Submodules come before the module that holds them. A tied parameter has the
    values of the first module that has it. Values are drawn on the host, and moved to `device`.
    """

    seed: int
    init: Callable[[str, nn.Module], None] | None = None
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        done: set[int] = set()
        with preserve_random_state(), torch.no_grad():
            for name, module in _submodules_first(owned):
                self._initialise(name, module, owned.idents, done)
        for _, tensor in owned.named():
            if id(tensor) in done and self.device != "cpu":
                move(tensor, self.device)

    def _initialise(self, name: str, module: nn.Module, owned: frozenset[int], done: set[int]) -> None:
        """Initialise one module with all tensors that it holds itself, so that it draws the same whichever of them are owned."""
        direct = {
            f"{name}.{key}".lstrip("."): tensor
            for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
            if tensor is not None
        }
        new = {key: tensor for key, tensor in direct.items() if id(tensor) in owned and id(tensor) not in done}
        if not new or not self._can_initialise(name, module, new):
            return
        absent = {key: tensor for key, tensor in direct.items() if tensor.is_meta}
        saved = [(tensor, tensor.clone()) for tensor in direct.values() if id(tensor) in done]
        for tensor in absent.values():
            put(tensor, torch.full(tensor.shape, _unset_value(tensor.dtype), dtype=tensor.dtype), "cpu")
        draw_from(self.seed, name)
        reset = _find_reset(module)
        if self.init is not None:
            self.init(name, module)
        elif reset is not None:
            reset()
        for tensor, value in saved:
            tensor.copy_(value)
        for key, tensor in absent.items():
            if id(tensor) not in owned:
                drop(tensor)
            elif _is_unset(tensor):
                initialiser = "init" if self.init is not None else f"{type(module).__name__}.reset_parameters()"
                raise WeightsError(f"{key} was left without values by {initialiser}: give Initial an init= that sets it, or use Built")
        done.update(map(id, new.values()))

    def _can_initialise(self, name: str, module: nn.Module, new: Mapping[str, Tensor]) -> bool:
        """Whether the module has an initialiser; one that only holds buffers with values needs none."""
        if self.init is not None or _find_reset(module) is not None:
            return True
        if all(not isinstance(tensor, nn.Parameter) and not tensor.is_meta for tensor in new.values()):
            return False
        raise WeightsError(
            f"{name or 'the model'}, a {type(module).__name__}, holds {next(iter(new))} and has no reset_parameters(): "
            "write one, give Initial an init=, or use Built"
        )


def _find_reset(module: nn.Module) -> Callable[[], None] | None:
    """The module's own initialiser; some modules of torch have it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _submodules_first(owned: OwnedTensors) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, after its submodules."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, inner in own_children(module).items():
            if inner is not None:
                yield from walk(f"{name}.{key}".lstrip("."), inner)
        yield name, module

    for prefix, part in owned.modules.items():
        yield from walk(prefix, part)


def _unset_value(dtype: torch.dtype) -> float | int | bool:
    """The value that marks an element as not set."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and tensor.numel() > 0 and bool((tensor == _unset_value(tensor.dtype)).all())


@dataclass(frozen=True)
class Built:
    """Initial values from building layers: one function per layer name, which draws from a stream of (seed, name).

    For layers that set values, buffers included, in their constructor. Only this rank's layers are built:
    `Built({"embed": lambda: Embed(...), "blocks.0": lambda: Block(...), ...}, seed=0)`. A tied parameter has the values of the first
    layer that has it.
    """

    builders: Mapping[str, Callable[[], nn.Module]]
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        done: set[int] = set()
        with preserve_random_state():
            for name, build in self.builders.items():
                layer = dict(named_tensors("", owned.submodule(name)))
                new = {key: tensor for key, tensor in layer.items() if id(tensor) in owned.idents and id(tensor) not in done}
                if new:
                    draw_from(self.seed, name)
                    built = dict(named_tensors("", build()))
                    for key, tensor in new.items():
                        put_built(tensor, built.get(key), self.device, key, f"the builder of {name}")
                    done.update(map(id, new.values()))
