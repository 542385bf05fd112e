"""Messages between stages, and the gradients that come back.

A stage's output is a pytree: tensors and plain values, in tuples, lists, dicts and classes that are registered as pytree nodes.
The rules are the same for every transport, and so is what the receiver gets: a copy, which it may change in place without the sender
noticing. What a copy would silently get wrong is refused: an object that hides a tensor, a tensor that carries more than its values,
and an in-place change of a tensor whose memory another part of the model reads too.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import is_async_collective, is_dtensor, wait_for_collective
from penstock.runtime.tensors.layout import is_dense
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import read_version, unsafe_view

_unsafe_view = unsafe_view.default
_strided = torch.strided

IMMUTABLE_TYPES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
"""Types of plain values that cannot be changed and that compare by value."""

_CACHE_LINE = 64
"""The alignment in bytes of memory that torch allocates."""

# Checks ---------------------------------------------------------------------------------------------------------------


def hides_tensor(value: Any, seen: set[int] | None = None) -> bool:
    """Whether an object that is a pytree leaf holds a tensor, which would be neither split nor given a gradient."""
    if isinstance(value, Tensor):
        return True
    if type(value) in IMMUTABLE_TYPES or isinstance(value, (type, types.ModuleType, enum.Enum)):
        return False
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(hides_tensor(part, seen) for part in _list_contents(value))


def _list_contents(value: Any) -> Iterator[Any]:
    """Yield what an object refers to: items, attributes, and the variables that a function has bound."""
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes, bytearray, range)):
        yield from value
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots) if name != "__dict__")
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield value.__self__


def is_array(value: Any) -> bool:
    """Whether this is a NumPy array: it holds numbers, but is neither split nor differentiated."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap", "matrix", "recarray")


def explain_registration(kind: type) -> str:
    """Return the end of an error message about a class that is not registered with pytree."""
    return (
        f"register the class on every rank, with torch.utils._pytree.register_pytree_node({kind.__name__}, flatten, unflatten) or "
        "torch.export.register_dataclass, or put its tensors into a tuple, list or dict"
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory and nothing more."""
    return (
        ((type(tensor) is Tensor and not tensor.__dict__) or type(tensor) is nn.Parameter)
        and tensor.layout is _strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def check_tensor(tensor: Tensor, mesh: bool = False) -> None:
    """Refuse a tensor that would lose something on the way. With a mesh, a `DTensor` may pass."""
    if _is_plain(tensor) or (mesh and is_dtensor(tensor)):
        return
    attributes = [name for name in tensor.__dict__ if not name.startswith("_dynamo")]
    if is_dtensor(tensor):
        kind, advice = "a DTensor", "give the pipeline the mesh= that it is distributed over"
    elif tensor.is_nested:
        kind, advice = "a nested tensor", "return its values and offsets as separate tensors"
    elif tensor.layout is not _strided or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else f"a tensor of the layout {tensor.layout}"
        advice = "return a dense tensor, or its parts"
    elif type(tensor) not in (Tensor, nn.Parameter):
        kind, advice = f"a tensor of the class {type(tensor).__name__}", "return a plain tensor, or its parts"
    elif attributes:
        kind, advice = f"a tensor with the attribute {attributes[0]!r}", "return the attribute beside the tensor, in a tuple or dict"
    else:
        return
    raise ScheduleError(f"a stage returns {kind}, which cannot be sent as it is: {advice}")


def check_output(value: Any) -> None:
    """Refuse an output of the last stage that cannot be sent to the other ranks."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor):
            _check_leaf(leaf, "the last stage")


def _check_leaf(leaf: Any, who: str) -> None:
    if type(leaf) not in IMMUTABLE_TYPES and hides_tensor(leaf):
        kind = type(leaf)
        raise ScheduleError(
            f"{who} returns an object of the class {kind.__name__} that holds a tensor but is not a pytree, so no gradient would flow "
            f"through it: {explain_registration(kind)}"
        )


def load_pickler() -> Any:
    """cloudpickle, which takes along functions and classes of a script or notebook; plain pickle if it is not installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle
    return cloudpickle


def _copy_by_pickle(leaves: list[Any], stage: int) -> None:
    """Replace the plain values that can be changed by what another process would get."""
    places = [place for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor) and type(leaf) not in IMMUTABLE_TYPES]
    if not places:
        return
    values, pickler = [leaves[place] for place in places], load_pickler()
    for value in values:
        _check_leaf(value, f"stage {stage}")
    try:
        copies = pickler.loads(pickler.dumps(values))
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ScheduleError(
            f"stage {stage} returns objects that cannot be sent to another process ({kinds}: {error}): return tensors and plain values"
        ) from error
    for place, copy in zip(places, copies, strict=True):
        leaves[place] = copy


# Messages -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardedMessage:
    """A message with tensors that its receiver must not change in place: their indices among the leaves, and why."""

    value: Any
    reasons: tuple[tuple[int, str], ...]


pytree.register_pytree_node(
    GuardedMessage,
    lambda guarded: ([guarded.value], guarded.reasons),
    lambda children, reasons: GuardedMessage(next(iter(children)), reasons),
    serialized_type_name="penstock.runtime.tensors.boundary.GuardedMessage",
)


def detach_as_leaves(value: Any) -> Any:
    """Detach a value so that autograd starts anew from it: tensors that require a gradient become leaves that do.

    A tensor that occurs several times in the tree stays one tensor.
    """
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return _map_once(value, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad))


def copy_for_reader(value: Any, stage: int) -> Any:
    """A received message as one of several readers may have it: its own beginning for autograd, and its own plain objects."""
    if type(value) is Tensor:
        return detach_as_leaves(value)
    leaves, spec = pytree.tree_flatten(value)
    _copy_by_pickle(leaves, stage)
    return detach_as_leaves(pytree.tree_unflatten(leaves, spec))


def _map_once(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Map the tensors of a tree; one that occurs several times is mapped once."""
    changed: dict[int, Tensor] = {}

    def copy_once(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return pytree.tree_map(copy_once, value)


def make_message(
    value: Any, stage: int, memory: Callable[[], Mapping[int, str]], guarded: Mapping[int, str] | None = None, mesh: bool = False
) -> Any:
    """Turn a stage's output into the next stage's input, cut off from this stage's graph; refuse what cannot be sent.

    `memory` names the stage's parameters and buffers, and `guarded` says why inputs of the stage must not be changed in place, both by
    the address of their memory: an output that lies in it is guarded too. With a `mesh`, outputs may be `DTensor`s.
    """
    if type(value) is Tensor and value.requires_grad and not guarded and _is_plain(value):
        return value.detach().requires_grad_()
    leaves, spec = pytree.tree_flatten(value)
    for place, leaf in enumerate(leaves):
        if is_async_collective(leaf):
            leaves[place] = wait_for_collective(leaf.detach()).requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, Tensor):
            check_tensor(leaf, mesh)
    _copy_by_pickle(leaves, stage)
    message = detach_as_leaves(pytree.tree_unflatten(leaves, spec))
    reasons = (*_find_shared_memory(leaves), *_find_guarded_memory(leaves, stage, memory, guarded or {}))
    return GuardedMessage(message, reasons) if reasons else message


def _find_guarded_memory(
    leaves: Sequence[Any], stage: int, memory: Callable[[], Mapping[int, str]], guarded: Mapping[int, str]
) -> Iterator[tuple[int, str]]:
    """Find leaves in the memory of a parameter or buffer, or of an input that must not be changed."""
    for place, leaf in enumerate(leaves):
        if type(leaf) is not Tensor:
            continue
        address = leaf.untyped_storage().data_ptr()
        if not leaf.requires_grad and address in memory():  # torch itself refuses to change a leaf that requires a gradient
            yield place, f"{memory()[address]} of stage {stage}"
        if address in guarded:
            yield place, guarded[address]


def _find_shared_memory(leaves: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Find leaves that share elements with another leaf, as a tensor and its view do."""
    by_storage: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.numel():
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(place)
    for places in by_storage.values():
        for place in places if len(places) > 1 else ():
            tensor = leaves[place]
            if any(leaves[other] is not tensor and storage_overlaps(tensor, leaves[other]) for other in places):
                yield place, "a tensor that shares memory with another tensor of the same message"


def memory_overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    if not (type(one) is type(other) is Tensor and one.layout is other.layout is _strided and one.numel() and other.numel()):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and storage_overlaps(one, other)


def storage_overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common; also True when that is hard to tell."""
    start, end = int(one.storage_offset()), int(other.storage_offset())
    if start + _find_extent(one) <= end or end + _find_extent(other) <= start:
        return False
    # Pieces of one tensor, as from chunk and split, are boxes with the same strides.
    if one.stride() != other.stride():
        return True
    axes = sorted(zip(one.stride(), one.shape, other.shape, strict=True), reverse=True)
    strides = [stride for stride, _, _ in axes]
    if 0 in strides or any(big % small for big, small in itertools.pairwise(strides)):
        return True
    room = [sys.maxsize, *(big // small for big, small in itertools.pairwise(strides))]
    apart = False
    for (stride, size, other_size), most in zip(axes, room, strict=True):
        (a, start), (b, end) = divmod(start, stride), divmod(end, stride)
        if max(a + size, b + other_size) > most:
            return True
        apart = apart or a + size <= b or b + other_size <= a
    return not apart


def _find_extent(tensor: Tensor) -> int:
    """Return the distance from a tensor's first element to one past its last, in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor, differentiably, to the same offset in a cache line: the rounding of a product may depend on it."""
    offset = 0 if not tensor.is_cpu or type(tensor) is not Tensor else tensor.data_ptr() % _CACHE_LINE
    if not offset or offset % tensor.element_size() or not is_dense(tensor):
        return tensor.clone()
    memory = torch.empty(offset // tensor.element_size() + tensor.numel(), dtype=tensor.dtype)
    copy = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), offset // tensor.element_size(), tensor.shape, tensor.stride())
    return copy.copy_(tensor)


# In-place changes -----------------------------------------------------------------------------------------------------


class WatchedInputs:
    """The inputs of one forward of a stage, watched for in-place changes.

    A `borrowed` input lies in its sender's memory. A stage that is `free` to change its inputs gets stand-ins: copies of borrowed
    tensors, and for other leaves that require a gradient, which torch refuses to change, a view that autograd takes for a new tensor.
    Otherwise the stage gets the tensors themselves, except for copies of guarded ones, which a change must not reach.
    """

    __slots__ = ("inputs", "reasons", "versions")

    def __init__(self, inputs: Sequence[Any], borrowed: Sequence[bool], *, free: bool) -> None:
        self.reasons: dict[int, str] = {}
        """Why an input must not be changed, by its id."""
        self.versions: list[tuple[Tensor, int]] = []
        """The inputs whose change torch would not refuse by itself, with their versions before the forward."""
        self.inputs = [self._open(value, copies, free) for value, copies in zip(inputs, borrowed, strict=True)]

    def _open(self, value: Any, copies: bool, free: bool) -> Any:
        reasons: dict[int, str] = {}
        if type(value) is GuardedMessage:
            leaves = pytree.tree_leaves(value.value)
            reasons = {id(leaves[place]): reason for place, reason in value.reasons}
            value = value.value

        def stand_in(leaf: Tensor) -> Tensor:
            differentiable = leaf.requires_grad
            if copies and (free or (id(leaf) in reasons and not differentiable)):
                tensor = copy_tensor(leaf)
            else:
                tensor = _unsafe_view(leaf, leaf.shape) if free and differentiable else leaf
            if free or not differentiable:
                self.versions.append((tensor, read_version(tensor)))
            if id(leaf) in reasons:
                self.reasons[id(tensor)] = reasons[id(leaf)]
            return tensor

        return _map_once(value, stand_in)

    def list_guarded(self, others: Sequence[int]) -> dict[int, str]:
        """Return why the next stages must not change these inputs either, by the address of their memory.

        `others` are the other stages that read the same inputs.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(self.inputs) if type(leaf) is Tensor]
        shared = f"a tensor that stage {others[0]} reads too" if others else None
        reasons = ((leaf, shared or self.reasons.get(id(leaf))) for leaf in tensors)
        return {leaf.untyped_storage().data_ptr(): reason for leaf, reason in reasons if reason is not None}

    def find_changed(self, copies: Collection[int] = ()) -> tuple[bool, str | None]:
        """Return whether an input was changed, and if that is not allowed, why.

        `copies` are the ids of inputs that the stage has copied itself and whose copies it has changed.
        """
        changed = {id(tensor) for tensor, version in self.versions if read_version(tensor) != version}.union(copies)
        return bool(changed), next((self.reasons[ident] for ident in changed if ident in self.reasons), None)


# Gradients ------------------------------------------------------------------------------------------------------------


def detach_tree(value: Any) -> Any:
    """Detach every tensor of a tree."""
    if type(value) is Tensor:
        return value.detach()
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def find_differentiable(value: Any) -> list[Tensor]:
    """Return the tensors of a tree that require a gradient, in the order of the tree, each once."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad)
    return list({id(leaf): leaf for leaf in leaves}.values())


def add_grads(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """Add the gradients that two readers of one output have sent back."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]
