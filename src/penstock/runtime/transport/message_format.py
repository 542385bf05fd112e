"""Values as bytes for a channel between processes: the tensors one after the other, then a trailer.

A value's form (its tree, shapes, types, strides) is sent once, when it is new. As long as the form stays the same, a message is one
frame of a size that both ends know. The trailer says whether the message has that form, so that no message is ever cut off, and
receives can be posted before anything is known of the messages in progress.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.tensors.boundary import IMMUTABLE_TYPES, check_tensor, explain_registration, load_pickler
from penstock.runtime.tensors.layout import is_dense
from penstock.runtime.torch_internals import pytree

_ALIGN = 64
"""Tensors in a frame are aligned as they would be in memory of their own."""
TRAILER = 64
"""Bytes of a trailer."""
_Words = ctypes.c_int64 * 5

PROGRAM, NUMBER, SENT, OVERFLOW, LENGTH = range(5)
"""The words of a trailer: the program that sent the message, its number in the channel and step, when it was sent (on the sender's
clock), how many bytes follow in a second message (because the form is new; else 0), and how many bytes of the frame are used if it has
no form."""


def trailer(frame: Tensor) -> Any:
    """The words at the end of a frame. The caller must keep the frame for as long as it uses them."""
    return _Words.from_address(frame.data_ptr() + frame.numel() * frame.element_size() - TRAILER)


def allocate_bytes(size: int) -> Tensor:
    """An uninitialised buffer of so many bytes."""
    return torch.empty(size, dtype=torch.uint8)


class SendFrame:
    """A frame to send, with its address and trailer at hand."""

    __slots__ = ("address", "buffers", "size", "words")

    def __init__(self, size: int) -> None:
        frame = allocate_bytes(size)
        self.size, self.buffers, self.address, self.words = size, [frame], frame.data_ptr(), trailer(frame)


@dataclass(frozen=True)
class Leaf:
    """One tensor of a value, and its offset in the frame."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    device: str
    offset: int
    size: int

    @classmethod
    def of(cls, tensor: Tensor, offset: int) -> Leaf:
        check_tensor(tensor)
        stride = tensor.stride() if is_dense(tensor) else _compute_strides(tensor.shape)
        size = tensor.numel() * tensor.element_size()
        return cls(tensor.shape, stride, tensor.dtype, tensor.requires_grad, tensor.device.type, offset, size)

    def fits(self, tensor: Tensor) -> bool:
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.grad
            and (tensor.stride() == self.stride or (not is_dense(tensor) and self.stride == _compute_strides(self.shape)))
            and (tensor.is_cpu if self.device == "cpu" else tensor.device.type == self.device)
        )

    def copy(self, tensor: Tensor, address: int) -> None:
        if self.device != "cpu" or tensor.stride() != self.stride or tensor.is_conj() or tensor.is_neg():
            tensor = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype).copy_(tensor.detach())
        ctypes.memmove(address + self.offset, tensor.data_ptr(), self.size)

    def view(self, frame: Tensor) -> Tensor:
        """The tensor in the frame's memory, neither a copy nor a view in the eyes of autograd."""
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(frame.untyped_storage(), self.offset // self.dtype.itemsize, self.shape, self.stride)
        return self.finish(tensor)

    def finish(self, tensor: Tensor) -> Tensor:
        if self.device != "cpu":
            tensor = tensor.to(self.device)
        return tensor.requires_grad_() if self.grad else tensor


@dataclass(frozen=True)
class Repeated:
    """A place in a tree that holds the same tensor as an earlier place."""

    place: int


_ONE, _LIST = "one tensor", "a list"


def _flatten(value: Any) -> tuple[Sequence[Any], Any]:
    """The leaves of a value and its tree; quick for the most frequent values, one tensor and a list of gradients."""
    if type(value) is Tensor:
        return (value,), _ONE
    if type(value) is list and all(type(part) is Tensor or part is None for part in value):
        return value, _LIST
    return pytree.tree_flatten(value)


@dataclass(frozen=True)
class Form:
    """The form of a value: its tree, its tensors (`Leaf`) and its plain values."""

    spec: Any
    leaves: tuple[Any, ...]
    size: int
    """Bytes of its frame."""
    alone: Leaf | None = field(init=False, compare=False)
    """The only tensor, if the value is one tensor or a list of one: most messages are, so they have a fast path."""
    dtype: torch.dtype = field(init=False, compare=False)
    first: list[int] = field(init=False, compare=False)
    """Per leaf, the first place that holds the same tensor."""

    def __post_init__(self) -> None:
        alone = self.leaves[0] if self.spec in (_ONE, _LIST) and len(self.leaves) == 1 and type(self.leaves[0]) is Leaf else None
        object.__setattr__(self, "alone", alone)
        object.__setattr__(self, "first", [leaf.place if type(leaf) is Repeated else place for place, leaf in enumerate(self.leaves)])
        object.__setattr__(self, "dtype", torch.uint8 if alone is None else alone.dtype)

    @classmethod
    def of(cls, value: Any) -> Form:
        parts, spec = _flatten(value)
        end, first = 0, _find_first_places(parts)
        leaves: list[Any] = []
        for place, part in enumerate(parts):
            if first[place] != place:
                leaves.append(Repeated(first[place]))
            elif isinstance(part, Tensor):
                leaves.append(Leaf.of(part, end))
                end = -(-(end + leaves[-1].size) // _ALIGN) * _ALIGN
            else:
                leaves.append(part)
        return cls(spec, tuple(leaves), end + TRAILER)

    @property
    def has_plain(self) -> bool:
        """Whether there are plain values other than None, which may differ in the next message."""
        return any(leaf is not None and type(leaf) not in (Leaf, Repeated) for leaf in self.leaves)

    def fits(self, value: Any, plain: bool = True) -> bool:
        """Whether a value has this form, so that only its tensors need to be sent. With `plain=False`, plain values may differ."""
        if self.alone is not None:
            if self.spec is _LIST:
                value = value[0] if type(value) is list and len(value) == 1 else None
            return type(value) is Tensor and self.alone.fits(value)
        parts, spec = _flatten(value)
        if not (spec == self.spec and len(parts) == len(self.leaves) and _find_first_places(parts) == self.first):
            return False
        return all(_fits_part(part, leaf, plain) for part, leaf in zip(parts, self.leaves, strict=True))

    def pack(self, value: Any, address: int) -> None:
        """Copy the value's tensors into the frame at this address."""
        if self.alone is not None:
            self.alone.copy(value if self.spec is _ONE else value[0], address)
            return
        for part, leaf in zip(self.parts(value), self.leaves, strict=True):
            if type(leaf) is Leaf:
                leaf.copy(part, address)

    def frame(self) -> Tensor:
        """A frame to receive into. If the value has only one tensor, the frame becomes that tensor."""
        return torch.empty(self.size // self.dtype.itemsize, dtype=self.dtype)

    def unpack(self, frame: Tensor) -> Any:
        """The value, with its tensors in the frame's memory."""
        alone = self.alone
        if alone is not None:
            tensor = alone.finish(frame.as_strided_(alone.shape, alone.stride))
            return tensor if self.spec is _ONE else [tensor]
        return self.join([leaf.view(frame) if type(leaf) is Leaf else leaf for leaf in self.leaves])

    def parts(self, value: Any) -> Sequence[Any]:
        """The value's tensors and plain values."""
        return _flatten(value)[0]

    def list_plain(self, value: Any) -> list[Any]:
        """The value's plain values."""
        return [part for part, leaf in zip(self.parts(value), self.leaves, strict=True) if type(leaf) not in (Leaf, Repeated)]

    def join(self, parts: list[Any]) -> Any:
        """Undo `parts`."""
        if any(type(part) is Repeated for part in parts):
            parts = [parts[part.place] if type(part) is Repeated else part for part in parts]
        if self.spec is _ONE:
            return parts[0]
        return parts if self.spec is _LIST else pytree.tree_unflatten(parts, self.spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the tree as a tree of numbers."""
        tree = self.spec if self.spec in (_ONE, _LIST) else pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        return _rebuild_form, (tree, self.leaves, self.size)

    def __str__(self) -> str:
        def describe_leaf(leaf: Any) -> str:
            if type(leaf) is Repeated:
                return f"the {leaf.place + 1}. again"
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if type(leaf) is Leaf else repr(leaf)

        return ", ".join(map(describe_leaf, self.leaves)) or "nothing"


def _rebuild_form(tree: Any, leaves: tuple[Any, ...], size: int) -> Form:
    known = next((name for name in (_ONE, _LIST) if type(tree) is str and tree == name), None)
    spec: Any = pytree.tree_structure(tree) if known is None else known
    if known is None and spec.num_leaves != len(leaves):
        unknown = next((leaf for leaf in pytree.tree_leaves(tree) if type(leaf) is not int), tree)
        raise ScheduleError(f"a class of a message is not known to pytree on this rank: {explain_registration(type(unknown))}")
    return Form(spec, leaves, size)


def pack_new(value: Any) -> tuple[Form, Tensor]:
    """Pack a value behind its form, for the receiver to learn."""
    form = Form.of(value)
    pickled = load_pickler().dumps(form)
    at = _align(len(pickled))
    frame = allocate_bytes(at + form.size)
    ctypes.c_int64.from_address(frame.data_ptr()).value = len(pickled)
    ctypes.memmove(frame.data_ptr() + 8, pickled, len(pickled))
    form.pack(value, frame.data_ptr() + at)
    return form, frame


def unpack_new(frame: Tensor) -> tuple[Form, Any]:
    """Undo `pack_new`."""
    length = ctypes.c_int64.from_address(frame.data_ptr()).value
    form: Form = pickle.loads(ctypes.string_at(frame.data_ptr() + 8, length))
    body = form.frame()
    ctypes.memmove(body.data_ptr(), frame.data_ptr() + _align(length), form.size)
    return form, form.unpack(body)


def _align(length: int) -> int:
    return -(-(8 + length) // _ALIGN) * _ALIGN


def _compute_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _find_first_places(parts: Sequence[Any]) -> list[int]:
    """Per part, the first place that holds the same tensor."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(part), place) if isinstance(part, Tensor) else place for place, part in enumerate(parts)]


def _fits_part(part: Any, leaf: Any, plain: bool) -> bool:
    if isinstance(part, Tensor):
        return type(leaf) is Repeated or (type(leaf) is Leaf and leaf.fits(part))
    if not plain:
        return type(leaf) not in (Leaf, Repeated) and (part is None) == (leaf is None)
    return type(part) is type(leaf) and type(part) in IMMUTABLE_TYPES and repr(part) == repr(leaf)
