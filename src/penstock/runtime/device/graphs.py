"""CUDA graphs: work that is captured once and then replayed by one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from penstock.runtime.device.gpu import cuda, is_initialized


def warm_up(work: Callable[[], None], times: int = 3) -> None:
    """Run work a few times on a stream of its own, as capturing it requires; once without a GPU."""
    if not is_initialized():
        work()
        return
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(times):
            work()
    cuda.current_stream().wait_stream(stream)


class GraphCapture:
    """Captures pieces of work whose memory stays in place.

    The pieces share one memory pool, so they must always be replayed in the order in which they were captured. Without a GPU a
    captured piece is the work itself.
    """

    def __init__(self) -> None:
        self._pool = cuda.graph_pool_handle() if is_initialized() else None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A function that replays the work. Capturing does not run it."""
        if self._pool is None:
            return work
        graph = cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # a stage may have nothing to do in one of its parts
            with cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        replay: Callable[[], None] = graph.replay
        return replay
