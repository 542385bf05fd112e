"""Tensors that a layer keeps of earlier slices of a sequence, and the gradients that later slices send back to it.

The graph of each slice's forward ends at the tensors of earlier slices. A backward of a later slice adds to their sum of gradients; the
backward of the slice that computed them takes its part of the sum, once. Forwards of a microbatch's slices ascend on a stage and backwards
descend, so every sum is complete when it is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.planner.profile.slices import SUM_BYTES
from penstock.runtime.device.streams import record_use

_CHECKPOINT = "torch.utils.checkpoint needs use_reentrant=False here, or give the pipeline recompute=True instead"


def prefix_of(owner: Hashable) -> Prefix:
    """Return what `owner` has kept of earlier slices of the microbatch whose forward is running; it is empty without slices.

    The owner is mostly the layer itself: `prefix_of(self)`. A layer that keeps several things uses one owner for each, such as
    `prefix_of((self, "memory"))`.
    """
    return Prefix(owner)


def current_slice() -> Slice | None:
    """Return the slice whose forward is running or recomputed on this thread; None without slices."""
    return _here.find_slice()


class Prefix:
    """The tensors that one layer has kept of the slices before the current one.

    Outside a sliced step it is empty: `extend` returns its arguments, `state` is None, and `advance` returns 0. So the same layer runs on
    whole sequences.
    """

    __slots__ = ("_owner",)

    def __init__(self, owner: Hashable) -> None:
        self._owner = owner

    def extend(self, *tensors: Tensor, dim: int = -2) -> Any:
        """Keep tensors of this slice, and return them with those of earlier slices in front, joined along the sequence dimension.

        Called once per forward. Returns a tensor if given one, else a tuple. Do not change the results in place.
        """
        part = _here.slice
        if part is None:
            return tensors[0] if len(tensors) == 1 else tensors
        joined = part.memory.get_kept(self._owner).extend(part, self._owner, tensors, dim)
        return joined[0] if len(joined) == 1 else joined

    @property
    def state(self) -> tuple[Tensor, ...] | None:
        """The tensors that the slice before has given to `keep`; None in the first slice."""
        return self._read_state()

    def _read_state(self) -> tuple[Tensor, ...] | None:
        part = _here.slice
        return None if part is None else part.memory.states(self._owner).read(part)

    def keep(self, *tensors: Tensor) -> None:
        """Hand tensors to the next slice, which reads them as `state`: the state of a recurrent layer, for example."""
        part = _here.slice
        if part is not None:
            part.memory.states(self._owner).write(part, self._owner, tensors)

    def advance(self, tokens: int) -> int:
        """Count the tokens of this slice, and return how many there were in earlier slices: the position of the first one."""
        part = _here.slice
        return 0 if part is None else part.memory.count(part, self._owner, tokens)


@cache
def keep_uncompiled() -> None:
    """Let `torch.compile` break its graphs at the methods of a prefix, which change memory that it does not know of, and run them as is.

    Called when a pipeline has compiled stages and slices, because torch's compiler takes seconds to import.
    """
    for owner, names in ((Prefix, ("extend", "_read_state", "keep", "advance")), (_Here, ("find_slice",))):
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]


@dataclass
class Slice:
    """One slice of one microbatch on one stage, while its forward runs or is run again."""

    number: int
    count: int
    memory: StageMemory
    share: float = 1.0
    """How much of the microbatch's side losses counts in this slice: what `add_loss` is given here is multiplied by it."""
    again: bool = False
    """Whether the forward is run again, to recompute what its backward needs."""
    roots: list[Tensor] = field(default_factory=list)
    """Empty tensors whose backward takes the gradients that later slices have summed."""
    used: set[Hashable] = field(default_factory=set)
    """The owners that have kept something in this forward."""

    @property
    def last(self) -> bool:
        return self.number == self.count - 1

    def note(self, owner: Hashable, kind: str) -> None:
        """Note that an owner keeps something in this forward; refuse a second time, which could not be told from the first."""
        if (owner, kind) in self.used and not self.again:
            raise ScheduleError(
                f"{_describe(owner)} calls {kind} of its prefix twice in one forward: use one owner for each, as in "
                f'prefix_of((self, "first"))'
            )
        self.used.add((owner, kind))


class _Here(threading.local):
    slice: Slice | None = None

    def find_slice(self) -> Slice | None:
        return self.slice


_here = _Here()


class _ExtendPrefix(torch.autograd.Function):
    """Joins a slice's tensors with the prefix; in the backward, adds to the prefix's sums and takes the slice's own part of them.

    The last output is empty and marks the node: a backward that starts from it takes the sums even if nothing else reaches the node.
    """

    @staticmethod
    def forward(ctx: Any, kept: KeptTensors, number: int, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.number = kept, number
        ctx.set_materialize_grads(False)
        return (*kept.views(number), tensors[0].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own = [ctx.kept.take_gradient(ctx.number, place, grad) for place, grad in enumerate(grads[:-1])]
        return (None, None, None, *own)


class GrowingTensor:
    """A tensor that grows along one dimension, of which views of any earlier length can be had and stay valid.

    That dimension is the outermost one in memory, so that earlier rows stay where they are when the storage is resized; all views share the
    storage, and find its contents in their new place.
    """

    def __init__(self, like: Tensor, dim: int) -> None:
        self._empty, self._dim, self._length = like.new_empty(0), dim, 0
        self._row = (*like.shape[:dim], *like.shape[dim + 1 :])
        *inner, self._size = accumulate(reversed(self._row), mul, initial=1)
        self._strides = inner[::-1]

    @property
    def dtype(self) -> torch.dtype:
        return self._empty.dtype

    @property
    def address(self) -> int:
        """Where its memory is now."""
        return self._empty.untyped_storage().data_ptr()

    def write(self, start: int, tensor: Tensor) -> None:
        """Copy a tensor to the rows from `start` on, with more memory if that is needed."""
        stop = start + tensor.shape[self._dim]
        if stop > self._length:
            record_use(self._empty)  # the old memory may belong to another stream
            self._empty.untyped_storage().resize_(stop * self._size * self._empty.element_size())
            self._length = stop
        self.view(start, stop).copy_(tensor)

    def view(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop`, with a version counter of its own: later slices write behind them."""
        dim, row, inner = self._dim, self._row, self._strides
        shape, strides = (*row[:dim], stop - start, *row[dim:]), (*inner[:dim], self._size, *inner[dim:])
        empty = torch.empty(0, dtype=self._empty.dtype, device=self._empty.device)
        return empty.set_(self._empty.untyped_storage(), start * self._size, shape, strides)


class KeptTensors:
    """The tensors that one layer keeps of a microbatch's slices, one after the other in memory that grows with each slice."""

    def __init__(self) -> None:
        self.buffers: list[GrowingTensor] = []
        self.dim = 0
        self.ends: list[int] = []
        """Where each slice that has run ends."""
        self.sums: list[dict[int, Tensor]] = []
        """The gradients of earlier slices that later slices have summed, by slice, for each of the tensors."""
        self.trains = False

    def extend(self, part: Slice, owner: Hashable, tensors: Sequence[Tensor], dim: int) -> tuple[Tensor, ...]:
        part.note(owner, "extend")
        self._check(part, owner, tensors, dim)
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if part.again:
            if needs_grad and not self.trains:
                raise ScheduleError(f"{_describe(owner)} has kept tensors without gradients, and computes them again with: {_CHECKPOINT}")
        else:
            self._store(part, tensors, dim)
            self.trains = self.trains or needs_grad
        anchor = torch.empty(0, requires_grad=True) if self.trains and torch.is_grad_enabled() else None
        *joined, root = _ExtendPrefix.apply(self, part.number, anchor, *tensors)  # type: ignore[no-untyped-call]
        if root.requires_grad and not part.again:
            part.roots.append(root)
        return tuple(joined)

    def _check(self, part: Slice, owner: Hashable, tensors: Sequence[Tensor], dim: int) -> None:
        if not tensors or any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
            kinds = ", ".join(type(tensor).__name__ for tensor in tensors) or "nothing"
            raise ScheduleError(f"{_describe(owner)} extends its prefix by {kinds}: give plain tensors, the local ones of DTensors")
        if len({tensor.shape[dim] for tensor in tensors}) > 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise ScheduleError(f"{_describe(owner)} extends its prefix by tensors of {shapes}: they differ along dimension {dim}")
        if len(self.ends) < part.number:
            raise ScheduleError(
                f"{_describe(owner)} extends its prefix in slice {part.number}, but has not in slice {len(self.ends)}: a layer must extend "
                "it in every slice"
            )

    def _store(self, part: Slice, tensors: Sequence[Tensor], dim: int) -> None:
        """Copy the tensors behind those of earlier slices. A slice that runs a second time replaces what it had stored."""
        del self.ends[part.number :]
        start, length = self.ends[-1] if self.ends else 0, tensors[0].shape[dim]
        if not self.ends:
            self.dim, self.sums = dim % tensors[0].dim(), [{} for _ in tensors]
            self.buffers = [GrowingTensor(tensor.detach(), self.dim) for tensor in tensors]
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            part.memory.addresses.pop(buffer.address, None)
            buffer.write(start, tensor.detach())
            part.memory.addresses[buffer.address] = None
        self.ends.append(start + length)

    def views(self, number: int) -> list[Tensor]:
        """Return the tensors of all slices up to this one."""
        return [buffer.view(0, self.ends[number]) for buffer in self.buffers]

    def _find_range(self, number: int) -> tuple[int, int]:
        """Where a slice starts, and its length."""
        start = self.ends[number - 1] if number else 0
        return start, self.ends[number] - start

    def take_gradient(self, number: int, place: int, grad: Tensor | None) -> Tensor | None:
        """Add a slice's gradient to the sums of earlier slices; return the slice's own part with what later slices have added to it."""
        sums = self.sums[place]
        added = sums.pop(number, None)
        if grad is None:
            return None if added is None else added.to(self.buffers[place].dtype)
        for earlier in range(number):
            part = grad.narrow(self.dim, *self._find_range(earlier))
            if earlier in sums:
                sums[earlier].add_(part)
            else:
                sums[earlier] = part.to(_sum_dtype(grad.dtype), copy=True)
        own = grad.narrow(self.dim, *self._find_range(number))
        if added is not None:
            return (own.to(added.dtype) + added).to(own.dtype)
        return own.clone() if number else own  # a view would hold the gradient of the whole prefix until W


class _TakeState(torch.autograd.Function):
    """Marks the state that a slice keeps by an empty tensor, whose backward takes the gradient that the next slice has left."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (None, *(leaf.grad for leaf in ctx.leaves))


class KeptStates:
    """The state that each slice of a microbatch leaves to the next one, as leaves that collect its gradient."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Tensor, ...]] = []

    def read(self, part: Slice) -> tuple[Tensor, ...] | None:
        if not part.number:
            return None
        return self.leaves[part.number - 1] if part.number <= len(self.leaves) else None

    def write(self, part: Slice, owner: Hashable, tensors: Sequence[Tensor]) -> None:
        part.note(owner, "keep")
        if part.again:
            return
        if len(self.leaves) < part.number or not tensors:
            missing = f"has not in slice {len(self.leaves)}" if tensors else "keeps nothing"
            raise ScheduleError(f"{_describe(owner)} keeps state in slice {part.number}, but {missing}: keep some in every slice")
        del self.leaves[part.number :]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        leaves = tuple(tensor.detach().requires_grad_(trains and tensor.is_floating_point()) for tensor in tensors)
        self.leaves.append(leaves)
        if trains and not part.last:
            part.roots.append(_TakeState.apply(leaves, *tensors))  # type: ignore[no-untyped-call]


class StageMemory:
    """Everything that the layers of one stage keep of one microbatch, by owner."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, KeptTensors] = {}
        self._states: dict[Hashable, KeptStates] = {}
        self._counts: dict[Hashable, list[int]] = {}
        self.addresses: dict[int, None] = {}
        """The addresses of the memory that is kept."""

    def get_kept(self, owner: Hashable) -> KeptTensors:
        return self._kept.setdefault(owner, KeptTensors())

    def list_kept(self) -> list[KeptTensors]:
        return list(self._kept.values())

    def states(self, owner: Hashable) -> KeptStates:
        return self._states.setdefault(owner, KeptStates())

    def count(self, part: Slice, owner: Hashable, tokens: int) -> int:
        """Note how many tokens the slice has, and return how many there were before it."""
        part.note(owner, "advance")
        ends = self._counts.setdefault(owner, [])
        if len(ends) < part.number:
            raise ScheduleError(
                f"{_describe(owner)} counts tokens in slice {part.number}, but has not in slice {len(ends)}: count them in all"
            )
        start = ends[part.number - 1] if part.number else 0
        if not part.again:
            ends[part.number :] = [start + tokens]
        return start

    def check_complete(self, part: Slice) -> None:
        """Refuse a forward that leaves out what an owner has kept in earlier slices."""
        for kind, owners in (("extend", self._kept), ("keep", self._states)):
            missing = next((owner for owner in owners if (owner, kind) not in part.used), None)
            if missing is not None:
                raise ScheduleError(
                    f"{_describe(missing)} has called {kind} of its prefix in earlier slices, but not in slice {part.number}: a layer must "
                    "do so in every slice"
                )


class Prefixes:
    """The tensors that stages of one rank keep of the slices of each microbatch, during one step."""

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self._memory: dict[tuple[int, int], StageMemory] = {}
        self._roots: list[Tensor] = []

    @contextmanager
    def forward(self, stage: int, unit: int, *, share: float, training: bool) -> Iterator[None]:
        """A context for the forward of a slice. `unit` numbers the slices of all microbatches."""
        microbatch, number = divmod(unit, self.slices)
        memory = self._memory.setdefault((stage, microbatch), StageMemory())
        part = Slice(number, self.slices, memory, share)
        with _enter_part(part):
            yield
        memory.check_complete(part)
        self._roots = part.roots if training and not part.last else []
        if part.last and not training:
            del self._memory[stage, microbatch]

    def addresses(self, stage: int, unit: int) -> dict[int, None]:
        """The addresses of the memory that later slices of a microbatch read; it grows while these run."""
        return self._memory.setdefault((stage, unit // self.slices), StageMemory()).addresses

    def list_kept(self) -> list[Tensor]:
        """Return the tensors that are kept of the slices which have run so far."""
        return [tensor for memory in self._memory.values() for kept in memory.list_kept() for tensor in kept.views(len(kept.ends) - 1)]

    def take_roots(self) -> list[Tensor]:
        """Take the tensors that the backward of the slice which has just run starts from, besides its output."""
        roots, self._roots = self._roots, []
        return roots

    def wrap_backward(self, stage: int, unit: int, operation: Callable[..., None]) -> Callable[..., None]:
        """Wrap the backward of a slice, in which its forward may be run again. Nothing is kept after that of the first slice."""
        microbatch, number = divmod(unit, self.slices)

        def backward(*args: Any) -> None:
            with _enter_part(Slice(number, self.slices, self._memory[stage, microbatch], again=True)):
                operation(*args)
            if not number:
                del self._memory[stage, microbatch]

        return backward

    def reset(self) -> None:
        """Let go of everything, at the end of a step or after a failure."""
        self._memory.clear()
        self._roots = []


@contextmanager
def _enter_part(part: Slice) -> Iterator[None]:
    before, _here.slice = _here.slice, part
    try:
        yield
    finally:
        _here.slice = before


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of several slices are summed: 32 bits for shorter ones, as one attention kernel sums them."""
    return torch.float32 if dtype.itemsize < SUM_BYTES else dtype


def _describe(owner: Any) -> str:
    return f"a {type(owner).__name__}" if isinstance(owner, torch.nn.Module) else f"the owner {owner!r}"
