"""Tensors that autograd saves in one forward, moved to host memory and back as a whole.

A forward whose activation is to be moved runs in `SavedTensors.saving`: autograd then holds a `_Slot` for each tensor that it saves.
`offload` copies the memory behind the slots to buffers of the host, every storage once; `release` lets go of the original; `reload`
copies it back to new memory on the device, with the same views of it. Other holders of the original keep it: nothing is changed in
place.

On a GPU, copies run on two streams of their own, one for each direction, and events order them with the rank's stream; the buffers are
pinned. Without a GPU the same code copies from one buffer to another, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.device.gpu import cuda
from penstock.runtime.torch_internals.tensors import identify_storage, read_version


class _Slot:
    """A tensor as autograd saves it, or a tensor of the runtime whose memory leaves with those: what is left of it while it is away."""

    __slots__ = ("__weakref__", "changed", "dtype", "offset", "shape", "stride", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = read_version(tensor)
        self.changed = False
        self.dtype, self.shape, self.stride, self.offset = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def leave(self) -> None:
        if self.tensor is not None:
            self.changed = read_version(self.tensor) != self.version
        self.tensor = None

    def put_back(self, memory: Tensor) -> None:
        self.tensor = view_memory(memory, self)
        self.version = read_version(self.tensor)

    def unpack(self) -> Tensor:
        """The tensor for the backward."""
        if self.tensor is None:
            raise ScheduleError("a backward needs an activation that is still in host memory: its RELOAD has not run")
        if self.changed or read_version(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.shape)} that the backward needs was changed in place after it was saved: change a copy"
            )
        return self.tensor


class _Swapped(_Slot):
    """A tensor that the runtime itself holds until the backward, an input or output of the stage: its data leaves, the tensor stays."""

    __slots__ = ("owner",)

    def __init__(self, owner: Tensor) -> None:
        super().__init__(owner.detach())
        self.owner = owner

    def leave(self) -> None:
        self.tensor = None
        self.owner.data = self.owner.detach().new_empty(1).expand(self.shape) if self.shape else self.owner.detach().new_empty(())

    def put_back(self, memory: Tensor) -> None:
        self.owner.data = view_memory(memory, self)


def view_memory(memory: Tensor, slot: _Slot) -> Tensor:
    """The tensor of a slot in other memory."""
    view = torch.empty(0, dtype=slot.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), slot.offset, slot.shape, slot.stride)


class _Moved:
    """One storage: the original until it is released, its copy on the host, and the slots that are views of it."""

    __slots__ = ("device", "host", "original", "slots")

    def __init__(self, storage: torch.UntypedStorage, slots: list[_Slot]) -> None:
        self.original: Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.device = storage.device
        self.host: Tensor | None = None
        self.slots = slots


class HostMemory:
    """Buffers in host memory for one rank's activations, and the streams that copy to and from them.

    Buffers are kept when they are given back, because the next step needs the same sizes again; those that a whole step has not used are
    dropped, so that batches of ever new shapes do not fill the host.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Tensor, Any]]] = {}
        """By size: buffers, each with the event after which its last contents are no longer needed. The last one is taken first."""
        self._unused: dict[int, int] = {}
        """By size: how many buffers, the first ones, were free all the time since the last `trim`; all of a size that is not here."""
        self.out, self.back = _CopyStream(), _CopyStream()
        self.held = 0
        """Bytes of buffers in use."""
        self.peak = 0
        """The most bytes that were in use at once."""

    def take(self, size: int, pinned: bool) -> tuple[Tensor, Any]:
        """A buffer of this many bytes, and the event to wait for before writing to it."""
        self.held += size
        self.peak = max(self.peak, self.held)
        free = self._free.get(size)
        if free:
            taken = free.pop()
            self._unused[size] = min(self._unused.get(size, len(free)), len(free))
            return taken
        self._unused[size] = 0
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None

    def give_back(self, buffer: Tensor, after: Any) -> None:
        """Take a buffer back that may be written to once the event has happened."""
        self.held -= buffer.numel()
        self._free.setdefault(buffer.numel(), []).append((buffer, after))

    def trim(self) -> None:
        """Drop the buffers that were not used since the last call."""
        for size, free in list(self._free.items()):
            del free[: self._unused.get(size, len(free))]
            if not free:
                del self._free[size]
        self._unused = {}

    @property
    def kept(self) -> int:
        """Bytes of buffers that wait to be used again."""
        return sum(size * len(free) for size, free in self._free.items())


class _CopyStream:
    """A stream for copies in one direction, created when a GPU first copies."""

    def __init__(self) -> None:
        self._stream: Any = None

    @contextmanager
    def copy_behind(self, device: torch.device, events: Iterable[Any] = ()) -> Iterator[Callable[[], Any]]:
        """Copy behind all work of this thread's stream so far and behind these events; yields what records the end of the copies."""
        if device.type != "cuda":
            yield lambda: None
            return
        if self._stream is None:
            self._stream = cuda.Stream(device)
        self._stream.wait_stream(cuda.current_stream(device))
        for event in events:
            if event is not None:
                self._stream.wait_event(event)
        with cuda.stream(self._stream):
            yield self._stream.record_event


class SavedTensors:
    """The tensors that autograd saves in one forward, and those of the runtime that belong to it.

    A step calls, in this order: `save_tensors` around the forward, `offload`, `release`, `reload`, and `arrive` before the backward.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._slots: list[ref[_Slot]] = []
        self._moved: list[_Moved] = []
        self._kept: Collection[int] = ()
        self._left: Any = None
        self._returned: Any = None

    def save_tensors(self, kept: Collection[int]) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for the forward; `kept` are the addresses of memory that stays where it is: of parameters, buffers and the batch."""
        self._slots, self._moved, self._kept = [], [], kept
        self._left = self._returned = None
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if not _can_move(tensor) or tensor.untyped_storage().data_ptr() in self._kept:
            return tensor
        slot = _Slot(tensor)
        self._slots.append(ref(slot))
        return slot

    def offload(self, held: Iterable[Tensor] = ()) -> None:
        """Start to copy everything that was saved to the host; `held` are tensors of the runtime whose memory leaves with it."""
        slots: list[_Slot] = [slot for slot in (weak() for weak in self._slots) if slot is not None]
        own = [tensor for tensor in held if _can_move(tensor) and tensor.untyped_storage().data_ptr() not in self._kept]
        slots += [_Swapped(tensor) for tensor in own]
        self._slots = []
        by_storage: dict[int, _Moved] = {}
        for slot in slots:
            assert slot.tensor is not None
            storage = slot.tensor.untyped_storage()
            by_storage.setdefault(identify_storage(storage), _Moved(storage, [])).slots.append(slot)
        self._moved = [moved for moved in by_storage.values() if moved.original is not None and moved.original.numel()]
        if not self._moved:
            return
        taken = [self._memory.take(_count_bytes(moved), moved.device.type == "cuda") for moved in self._moved]
        with torch.no_grad(), self._memory.out.copy_behind(self._moved[0].device, [event for _, event in taken]) as record:
            for moved, (buffer, _) in zip(self._moved, taken, strict=True):
                buffer.copy_(moved.original, non_blocking=True)  # type: ignore[arg-type]
                moved.host = buffer
            self._left = record()
        for moved in self._moved:
            for slot in moved.slots:
                slot.leave()

    def release(self) -> None:
        """Let this thread's stream wait for the copies, and let go of the memory that they were made from."""
        if self._left is not None:
            self._left.wait()
            self._left = None
        for moved in self._moved:
            moved.original = None

    def reload(self) -> None:
        """Start to copy everything back to new memory on the device."""
        self.release()
        if not self._moved:
            return
        memory = [torch.empty(_count_bytes(moved), dtype=torch.uint8, device=moved.device) for moved in self._moved]
        with torch.no_grad(), self._memory.back.copy_behind(self._moved[0].device) as record:
            for moved, target in zip(self._moved, memory, strict=True):
                assert moved.host is not None
                target.copy_(moved.host, non_blocking=True)
            self._returned = record()
        for moved, target in zip(self._moved, memory, strict=True):
            for slot in moved.slots:
                slot.put_back(target)
            moved.slots = []

    def arrive(self) -> None:
        """Let this thread's stream wait for the copies back, and give the buffers of the host back."""
        if self._returned is not None:
            self._returned.wait()
        for moved in self._moved:
            if moved.host is not None:
                self._memory.give_back(moved.host, self._returned)
        self._moved, self._returned = [], None

    def drop(self) -> None:
        """Let go of everything, after a step that failed half-way."""
        if self._moved:
            self.release()
            self.arrive()
        self._slots = []


def _unpack(saved: Any) -> Tensor:
    return saved.unpack() if isinstance(saved, _Slot) else saved


def _count_bytes(moved: _Moved) -> int:
    source = moved.original if moved.host is None else moved.host
    assert source is not None
    return source.numel()


def _can_move(tensor: Tensor) -> bool:
    """Whether the tensor is one plain block of memory. Others stay: those of sparse or quantized tensors, and of tensor subclasses."""
    plain = type(tensor) is Tensor or type(tensor) is nn.Buffer
    return (
        plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_inference() and tensor.device.type != "meta"
    )
