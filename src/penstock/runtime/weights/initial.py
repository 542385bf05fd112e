"""Initial values that do not depend on who draws them: the same for the whole model and for the stages of a rank.

What torch draws for a layer depends on all that was drawn before it. Here every module, or every layer, draws from a stream of its
own, of the seed and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.weights.source import Owned, drop, move, put


@dataclass(frozen=True)
class Initial:
    """Initial values by the modules' own `reset_parameters`, or by `init(name, module)`, each from a stream of (seed, name).

    `Initial(seed=0)(model)` gives them to a plain model, and `Pipeline(model, ..., weights=Initial(seed=0))` the same ones to the
    stages of each rank of one that was built on the meta device. Modules within a module come before it. A tied parameter has the
    values of the first module that has it. Values are drawn on the host, and moved to `device`.
    """

    seed: int
    init: Callable[[str, nn.Module], None] | None = None
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | Owned) -> None:
        owned = Owned.of(model)
        done: set[int] = set()
        with preserve_random_state(), torch.no_grad():
            for name, module in _inside_out(owned):
                self._unit(name, module, owned.tensors, done)
        for _, tensor in owned.named():
            if id(tensor) in done and self.device != "cpu":
                move(tensor, self.device)

    def _unit(self, name: str, module: nn.Module, owned: frozenset[int], done: set[int]) -> None:
        """One module, with all that it holds itself, so that it draws the same whatever of that is wanted here."""
        direct = {
            f"{name}.{key}".lstrip("."): each for key, each in (*module._parameters.items(), *module._buffers.items()) if each is not None
        }
        new = {key: each for key, each in direct.items() if id(each) in owned and id(each) not in done}
        if not new or not self._has_way(name, module, new):
            return
        absent = {key: each for key, each in direct.items() if each.is_meta}
        kept = [(each, each.clone()) for each in direct.values() if id(each) in done]
        for each in absent.values():
            put(each, torch.full(each.shape, _nothing(each.dtype), dtype=each.dtype), "cpu")
        draw_from(self.seed, name)
        self._begin(name, module)
        for each, value in kept:
            each.copy_(value)
        for key, each in absent.items():
            if id(each) not in owned:
                drop(each)
            elif _is_nothing(each):
                raise WeightsError(
                    f"{key} was left without values by {self._what(module)}: give Initial an init= that sets it, or use Built"
                )
        done.update(map(id, new.values()))

    def _has_way(self, name: str, module: nn.Module, new: Mapping[str, Tensor]) -> bool:
        """Whether the module can begin; one with nothing but buffers that are there already need not."""
        if self.init is not None or _reset(module) is not None:
            return True
        if all(not isinstance(each, nn.Parameter) and not each.is_meta for each in new.values()):
            return False
        raise WeightsError(
            f"{name or 'the model'}, a {type(module).__name__}, holds {next(iter(new))} and has no reset_parameters(): "
            "write one, give Initial an init=, or use Built"
        )

    def _begin(self, name: str, module: nn.Module) -> None:
        reset = _reset(module)
        if self.init is not None:
            self.init(name, module)
        elif reset is not None:
            reset()

    def _what(self, module: nn.Module) -> str:
        return "init" if self.init is not None else f"{type(module).__name__}.reset_parameters()"


def _reset(module: nn.Module) -> Callable[[], None] | None:
    """How a module gives itself values; some of torch's hide it."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _inside_out(owned: Owned) -> Iterator[tuple[str, nn.Module]]:
    """Every module after those within it, once."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, inner in module._modules.items():
            if inner is not None:
                yield from walk(f"{name}.{key}".lstrip("."), inner)
        yield name, module

    for prefix, part in owned.modules.items():
        yield from walk(prefix, part)


def _nothing(dtype: torch.dtype) -> float | int | bool:
    """What stands for no value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _is_nothing(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and tensor.numel() > 0 and bool((tensor == _nothing(tensor.dtype)).all())


@dataclass(frozen=True)
class Built:
    """Initial values by building layers: a function for each layer's name, which draws from a stream of (seed, name).

    For layers that set values where they are constructed, buffers among them. Only what this rank has is built:
    `Built({"embed": lambda: Embed(...), "blocks.0": lambda: Block(...), ...}, seed=0)`. A tied parameter has the values of the first
    layer that has it.
    """

    builders: Mapping[str, Callable[[], nn.Module]]
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | Owned) -> None:
        owned = Owned.of(model)
        done: set[int] = set()
        with preserve_random_state():
            for name, build in self.builders.items():
                layer = owned.get(name)
                wanted = {key: each for key, each in _all(layer) if id(each) in owned.tensors and id(each) not in done}
                if wanted:
                    draw_from(self.seed, name)
                    self._fill(name, wanted, dict(_all(build())))
                    done.update(map(id, wanted.values()))

    def _fill(self, name: str, wanted: Mapping[str, Tensor], built: Mapping[str, Tensor]) -> None:
        for key, each in wanted.items():
            if key not in built or built[key].shape != each.shape:
                found = f"shape {list(built[key].shape)}" if key in built else "nothing"
                raise WeightsError(f"the builder of {name} gives {found} for {key}, which has shape {list(each.shape)} in the model")
            put(each, built[key].detach(), self.device)


def _all(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)
