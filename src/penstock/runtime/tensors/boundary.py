"""What may cross the edge between two stages, and the gradients that come back.

A stage hands on a pytree: tensors and plain values, in tuples, lists, dicts and classes that are registered as pytree nodes.
The rule is the same for every transport, and so is what the reader gets: a copy, which it may change in place without the sender
noticing. Whatever a copy would make wrong without a word is refused: an object that hides a tensor, a tensor that carries more than
its numbers, and an in-place change of a tensor whose memory something else in the model reads too.
"""

from __future__ import annotations

import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import is_async_collective, is_dtensor, wait_for_collective
from penstock.runtime.tensors.layout import is_dense
from penstock.runtime.transport.failures import serializer

if TYPE_CHECKING:
    from penstock.runtime.model.stage import Stage

_unsafe_view = torch.ops.aten._unsafe_view.default
_strided = torch.strided

IMMUTABLE_TYPES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
"""Plain values that nothing can change, and that are the same if they are written the same."""

_LINE = 64
"""Bytes that memory of its own begins at a multiple of."""

# What may be handed on ------------------------------------------------------------------------------------------------


def hides_tensor(value: Any, seen: set[int] | None = None) -> bool:
    """Whether an object that is a leaf to pytree has a tensor somewhere inside, which nothing would cut or follow."""
    if isinstance(value, Tensor):
        return True
    if type(value) in IMMUTABLE_TYPES or isinstance(value, (type, types.ModuleType, enum.Enum)):
        return False
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(hides_tensor(part, seen) for part in _contents(value))


def _contents(value: Any) -> Iterator[Any]:
    """What an object holds: items, attributes, and what a function has bound."""
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
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
    elif isinstance(value, types.MethodType):
        yield value.__self__


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asked for its error
    except ValueError:
        return False
    return True


def is_array(value: Any) -> bool:
    """Whether this is NumPy's, which holds numbers but is cut and followed by nothing here."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap", "matrix", "recarray")


def explain_registration(kind: type) -> str:
    """The end of a message about a class that pytree does not know."""
    return (
        f"register the class on every rank, with torch.utils._pytree.register_pytree_node({kind.__name__}, flatten, unflatten) or "
        "torch.export.register_dataclass, or put its tensors into a tuple, list or dict"
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one stretch of numbers and nothing more."""
    return (
        ((type(tensor) is Tensor and not tensor.__dict__) or type(tensor) is nn.Parameter)
        and tensor.layout is _strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def check_tensor(tensor: Tensor, mesh: bool = False) -> None:
    """Refuse a tensor that would arrive as less than it is. With a mesh, tensors in parts may pass."""
    if _is_plain(tensor) or (mesh and is_dtensor(tensor)):
        return
    attributes = [name for name in tensor.__dict__ if not name.startswith("_dynamo")]
    if is_dtensor(tensor):
        sort, way_out = "a DTensor", "give the pipeline mesh=, which it lies over"
    elif tensor.is_nested:
        sort, way_out = "a nested tensor", "pass on its values and offsets as tensors of their own"
    elif tensor.layout is not _strided or tensor.is_quantized:
        sort = "a quantized tensor" if tensor.is_quantized else f"a tensor of the layout {tensor.layout}"
        way_out = "pass on a dense tensor, or its parts"
    elif type(tensor) not in (Tensor, nn.Parameter):
        sort, way_out = f"a tensor of the class {type(tensor).__name__}", "pass on a plain tensor, or its parts"
    elif attributes:
        sort, way_out = f"a tensor with the attribute {attributes[0]!r}", "pass on the attribute beside the tensor, in a tuple or dict"
    else:
        return
    raise ScheduleError(f"a stage passes on {sort}, which cannot be sent as it is: {way_out}")


def check_output(value: Any) -> None:
    """Refuse an output of the whole model that could not be sent to the other ranks."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor):
            _check_leaf(leaf, "the last stage")


def _check_leaf(leaf: Any, who: str) -> None:
    if type(leaf) not in IMMUTABLE_TYPES and hides_tensor(leaf):
        kind = type(leaf)
        raise ScheduleError(
            f"{who} returns an object of the class {kind.__name__} that holds a tensor, but is no pytree, so no gradient would find its "
            f"way through it: {explain_registration(kind)}"
        )


def _copied(values: list[Any], stage: int) -> list[Any]:
    """Plain values as another process would get them."""
    for value in values:
        _check_leaf(value, f"stage {stage}")
    pickler = serializer()
    try:
        return list(pickler.loads(pickler.dumps(values)))
    except Exception as error:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ScheduleError(
            f"stage {stage} passes on objects that cannot be sent to another process ({kinds}: {error}): pass on tensors and plain values"
        ) from error


# Handing on -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuardedMessage:
    """A message some of whose tensors its reader must not change in place: their places among the leaves, and why."""

    value: Any
    reasons: tuple[tuple[int, str], ...]


pytree.register_pytree_node(
    GuardedMessage,
    lambda guarded: ([guarded.value], guarded.reasons),
    lambda children, reasons: GuardedMessage(next(iter(children)), reasons),
    serialized_type_name="penstock.runtime.tensors.boundary.Guarded",
)


def detach_as_leaves(value: Any) -> Any:
    """The value as a new beginning for autograd: tensors that want a gradient become leaves that do.

    A tensor that stands in several places of a tree stays one tensor.
    """
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return _map_once(value, lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad))


def _map_once(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with each tensor changed, once for all the places that it stands in."""
    changed: dict[int, Tensor] = {}

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return pytree.tree_map(once, value)


def make_message(value: Any, stage: Stage, mesh: bool = False) -> Any:
    """A stage's output as the next one may have it, cut off from this one's graph; refused if it cannot be had right."""
    if type(value) is Tensor and value.requires_grad and not stage.passing and _is_plain(value):
        return value.detach().requires_grad_()
    leaves, spec = pytree.tree_flatten(value)
    others = []
    for place, leaf in enumerate(leaves):
        if is_async_collective(leaf):
            leaves[place] = wait_for_collective(leaf.detach()).requires_grad_(leaf.requires_grad)
        elif isinstance(leaf, Tensor):
            check_tensor(leaf, mesh)
        elif type(leaf) not in IMMUTABLE_TYPES:
            others.append(place)
    if others:
        for place, copy in zip(others, _copied([leaves[place] for place in others], stage.index), strict=True):
            leaves[place] = copy
    message = detach_as_leaves(pytree.tree_unflatten(leaves, spec))
    reasons = (*_shared_memory(leaves), *_own_memory(leaves, stage), *_passed_on(leaves, stage.passing))
    return GuardedMessage(message, reasons) if reasons else message


def _own_memory(leaves: Sequence[Any], stage: Stage) -> Iterator[tuple[int, str]]:
    """Leaves that lie in a parameter's or buffer's memory. One with a gradient torch itself lets nobody change."""
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not leaf.requires_grad and type(leaf) is Tensor:
            name = stage.memory().get(leaf.untyped_storage().data_ptr())
            if name is not None:
                yield place, f"{name} of stage {stage.index}"


def _passed_on(leaves: Sequence[Any], passing: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Leaves that lie in the memory of an input which nobody may change."""
    for place, leaf in enumerate(leaves) if passing else ():
        if type(leaf) is Tensor and leaf.untyped_storage().data_ptr() in passing:
            yield place, passing[leaf.untyped_storage().data_ptr()]


def _shared_memory(leaves: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """Leaves whose numbers are also those of another leaf, as a tensor's and its view's are."""
    by_storage: dict[int, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.numel():
            by_storage.setdefault(leaf.untyped_storage().data_ptr(), []).append(place)
    for places in by_storage.values():
        for place in places if len(places) > 1 else ():
            mine = leaves[place]
            if any(leaves[other] is not mine and storage_overlaps(mine, leaves[other]) for other in places):
                yield place, "a tensor that shares memory with another tensor of the same message"


def memory_overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have a number in common."""
    if not (type(one) is type(other) is Tensor and one.layout is other.layout is _strided and one.numel() and other.numel()):
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and storage_overlaps(one, other)


def storage_overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have a number in common; also yes if that is not easily told."""
    start, end = int(one.storage_offset()), int(other.storage_offset())
    if start + _extent(one) <= end or end + _extent(other) <= start:
        return False
    # Pieces of one tensor, as chunk and split give them, are boxes on one grid.
    if one.stride() != other.stride():
        return True
    axes = sorted(zip(one.stride(), one.shape, other.shape, strict=True), reverse=True)
    strides = [stride for stride, _, _ in axes]
    if 0 in strides or any(big % small for big, small in itertools.pairwise(strides)):
        return True
    room = [sys.maxsize, *(big // small for big, small in itertools.pairwise(strides))]
    apart = False
    for (stride, mine, theirs), most in zip(axes, room, strict=True):
        (a, start), (b, end) = divmod(start, stride), divmod(end, stride)
        if max(a + mine, b + theirs) > most:
            return True
        apart = apart or a + mine <= b or b + theirs <= a
    return not apart


def _extent(tensor: Tensor) -> int:
    """How far a tensor reaches in its memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_tensor(tensor: Tensor) -> Tensor:
    """A copy that autograd follows. Its memory begins at the same place of a cache line, on which the rounding of a product may depend."""
    offset = 0 if not tensor.is_cpu or type(tensor) is not Tensor else tensor.data_ptr() % _LINE
    if not offset or offset % tensor.element_size() or not is_dense(tensor):
        return tensor.clone()
    memory = torch.empty(offset // tensor.element_size() + tensor.numel(), dtype=tensor.dtype)
    copy = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), offset // tensor.element_size(), tensor.shape, tensor.stride())
    return copy.copy_(tensor)


# Changes in place -----------------------------------------------------------------------------------------------------


class WatchedInputs:
    """What a stage is given, and whether it has changed any of it in place.

    A borrowed input lies in memory of its sender. If the stage is `free` to change its inputs it gets stand-ins: copies of what is
    borrowed, and of other leaves that want a gradient, which torch lets nobody change, a view that autograd takes for a new tensor.
    Otherwise it gets the leaves themselves, except for those that are guarded, which a change must not reach.
    """

    __slots__ = ("given", "inputs", "reasons")

    def __init__(self, inputs: Sequence[Any], borrowed: Sequence[bool], *, free: bool) -> None:
        self.reasons: dict[int, str] = {}
        """Why a stand-in must not be changed, by its id."""
        self.given: list[tuple[Tensor, int]] = []
        """What torch would not tell of by itself if it were changed, with its version now."""
        self.inputs = [self._open(value, copies, free) for value, copies in zip(inputs, borrowed, strict=True)]

    def _open(self, value: Any, copies: bool, free: bool) -> Any:
        reasons: dict[int, str] = {}
        if type(value) is GuardedMessage:
            leaves = pytree.tree_leaves(value.value)
            reasons = {id(leaves[place]): reason for place, reason in value.reasons}
            value = value.value

        def stand_in(leaf: Tensor) -> Tensor:
            wants = leaf.requires_grad
            if copies and (free or (id(leaf) in reasons and not wants)):
                given = copy_tensor(leaf)
            else:
                given = _unsafe_view(leaf, leaf.shape) if free and wants else leaf
            if free or not wants:
                self.given.append((given, given._version))
            if id(leaf) in reasons:
                self.reasons[id(given)] = reasons[id(leaf)]
            return given

        return _map_once(value, stand_in)

    def guarded(self, others: Sequence[int]) -> dict[int, str]:
        """Why inputs must not be changed by the stages after this one either, by the address of their memory.

        `others` are stages that read the same inputs.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(self.inputs) if type(leaf) is Tensor]
        shared = f"a tensor that stage {others[0]} reads too" if others else None
        reasons = ((leaf, shared or self.reasons.get(id(leaf))) for leaf in tensors)
        return {leaf.untyped_storage().data_ptr(): reason for leaf, reason in reasons if reason is not None}

    def changed(self, copies: Collection[int] = ()) -> tuple[bool, str | None]:
        """Whether anything was changed, and the reason why that must not be, if there is one.

        `copies` are inputs by id that the stage has copied by itself, and whose copies it has changed.
        """
        changed = {id(given) for given, version in self.given if given._version != version}.union(copies)
        return bool(changed), next((self.reasons[each] for each in changed if each in self.reasons), None)


# Gradients ------------------------------------------------------------------------------------------------------------


def detach_tree(value: Any) -> Any:
    """The value without its history."""
    if type(value) is Tensor:
        return value.detach()
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def find_differentiable(value: Any) -> list[Tensor]:
    """The tensors of a value that gradients can flow into, in the order of the tree, each once."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    return list(_distinct(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad))


def _distinct(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(tensor): tensor for tensor in tensors}.values()


def add_grads(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """The sum of what two readers of one output sent back."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]
