"""Giving values to the parameters of a model that was built on the meta device: only to those that this rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.runtime.model.partition import Partition


@dataclass(frozen=True)
class Owned:
    """A model, and which of its parameters and buffers are to have values here."""

    modules: Mapping[str, nn.Module]
    """The parts of the model by name; a whole model is one part without a name."""
    tensors: frozenset[int]
    """What is to have values, by identity."""

    @classmethod
    def of(cls, model: nn.Module | Owned) -> Owned:
        """All of a plain model."""
        if isinstance(model, Owned):
            return model
        return cls({"": model}, frozenset(id(tensor) for _, tensor in tensors_of("", model)))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers of the model, under each of their names."""
        for prefix, module in self.modules.items():
            yield from tensors_of(prefix, module)

    def names(self) -> dict[int, list[str]]:
        """The names of what is to have values here."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.named():
            if id(tensor) in self.tensors:
                names.setdefault(id(tensor), []).append(name)
        return names

    def get(self, name: str) -> nn.Module:
        """The part of the model of this name."""
        for prefix, module in self.modules.items():
            inner = name if not prefix else name.removeprefix(prefix).removeprefix(".") if f"{name}.".startswith(f"{prefix}.") else None
            if inner is not None:
                try:
                    return module.get_submodule(inner)
                except AttributeError:
                    continue
        raise WeightsError(f"the model has no part {name!r}")

    def absent(self) -> Owned:
        """What has no values yet."""
        return Owned(self.modules, frozenset(id(tensor) for _, tensor in self.named() if id(tensor) in self.tensors and tensor.is_meta))


def tensors_of(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a module, under each of their names."""
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)


Give = Callable[[Owned], None]
"""Gives values to what a rank has of a model: `Initial`, `Built`, `Replayed`, `Safetensors`, or a function."""
Weights = Give | Sequence[Give] | None


def give_weights(weights: Weights, model: Any, partition: Partition, stages: Iterable[int]) -> None:
    """Give this rank's stages their values, each what those before it did not; refuse to go on with anything that has none."""
    mine = [part for index in stages if (part := partition.parts[index]) is not None]
    tensors = [tensor for part in mine for layer in part.modules for _, tensor in tensors_of("", layer)]
    if isinstance(model, nn.Module):
        modules: dict[str, nn.Module] = {"": model}
    else:
        modules = {str(k): each for k, each in (model.items() if isinstance(model, Mapping) else enumerate(model))}
    owned = Owned(modules, frozenset(map(id, tensors)))
    given = [] if weights is None else [weights] if callable(weights) else list(weights)
    for number, give in enumerate(given):
        give(owned if number == 0 else owned.absent())
    left = [names[0] for names in owned.absent().names().values()]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        advice = "give Pipeline(weights=...), Initial(seed=0) say" if not given else "weights= gave it none"
        raise WeightsError(f"{left[0]}{more} of this rank's stages is on the meta device and has no values: {advice}")


def put(tensor: Tensor, value: Tensor, device: torch.device | str) -> None:
    """Give a parameter or buffer these values. One on the meta device becomes a real one, and stays the same object."""
    with torch.no_grad():
        if _is_sharded(tensor):
            tensor.copy_(_sharded(value, tensor))
        elif tensor.is_meta:
            _replace(tensor, value.to(device=device, dtype=tensor.dtype, copy=True).reshape(tensor.shape))
        else:
            tensor.copy_(value)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _sharded(value: Tensor, like: Any) -> Tensor:
    """The values as they are laid out over ranks, each of which has all of them here."""
    from torch.distributed.tensor import distribute_tensor

    if like.is_meta:
        raise WeightsError("a sharded parameter on the meta device cannot get values: call to_empty() on its module before")
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)


def drop(tensor: Tensor) -> None:
    """Let go of the values again."""
    _replace(tensor, torch.empty_like(tensor, device="meta"))


def move(tensor: Tensor, device: torch.device | str) -> None:
    if not _is_sharded(tensor) and tensor.device != torch.device(device):
        _replace(tensor, tensor.detach().to(device))


def _replace(tensor: Tensor, fresh: Tensor) -> None:
    """Keep the object, so that whoever holds it, a tied layer say, sees the new values; and what was noted on it."""
    if isinstance(tensor, nn.Parameter):
        fresh = torch.Tensor._make_subclass(type(tensor), fresh.detach(), tensor.requires_grad)
    fresh.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
