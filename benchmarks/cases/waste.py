"""Cases of time and memory: counted if they can be counted, else processor time of one thread."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from benchmarks.cases.engines import PenstockEngine, held_stages
from benchmarks.cases.gradients import COUNT, WIDTH, build_blocks, draw_batch
from benchmarks.cases.outcome import RIGHT, WASTES, Case, Outcome
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as ps


def judge(good: bool, text: str) -> Outcome:
    return Outcome(RIGHT if good else WASTES, text)


# Orders ---------------------------------------------------------------------------------------------------------------


def compute_row(engine: Any, name: str, ranks: int, microbatches: int, **options: Any) -> list[Any]:
    """Rank 0's compute actions of one of our schedules, in torch's actions."""
    parse = engine.load("schedules")._Action.from_str
    return [parse(str(action)) for action in ps.schedule(name, ranks, microbatches, **options)[0]]


def shard_growth(engine: Any) -> Outcome:
    """The time of the shard pass with four times the microbatches: 4 times if linear, 16 if quadratic."""
    seconds = []
    for microbatches in (256, 1024):
        if isinstance(engine, PenstockEngine):
            schedule, shard = ps.schedule("interleaved-1f1b", 8, microbatches), ps.PassList.parse("shard")
            seconds.append(min(_time(lambda given=schedule, run=shard: run.apply(given)) for _ in range(3)))
        else:
            row, run = compute_row(engine, "interleaved-1f1b", 8, microbatches), engine.load("schedules")._add_unshard_reshard
            seconds.append(min(_time(lambda given=row, run=run: run(list(given))) for _ in range(3)))
    power = math.log(seconds[1] / seconds[0], 4)
    return judge(power < 1.5, f"grows as M^{power:.1f}: {seconds[1] * 1e3:.3g} ms for 1024 microbatches")


def _time(work: Any) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def shard_unasked(engine: Any) -> Outcome:
    """Whether the program of a step without FSDP has unshards."""
    modules = build_blocks(4)
    runner = engine.build(modules, "interleaved-1f1b", COUNT)
    if isinstance(engine, PenstockEngine):
        cells = [str(action) for row in runner.pipe.program() for action in row]
    else:
        cells = [str(action) for row in runner.runner.pipeline_order_with_comms.values() for action in row]
    count = sum("UNSHARD" in cell for cell in cells)
    return judge(count == 0, f"{count} unshards in the order")


def count_unshards(engine: Any) -> Outcome:
    """Unshards of a rank with 8 stages of which 3 fit, against the least that is possible."""
    schedule = ps.schedule("interleaved-1f1b", 2, 8, chunks=8)
    if isinstance(engine, PenstockEngine):
        cells = [str(action) for action in ps.PassList.parse("shard{residency=3}").apply(schedule)[0]]
    else:
        row = compute_row(engine, "interleaved-1f1b", 2, 8, chunks=8)
        cells = [str(action) for action in engine.load("schedules")._add_unshard_reshard(row)]
    count = sum(cell.endswith("UNSHARD") for cell in cells)
    least = least_loads([action.stage for action in schedule[0]], 3)
    return judge(count <= least, f"{count} all-gathers per step, {least} possible")


def least_loads(uses: Sequence[int], places: int) -> int:
    """How often pages are loaded if the one that is needed last makes room, which nothing can beat."""
    held: set[int] = set()
    loads = 0
    for at, stage in enumerate(uses):
        if stage in held:
            continue
        loads += 1
        if len(held) == places:
            rest = uses[at:]
            held.remove(max(held, key=lambda other: rest.index(other) if other in rest else len(rest)))
        held.add(stage)
    return loads


# Backwards ------------------------------------------------------------------------------------------------------------


def split_depth(engine: Any) -> Outcome:
    """A step of two stages of 24 small blocks on one rank, with split backwards against whole ones: processor time."""
    count = 2
    modules: list[nn.Module] = [nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0) for _ in range(24))) for _ in range(2)]
    x, y = torch.randn(2, 4 * count, 2, 32).unbind()

    def measure(name: str) -> Callable[[], float]:
        runner = engine.build(copy.deepcopy(modules), name, count)
        runner.step(x, y)
        return lambda: _time(lambda: runner.step(x, y))

    split, whole = measure("interleaved-zb"), measure("interleaved-1f1b")
    ratio = statistics.median(split() / whole() for _ in range(5))
    return judge(ratio < 1.3, f"a step takes {ratio:.2f} times one with whole backwards")


class Checkpointed(nn.Module):
    """A block that is run again in the backward; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 0

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.count, x, use_reentrant=False)  # type: ignore[no-any-return]


def recompute(engine: Any) -> Outcome:
    """Forwards of checkpointed blocks in the second step, under a split backward: one in F and one in the backward."""
    modules: list[nn.Module] = [nn.Sequential(Checkpointed(), Checkpointed()) for _ in range(4)]
    runner, (x, y) = engine.build(modules, "interleaved-zb", COUNT), draw_batch()
    blocks = [block for index in held_stages("interleaved-zb", 2, dist.get_rank()) for block in modules[index]]  # type: ignore[attr-defined]
    runner.step(x, y)
    before = sum(block.calls for block in blocks)
    runner.step(x, y)
    calls, wanted = sum(block.calls for block in blocks) - before, 2 * len(blocks) * COUNT
    return judge(calls == wanted, f"{calls} block forwards, {wanted} needed")


# Memory ---------------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A stage that keeps weak references to its outputs' memory, and notes how many live after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []
        self.graphs = 0

    def count(self) -> int:
        gc.collect()
        return sum(not reference.expired() for reference in self.outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.graphs += out.requires_grad
        self.outputs.append(StorageWeakRef(out.untyped_storage()))
        self.alive.append(self.count())
        return out


def receive_buffers(engine: Any) -> Outcome:
    """Tensors of a microbatch's size that live on after a step, with 8 microbatches."""
    count, rows = 8, 3
    modules: list[nn.Module] = [Watched(), Watched()]
    runner, (x, y) = engine.build(modules, "1f1b", count), draw_batch(count * rows)
    runner.step(x, y)
    runner.step(x, y)
    gc.collect()
    watched: Any = modules[dist.get_rank()]
    outputs = {reference.cdata for reference in watched.outputs if not reference.expired()}  # for the caller, in case 19b
    storages = {
        value.untyped_storage()._cdata
        for value in gc.get_objects()
        if type(value) is Tensor and value.layout is torch.strided and value.shape == (rows, WIDTH) and not value.is_meta
    }
    kept = len(storages - outputs - {part.untyped_storage()._cdata for part in (x, y)})
    return judge(kept <= 2, f"{kept} received tensors kept after a step of {count} microbatches")


def sent_outputs(engine: Any) -> Outcome:
    """How many outputs of the first stage live at once, against its microbatches under way; one more may be on its way."""
    name, count = "interleaved-1f1b", 8
    modules: list[nn.Module] = [Watched() for _ in range(4)]
    runner, (x, y) = engine.build(modules, name, count), draw_batch(2 * count)
    runner.step(x, y)
    watched: Any = modules[0]
    watched.alive.clear()
    runner.step(x, y)
    if dist.get_rank() != 0:
        return Outcome(RIGHT, "")
    changes = [1 if action.kind is ps.Kind.F else -1 for action in ps.schedule(name, 2, count)[0] if action.stage == 0]
    needed, most = max(itertools.accumulate(changes)), max(watched.alive)
    return judge(most <= needed + 1, f"at most {most} of {count} outputs held, {needed} under way")


def evaluate(engine: Any) -> Any:
    """Evaluate with 8 microbatches after a step, and return this rank's stage."""
    count = 8
    modules: list[nn.Module] = [Watched(), Watched()]
    runner, (x, y) = engine.build(modules, "1f1b", count), draw_batch(2 * count)
    runner.step(x, y)
    watched: Any = modules[dist.get_rank()]
    watched.graphs, watched.outputs = 0, []
    runner.eval(x, y)
    watched.runner = [runner]  # alive, as in a program that goes on training
    return watched


def evaluation_graph(engine: Any) -> Outcome:
    graphs = evaluate(engine).graphs
    return judge(graphs == 0, f"{graphs} of 8 forwards build a graph")


def evaluation_outputs(engine: Any) -> Outcome:
    kept = evaluate(engine).count()
    return judge(kept <= 1, f"{kept} of 8 outputs kept after eval")


# Time -----------------------------------------------------------------------------------------------------------------


class Sleeps(nn.Module):
    """A stage that takes long at chosen calls, and notes when its forwards begin."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds, self.only = nn.Linear(WIDTH, WIDTH), seconds, -1
        self.began: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.began.append(time.perf_counter())
        if self.only in (-1, len(self.began)):
            time.sleep(self.seconds)
        return self.linear(x)  # type: ignore[no-any-return]


def start_up(engine: Any) -> Outcome:
    """How many forwards the first step takes longer than the second, on three ranks with one microbatch and forwards of 0.6 s."""
    seconds = 0.6
    modules: list[nn.Module] = [Sleeps(seconds) for _ in range(3)]
    runner, (x, y) = engine.build(modules, "gpipe", 1), draw_batch()
    times = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        runner.step(x, y)
        dist.barrier()
        times.append(time.perf_counter() - start)
    calls = len(modules[dist.get_rank()].began) - 2  # type: ignore[arg-type]
    longer = (times[0] - times[1]) / seconds
    return judge(longer < 1.5 and calls == 0, f"first step {longer:.1f} forwards longer, {calls} extra forwards per stage")


class SlowBoth(torch.autograd.Function):
    """Sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(0.02)
        return grads[0]


class Spans(nn.Module):
    """Notes from when to when its forwards and backwards run."""

    spans: ClassVar[list[tuple[str, float, float]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = SlowBoth.apply(self.linear(x))
        Spans.spans.append(("F", start, time.perf_counter()))
        if out.requires_grad:
            out.register_hook(lambda grad: Spans.spans.append(("B", time.perf_counter(), time.perf_counter() + 0.02)))
        return out  # type: ignore[no-any-return]


def overlap(engine: Any) -> Outcome:
    """Whether a forward and a backward of DualPipeV run at the same time, on the CPU and without options."""
    count = 8
    modules: list[nn.Module] = [Spans() for _ in range(4)]
    runner, (x, y) = engine.build(modules, "dualpipe-v", count), draw_batch(2 * count)
    Spans.spans.clear()
    runner.step(x, y)
    forwards, backwards = ([span[1:] for span in Spans.spans if span[0] == kind] for kind in "FB")
    together = sum(any(start < end and other < stop for other, end in backwards) for start, stop in forwards)
    return judge(together > 0, f"{together} of {len(forwards)} forwards run together with a backward")


def waits_for_sends(engine: Any) -> Outcome:
    """The first rank of four runs four forwards ahead in 1F1B. The second is slow in its first: does the first wait to send?"""
    seconds = 1.5
    modules: list[nn.Module] = [Sleeps(0.0) for _ in range(4)]
    runner, (x, y) = engine.build(modules, "1f1b", 8), draw_batch(16)
    runner.step(x, y)
    for module in modules:
        module.began.clear()  # type: ignore[operator]
    modules[1].seconds, modules[1].only = seconds, 1  # type: ignore[assignment]
    dist.barrier()
    runner.step(x, y)
    if dist.get_rank() != 0:
        return Outcome(RIGHT, "")
    began: Any = modules[0].began
    ahead = began[3] - began[0]
    return judge(ahead < seconds / 2, f"fourth forward {ahead:.2f} s after the first, while the next rank is busy for {seconds} s")


CASES = (
    Case("14a", "shard pass, growth with microbatches", WASTES, shard_growth, ranks=1),
    Case("14b", "unshards without FSDP", WASTES, shard_unasked, admitted={"drop-in": WASTES}),
    Case("15", "all-gathers, 8 stages per rank of which 3 fit", WASTES, count_unshards, ranks=1),
    Case("16", "split backward of 48 small blocks", WASTES, split_depth, ranks=1),
    Case("17", "recomputed blocks, zero bubble", WASTES, recompute),
    Case("18a", "receive buffers after a step", WASTES, receive_buffers),
    Case("18b", "sent outputs, interleaved 1F1B", WASTES, sent_outputs),
    Case("19a", "graphs in eval", WASTES, evaluation_graph),
    Case("19b", "outputs after eval", WASTES, evaluation_outputs, admitted={"drop-in": WASTES}),
    Case("20", "start-up", WASTES, start_up, ranks=3),
    Case("21a", "DualPipeV's overlapped actions on the CPU", WASTES, overlap, admitted={"Penstock": WASTES, "drop-in": WASTES}),
    Case("21b", "1F1B while the next rank is busy", WASTES, waits_for_sends, ranks=4),
)
