"""The contract of weight sources, and the tensors that they fill: only those that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import WeightsError
from penstock.runtime.model.partition import Partition
from penstock.runtime.torch_internals.lookup import find_private


@dataclass(frozen=True)
class OwnedTensors:
    """A model, and which of its parameters and buffers need values on this rank."""

    modules: Mapping[str, nn.Module]
    """The parts of the model by name; a whole model is one part with an empty name."""
    idents: frozenset[int]
    """The object identities of the tensors that need values."""

    @classmethod
    def of(cls, model: nn.Module | OwnedTensors) -> OwnedTensors:
        """All tensors of a plain model."""
        if isinstance(model, OwnedTensors):
            return model
        return cls({"": model}, frozenset(id(tensor) for _, tensor in named_tensors("", model)))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers of the model, also those of other ranks, under each of their names."""
        for prefix, module in self.modules.items():
            yield from named_tensors(prefix, module)

    def names(self) -> dict[int, list[str]]:
        """The names of each tensor that needs values, by identity."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.named():
            if id(tensor) in self.idents:
                names.setdefault(id(tensor), []).append(name)
        return names

    def submodule(self, name: str) -> nn.Module:
        """The module of this name in the model."""
        for prefix, module in self.modules.items():
            inner = name if not prefix else name.removeprefix(prefix).removeprefix(".") if f"{name}.".startswith(f"{prefix}.") else None
            if inner is not None:
                try:
                    return module.get_submodule(inner)
                except AttributeError:
                    continue
        raise WeightsError(f"the model has no part {name!r}")

    def without_values(self) -> OwnedTensors:
        """Those that are still on the meta device."""
        missing = frozenset(id(tensor) for _, tensor in self.named() if id(tensor) in self.idents and tensor.is_meta)
        return OwnedTensors(self.modules, missing)


class WeightSource(Protocol):
    """Gives values to the tensors that a rank owns: `Initial`, `Built`, `Replayed`, `Safetensors`, or any function of this form.

    `Pipeline` calls each source once per rank in its constructor, after cutting the model into stages and before sharding and compiling
    them. A source must

    - give values to tensors with `put`, which keeps the objects, so that tied layers and optimizers see them. It may skip tensors, which
      are left to the next source; a tensor that no source has filled is an error of the pipeline;
    - leave all tensors that are not in `model.idents` without values, because they belong to other ranks and may not fit here;
    - give a tensor the same values on every rank and for every partition, because replicas and tied copies are not compared;
    - leave torch's random state as it was.

    The classes of this folder also take a plain `nn.Module`, to fill the unpipelined model with the same values.
    """

    def __call__(self, model: OwnedTensors, /) -> None: ...


Weights = WeightSource | Sequence[WeightSource] | None


def named_tensors(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a module, under each of their names."""
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)


def give_weights(weights: Weights, model: Any, partition: Partition, stages: Iterable[int]) -> None:
    """Give values to the tensors of these stages from one source after the other; raises if a tensor is left without values."""
    parts = [part for index in stages if (part := partition.parts[index]) is not None]
    tensors = [tensor for part in parts for layer in part.modules for _, tensor in named_tensors("", layer)]
    if isinstance(model, nn.Module):
        modules: dict[str, nn.Module] = {"": model}
    else:
        modules = {str(k): module for k, module in (model.items() if isinstance(model, Mapping) else enumerate(model))}
    owned = OwnedTensors(modules, frozenset(map(id, tensors)))
    sources = [] if weights is None else [weights] if callable(weights) else list(weights)
    for number, source in enumerate(sources):
        source(owned if number == 0 else owned.without_values())
    missing = [names[0] for names in owned.without_values().names().values()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        advice = "weights= gave it none" if sources else "give Pipeline(weights=...), for example Initial(seed=0)"
        raise WeightsError(f"{missing[0]}{more} of this rank's stages is on the meta device and has no values: {advice}")


def put(tensor: Tensor, value: Tensor, device: torch.device | str) -> None:
    """Give a parameter or buffer these values. One on the meta device gets memory on `device`, and stays the same object."""
    with torch.no_grad():
        if _is_sharded(tensor):
            tensor.copy_(_shard_like(value, tensor))
        elif tensor.is_meta:
            _replace(tensor, value.to(device=device, dtype=tensor.dtype, copy=True).reshape(tensor.shape))
        else:
            tensor.copy_(value)


def put_built(tensor: Tensor, value: Tensor | None, device: torch.device | str, name: str, builder: str) -> None:
    """Give a tensor the value that `builder` made for it; raises if there is none, or it has another shape."""
    if value is None or value.shape != tensor.shape:
        built = "nothing" if value is None else f"shape {list(value.shape)}"
        raise WeightsError(f"{builder} gives {built} for {name}, which has shape {list(tensor.shape)} in the model")
    put(tensor, value.detach(), device)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _shard_like(value: Tensor, like: Any) -> Tensor:
    """Shard a value that every rank has in full."""
    from torch.distributed.tensor import distribute_tensor

    if like.is_meta:
        raise WeightsError("a sharded parameter on the meta device cannot get values: call to_empty() on its module before")
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)


def drop(tensor: Tensor) -> None:
    """Free a tensor's values: it is on the meta device again."""
    _replace(tensor, torch.empty_like(tensor, device="meta"))


def move(tensor: Tensor, device: torch.device | str) -> None:
    if not _is_sharded(tensor) and tensor.device != torch.device(device):
        _replace(tensor, tensor.detach().to(device))


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Replace the values but keep the object and its attributes, so that all who hold it, tied layers for example, see them."""
    if isinstance(tensor, nn.Parameter):
        value = find_private("torch.Tensor._make_subclass")(type(tensor), value.detach(), tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
