"""All that differs between devices."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.transport.activity import clock

cuda: Any = torch.cuda  # much of it has no types
is_running: Callable[[], bool] = cuda.is_initialized
"""Whether a device has been used: nothing is to be waited for on it otherwise."""


def on_host(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor in the host's memory, laid out like this."""
    laid = torch.empty_strided(shape, stride, dtype=tensor.dtype)
    return laid.copy_(tensor.detach())


def placed(tensor: Tensor, device: str) -> Tensor:
    """A tensor that came from another process, on this rank's device of that type."""
    return tensor.to(device)


def local_device() -> str | None:
    """What tells this rank's device from others; None without one."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None


def is_direct(devices: list[Any]) -> bool:
    """Whether tensors go between the ranks' devices by NCCL: each must have one of its own. Through the host otherwise."""
    return None not in devices and len(set(devices)) == len(devices) > 1 and dist.is_nccl_available()


def direct_connection(store: Any, rank: int, ranks: int, deadline: float) -> Any:
    """A connection for tensors as they are: NCCL, whose sends and receives wait on the device; without one gloo, to test with."""
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=deadline))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


def backend() -> str:
    """What torch.distributed is set up with where nobody has."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def direct_tensor() -> Tensor:
    """Something small to send on a new connection."""
    return torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")


def stop(connection: Any) -> None:
    """End what is under way on the devices."""
    if torch.cuda.is_available():
        connection.abort()


# Streams --------------------------------------------------------------------------------------------------------------


class _Here(threading.local):
    """The stream beside its own that this thread runs work on, if any."""

    beside: Any = None


_here = _Here()


def lanes(ranks: int, sms: int | None = None) -> list[Any]:
    """A stream for each virtual rank, on so many multiprocessors of its own with `sms`; None for all without a device."""
    if not cuda.is_available():
        if sms is not None:
            raise ScheduleError(f"sms={sms}: there is no GPU whose multiprocessors could be shared out")
        return [None] * ranks
    if sms is None:
        return [cuda.Stream() for _ in range(ranks)] if ranks > 1 else [cuda.current_stream()]
    from penstock.runtime.device.multiprocessors import partition

    cuda.init()
    return [cuda.ExternalStream(stream) for stream in partition(ranks, sms, cuda.current_device())]


def lane() -> Any:
    """The stream that this thread's work goes to; None without a device."""
    return cuda.current_stream() if is_running() else None


def stand_on(lane: Any) -> None:
    """This thread's work goes to this stream from here on."""
    if lane is not None:
        cuda.set_stream(lane)


def mark() -> Any:
    """A place in this thread's stream that others can wait for; None without a device."""
    if not is_running():
        return None
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def follow(place: Any) -> None:
    """What this thread does from here on comes after the marked place."""
    if place is not None:
        place.wait()


def adopt(value: Any) -> None:
    """Tensors that another stream made are used here: their memory is not to be given away before."""
    if not is_running():
        return
    streams = [cuda.current_stream(), *([] if _here.beside is None else [_here.beside])]
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            for stream in streams:
                leaf.record_stream(stream)


class Lanes:
    """Two streams of one rank: its own, and one beside it. Without a device both are where everything runs."""

    def __init__(self) -> None:
        self.streams: list[Any] = [None, None]
        if cuda.is_available():
            self.streams = [cuda.current_stream(), cuda.Stream()]
            _here.beside = self.streams[1]
            quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if quiet is not None:  # one parameter's gradients are added up from both, which autograd sees to
                quiet(False)

    def on(self, number: int, work: Callable[[], None]) -> None:
        """Run the work on one of the two."""
        stream = self.streams[number]
        if stream is None:
            work()
            return
        with cuda.stream(stream):
            work()

    def join(self) -> None:
        """What follows on either comes after all that is on both."""
        own, beside = self.streams
        if own is not None:
            own.wait_stream(beside)
            beside.wait_stream(own)


# Randomness -----------------------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Start torch's streams from this number, the device's too once it is used."""
    torch.default_generator.manual_seed(number)
    if is_running():
        cuda.manual_seed(number)


def random_state() -> tuple[Tensor, Tensor | None]:
    """The state of torch's streams, of the device's too once it is used."""
    return torch.get_rng_state(), cuda.get_rng_state() if is_running() else None


def set_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    host, on_device = state
    torch.set_rng_state(host)
    if on_device is not None and cuda.is_available():
        cuda.set_rng_state(on_device)


# Time and memory ------------------------------------------------------------------------------------------------------


class Watch:
    """When work begins and ends on the device, told on the host's clock."""

    def __init__(self, count: int) -> None:
        self.begun, self.ended = ([cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
        self.reference = cuda.Event(enable_timing=True)
        self.zero = 0
        self.at = 0
        self.fresh = True
        """Whether the present piece of work has done nothing yet but wait."""

    def start(self) -> None:
        """Learn what the host's clock says at a moment of the device's."""
        self.reference.record()
        self.reference.synchronize()
        self.zero = clock()

    def begin(self, at: int) -> None:
        self.at, self.fresh = at, True
        self.begun[at].record()

    def begin_again(self) -> None:
        """What was before was waiting."""
        if self.fresh:
            self.begun[self.at].record()

    def end(self, at: int) -> None:
        self.ended[at].record()

    def times(self, events: Sequence[Any]) -> list[int]:
        """Nanoseconds of each event, which must have been recorded; waits until it has come. What is a time already stays."""
        return [event if type(event) is int else self._time(event) for event in events]

    def _time(self, event: Any) -> int:
        event.synchronize()
        return int(self.zero + round(self.reference.elapsed_time(event) * 1e6))


def watch(count: int) -> Watch | None:
    """For so many pieces of work; None without a device, whose work ends when the host's does."""
    return Watch(count) if is_running() else None


class Stopwatch:
    """The seconds between marks: of the device's own time where there is one, with the host far enough ahead not to count."""

    AHEAD = 4_000_000
    """Cycles that the device sleeps first, some two milliseconds."""

    def __init__(self, sample: Any) -> None:
        """For work on what the sample is on."""
        self.on_device = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(sample))
        self.marks: list[Any] = []
        if self.on_device:
            cuda.current_stream().synchronize()
            cuda._sleep(self.AHEAD)
        self.mark()

    def mark(self) -> None:
        self.marks.append(mark() if self.on_device else clock())

    def seconds(self) -> list[float]:
        if not self.on_device:
            return [(after - before) / 1e9 for before, after in zip(self.marks, self.marks[1:], strict=False)]
        self.marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(self.marks, self.marks[1:], strict=False)]


class Peak:
    """How much memory the device's allocator has given out at most since this was made, beyond what it had then; 0 without one."""

    def __init__(self) -> None:
        self.before = self.now()
        if is_running():
            cuda.reset_peak_memory_stats()

    @staticmethod
    def now() -> int:
        """What is given out now."""
        return int(cuda.memory_allocated()) if is_running() else 0

    def bytes(self) -> int:
        return int(cuda.max_memory_allocated()) - self.before if is_running() else 0


def best() -> str:
    """The type of device to use where none is named."""
    return "cuda" if cuda.is_available() else "cpu"


def own_device(rank: int) -> torch.device:
    """The GPU of this machine that is a rank's own, which it works on from now on."""
    found = torch.device("cuda", rank % cuda.device_count())
    cuda.set_device(found)
    return found


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    return str(cuda.get_device_name(device)) if device.type == "cuda" else device.type


# Recorded work --------------------------------------------------------------------------------------------------------


def warm(work: Callable[[], None], times: int = 3) -> None:
    """Run work that is to be recorded a few times, apart from everything else, as recording wants it."""
    if not is_running():
        work()
        return
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(times):
            work()
    cuda.current_stream().wait_stream(stream)


class Recorder:
    """Records pieces of work on memory that stays in place, each to be run again by one launch.

    Pieces that one recorder has recorded run in the order of their recording, over and over. Without a device a piece is the
    work itself.
    """

    def __init__(self) -> None:
        self.pool = cuda.graph_pool_handle() if is_running() else None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Recording does not run the work."""
        if self.pool is None:
            return work
        graph = cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a stage may have nothing to do in one of its parts
            with cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        replay: Callable[[], None] = graph.replay
        return replay
