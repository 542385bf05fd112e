"""Trees that cross the boundary between two stages, or make up a batch: written by name, and read into one tensor.

Reading depends on the structure: the same leaves in a list and in a tuple give different numbers, so that a lost structure shows.
"""

from __future__ import annotations

import enum
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

WIDTH = 6
"""The width of what crosses a boundary."""


class Pair(NamedTuple):
    """A named tuple, which is a pytree and is not unpacked into arguments."""

    value: Any
    other: Any


@dataclass
class Packet:
    """A dataclass that is registered as a pytree."""

    value: Any
    other: Any
    name: str = "packet"


pytree.register_pytree_node(
    Packet,
    lambda packet: ([packet.value, packet.other], packet.name),
    lambda leaves, name: Packet(*leaves, name),
    serialized_type_name="fuzz.trees.Packet",
)


@dataclass
class Box:
    """A dataclass that is not registered: to a pytree it is a leaf that hides its tensor."""

    value: Any


class Mode(enum.Enum):
    """A plain value that is neither a number nor text."""

    SLOW = 2


class Marked(Tensor):
    """A tensor subclass that computes as a tensor does and adds nothing but its class."""


class Wrapped(Tensor):
    """A wrapper subclass: a tensor without memory of its own around another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Wrapped, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return Wrapped(h)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0].inner if isinstance(grads[0], Wrapped) else grads[0]


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wrapped: Tensor) -> Tensor:
        assert isinstance(wrapped, Wrapped)
        return wrapped.inner.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return Wrapped(grads[0])


class Writer(NamedTuple):
    """What a stage's output is made of: the tensor, and what the stage owns."""

    h: Tensor
    buffer: Tensor
    weight: Tensor


def _attribute(own: Writer) -> Tensor:
    own.h.scale = 3.0  # type: ignore[attr-defined]
    return own.h


def _nested(own: Writer) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor([own.h[:1], own.h[1:]], layout=torch.jagged)


WRITERS: dict[str, Callable[[Writer], Any]] = {
    "tensor": lambda own: own.h,
    "tuple": lambda own: (own.h, own.h.sum(1, keepdim=True)),
    "single": lambda own: (own.h,),
    "list": lambda own: [own.h, own.h[:, :2] * 2],
    "dict": lambda own: {"b": own.h, "a": own.h * 0.5},
    "deep": lambda own: {"x": [own.h, (own.h * 2, {"y": own.h.sum(0)})], "n": 3},
    "named": lambda own: Pair(own.h, own.h * 0.5),
    "packet": lambda own: Packet(own.h, [own.h.mean(1, keepdim=True)]),
    "twice": lambda own: (own.h, own.h),
    "twice_list": lambda own: [own.h, own.h],
    "view": lambda own: (own.h, own.h[:, :3]),
    "view_dict": lambda own: {"a": own.h, "b": own.h.view(-1)},
    "none": lambda own: (own.h, None, 2.5, "ab", True),
    "mask": lambda own: (own.h, own.h > 0),
    "detached": lambda own: {"a": own.h, "b": own.h.detach() * 0.5},
    "same_detached": lambda own: (own.h, own.h.detach()),
    "integers": lambda own: [own.h, (own.h.detach() * 4).long()],
    "scalar": lambda own: (own.h, own.h.mean()),
    "empty": lambda own: (own.h, own.h[:0], own.h[:, :0]),
    "transposed": lambda own: (own.h.t().contiguous().t(), own.h.sum(0)),
    "expanded": lambda own: [own.h, own.h.mean(1, keepdim=True).expand(-1, WIDTH)],
    "half": lambda own: (own.h, own.h.to(torch.bfloat16)),
    "mode": lambda own: (own.h, Mode.SLOW),
    "array": lambda own: (own.h, np.float64(1.5)),
    "buffer": lambda own: (own.h, own.buffer),
    "weight": lambda own: (own.h, own.weight),
    "unused": lambda own: (own.h, own.h * 3, own.h.detach()),
    "loss": lambda own: own.h.square().mean(),
    # Trees that are refused.
    "box": lambda own: Box(own.h),
    "box_in_tuple": lambda own: (own.h, Box(own.h * 2)),
    "userdict": lambda own: UserDict(a=own.h),
    "subclass": lambda own: own.h.as_subclass(Marked),
    "wrapper": lambda own: (own.h, Wrap.apply(own.h * 2)),
    "attribute": _attribute,
    "sparse": lambda own: (own.h, own.h.to_sparse()),
    "nested": _nested,
}
"""What a stage can return, by name."""

REFUSED = ("box", "box_in_tuple", "userdict", "subclass", "wrapper", "attribute", "sparse", "nested")
"""Trees that may be refused at a boundary: anything else than pytrees of plain tensors and plain values."""
ALIASED = ("twice", "twice_list", "view", "view_dict", "same_detached", "expanded", "buffer", "empty", "unused")
"""Trees with tensors that share memory, with each other or with the stage."""


def read(*values: Any) -> Tensor:
    """One tensor of shape (batch, WIDTH) from any trees."""
    if len(values) == 1 and type(values[0]) is Tensor and values[0].shape[1:] == (WIDTH,) and not hasattr(values[0], "scale"):
        return values[0]
    total = _fold(values)
    assert isinstance(total, Tensor), f"no tensor among {values}"
    return total if total.dim() == 2 and total.shape[1] == WIDTH else total + total.new_zeros(1, WIDTH)


_FACTORS: dict[type, float] = {tuple: 0.95, list: 0.9, dict: 0.8, Pair: 0.7, Packet: 0.6, Box: 1.1, UserDict: 1.2}


def _children(value: Any) -> list[Any] | None:
    """What a container holds, in a fixed order; None if the value is a leaf."""
    if isinstance(value, (dict, UserDict)):
        return [value[key] for key in sorted(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Packet):
        return [value.value, value.other, value.name]
    return [value.value] if isinstance(value, Box) else None


def _fold(value: Any) -> Any:
    """A number or tensor: leaves weighted by their place and by the class of what holds them."""
    children = _children(value)
    if children is None:
        return _lift(value)
    total: Any = 0.0
    for place, child in enumerate(children):
        total = total + _fold(child) * (_FACTORS[type(value)] / (place + 1))
    return total


def _lift(leaf: Any) -> Any:
    """A leaf as something that can be added to a tensor of shape (batch, WIDTH)."""
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if isinstance(leaf, Tensor):
        return _lift_tensor(leaf)
    if isinstance(leaf, str):
        return float(len(leaf))
    if isinstance(leaf, enum.Enum):
        return float(leaf.value)
    return 0.0 if leaf is None else float(leaf)


def _lift_tensor(leaf: Tensor) -> Tensor:
    factor = getattr(leaf, "scale", 2.0 if type(leaf) is Marked else 1.0)
    if isinstance(leaf, Wrapped):
        leaf = Unwrap.apply(leaf)  # type: ignore[no-untyped-call]
    if leaf.is_nested:
        leaf = torch.cat(list(leaf.unbind()))
    if leaf.is_sparse:
        leaf = leaf.to_dense()
    if type(leaf) is Marked:
        leaf = leaf.as_subclass(Tensor)
    if leaf.dtype in (torch.bool, torch.int64):
        leaf = leaf.to(torch.get_default_dtype()) * 0.5
    if leaf.numel() == 0:
        return leaf.sum()
    if leaf.dim() == 1 and leaf.shape[0] != WIDTH:
        leaf = leaf.sum()
    if leaf.dim() == 2 and leaf.shape[1] != WIDTH:
        leaf = leaf.sum(1, keepdim=True)
    return leaf if factor == 1.0 else leaf * factor


def list_tensors(value: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of reading."""
    children = _children(value)
    if children is not None:
        return [tensor for child in children for tensor in list_tensors(child)]
    return [value] if isinstance(value, Tensor) else []


def change_in_place(values: Any, which: str) -> None:
    """Change the first or the last tensor of a tree, by an operation that fits its type."""
    tensors = [tensor for tensor in list_tensors(values) if tensor.numel()]
    if not tensors:
        return
    chosen = tensors[0 if which == "first" else -1]
    if chosen.dtype == torch.bool:
        chosen.logical_not_()
    elif chosen.dtype == torch.int64:
        chosen.add_(1)
    else:
        chosen.mul_(0.5)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A tree of the same structure with other tensors; arrays count as tensors here."""
    if isinstance(value, np.ndarray):
        return np.asarray(function(torch.from_numpy(value)))
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (Pair, Packet)):
        return type(value)(map_tensors(function, value.value), map_tensors(function, value.other))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, child) for child in value)
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: map_tensors(function, child) for key, child in value.items()})
    return Box(map_tensors(function, value.value)) if isinstance(value, Box) else value
