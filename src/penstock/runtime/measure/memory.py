"""How much memory tensors hold: distinct storages, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import count_sparse_values, identify_storage

StorageSizes = dict[int, int]
"""Bytes by storage."""


def storage_sizes(value: Any) -> StorageSizes:
    """The storages of all tensors in a tree."""
    sizes: StorageSizes = {}
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            _add(sizes, leaf)
    return sizes


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(storage_sizes(value).values())


def _add(sizes: StorageSizes, tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        sizes[identify_storage(storage)] = storage.nbytes()
    else:  # sparse: indices and values
        sizes[id(tensor)] = tensor.element_size() * int(count_sparse_values(tensor))


def bytes_without(sizes: Mapping[int, int], others: Mapping[int, int]) -> int:
    """The bytes of all storages that are not among `others`."""
    return sum(size for key, size in sizes.items() if key not in others)


def module_sizes(module: nn.Module) -> StorageSizes:
    """The storages of parameters and buffers."""
    return storage_sizes([*(p.detach() for p in module.parameters()), *module.buffers()])


@contextmanager
def watch_saved_tensors() -> Iterator[StorageSizes]:
    """Collect the storages that autograd saves for the backward inside the block."""
    sizes: StorageSizes = {}

    def pack(tensor: Tensor) -> Tensor:
        _add(sizes, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def optimizer_bytes(module: nn.Module, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None) -> int:
    """The bytes that an optimizer keeps for the module's parameters after a step, tried on copies."""
    copies = [nn.Parameter(torch.zeros_like(p)) for p in module.parameters() if p.requires_grad]
    if make is None or not copies:
        return 0
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(copies)
    optimizer.step()
    return bytes_of(dict(optimizer.state)) if optimizer.state else 0
