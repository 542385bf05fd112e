"""How much memory is really held: distinct storages, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Sizes = dict[int, int]
"""Bytes by storage."""


def sizes(value: Any) -> Sizes:
    """The storages of all tensors in a tree."""
    found: Sizes = {}
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            _note(found, leaf)
    return found


def _note(found: Sizes, tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    else:  # sparse: indices and values
        found[id(tensor)] = tensor.element_size() * int(tensor._nnz())


def total(held: Mapping[int, int], without: Mapping[int, int]) -> int:
    """The bytes of what is held, less what is there anyway."""
    return sum(size for key, size in held.items() if key not in without)


def of_module(module: nn.Module) -> Sizes:
    """Parameters and buffers."""
    return sizes([*(p.detach() for p in module.parameters()), *module.buffers()])


@contextmanager
def saved() -> Iterator[Sizes]:
    """Gives the storages that autograd saves for the backward inside, as they come to be."""
    found: Sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        _note(found, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def of_optimizer(module: nn.Module, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None) -> int:
    """What an optimizer keeps for the module's parameters after a step, tried on copies."""
    copies = [nn.Parameter(torch.zeros_like(p)) for p in module.parameters() if p.requires_grad]
    if make is None or not copies:
        return 0
    for each in copies:
        each.grad = torch.zeros_like(each)
    optimizer = make(copies)
    optimizer.step()
    return sum(sizes(dict(optimizer.state)).values()) if optimizer.state else 0
