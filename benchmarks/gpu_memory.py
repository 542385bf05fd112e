"""Peak memory of every rank: as predicted from a profile, and as the device's allocator counts it.

Each rank's program runs alone on the device, with messages that come from nowhere and go nowhere, so that what is allocated is this
rank's and nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from benchmarks.gpu_models import blocks, mean_loss
from torch import Tensor, nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.ir.program import Program
from penstock.passes.shard import Shard
from penstock.planner.partition.stage_costs import stage_costs
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.execution.executor import Executor
from penstock.runtime.measure.profile import profile
from penstock.runtime.model.stage import Stage
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.transport.group import Activity, Group, Inbox, Operation, Outbox, Route

RANKS, MICROBATCHES = 4, 8
WANTED = 0.05


def memory(device: Any, small: bool) -> dict[str, Any]:
    width, tokens, layers = (16, 8, 8) if small else (2048, 2048, 16)
    x = torch.randn(2, tokens // 2, width, device=device, dtype=torch.bfloat16)
    whole = blocks(layers, width, device)
    measured = profile(list(whole), x, loss_fn=mean_loss, target=x, optimizer=None, repeats=1)
    del whole
    rows = []
    for name in ("1f1b", "zb-h1", "zbv"):
        schedule = ps.schedule(name, RANKS, MICROBATCHES)
        sizes = [layers // schedule.stages] * schedule.stages
        program = ps.lower(schedule)
        costs = stage_costs(measured, sizes, schedule.placement, [False] * schedule.stages)
        predicted = ps.simulate(program, costs).peak_memory
        for rank in range(RANKS):
            modules = {stage: blocks(sizes[stage], width, device) for stage in schedule.placement.stages_of(rank)}
            peak = _peak(program, rank, modules, x)
            off = predicted[rank] / peak - 1 if peak else 0.0
            row = {"schedule": name, "rank": rank, "predicted MiB": predicted[rank] / 2**20, "allocated MiB": peak / 2**20}
            rows.append(row | {"off by": f"{off:+.1%}", "good": "yes" if abs(off) <= WANTED else "NO"})
    workspace = max(layer.workspace for layer in measured.layers) / 2**20
    what = (
        f"{layers} bf16 blocks of {width}, {RANKS} ranks, {MICROBATCHES} microbatches of {tokens} tokens: parameters, gradients "
        "and all that a step holds; each rank's program runs alone on the device. "
        f"A layer's largest workspace was {workspace:.0f} MiB. Wanted: within {WANTED:.0%}."
    )
    return {"what": what, "rows": rows}


def _peak(program: Program, rank: int, modules: dict[int, nn.Module], x: Tensor) -> int:
    """The most that the allocator has given out in a step, beyond what was there without this rank."""
    stages = {index: Stage(index, module) for index, module in modules.items()}
    data = DataParallel(None, stages, shard=Shard(), dtype=None, deadline=60.0)
    executor = Executor(program, rank, stages, loss=Loss(mean_loss, "mean"), group=_Alone(program.ranks, x), deadline=60.0, data=data)
    count = program.microbatches
    for last in (False, True):
        if last and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        with torch.enable_grad():
            executor.run(StepInput([(x,)] * count, {}, [x] * count, [1 / count] * count))
        if not last:  # the first step was to have every library's own memory in place
            for module in modules.values():
                module.zero_grad()
    own = sum(p.numel() * p.element_size() for module in modules.values() for p in module.parameters())
    return torch.cuda.max_memory_allocated() - before + own if torch.cuda.is_initialized() else 0


class _Alone(Group):
    """A rank whose neighbours are not there."""

    def __init__(self, ranks: int, sample: Tensor) -> None:
        self.ranks, self.parallel, self.sample = ranks, False, sample
        self.own = Activity()

    def outbox(self, route: Route, slots: int, program: int, deadline: float) -> Outbox:
        return _Dropped()

    def inbox(self, route: Route, program: int, deadline: float) -> Inbox:
        return _Made(self.sample, gradients=route[2] == "gradients")

    def activity(self, rank: int) -> Activity:
        return self.own

    @property
    def generation(self) -> int:
        return 0

    def number_pipeline(self, rank: int) -> int:
        return 1

    def gather(self, rank: int, name: str, value: Any, deadline: float) -> list[Any]:
        return [value] * self.ranks

    def enter(self, rank: int, deadline: float) -> None:
        pass

    def fail(self, rank: int | None, error: BaseException, *, fatal: bool = False) -> None:
        raise error

    def report_failure(self, rank: int, headline: str, cause: BaseException | None = None) -> PipelineError:
        return PipelineError(headline)

    def ident(self, thing: object) -> Hashable:
        return id(thing)


class _Dropped(Outbox):
    def begin(self) -> None:
        pass

    def put(self, value: Any) -> None:
        pass


class _Made(Inbox):
    """Messages that are there as soon as a receive has room for them."""

    def __init__(self, sample: Tensor, gradients: bool) -> None:
        super().__init__()
        self.sample, self.gradients = sample, gradients
        self.ready: dict[int, Any] = {}

    def begin(self) -> None:
        pass

    def expect(self, cell: int) -> Operation:
        self.times.append((0, 0, 0))

        def post() -> None:
            room = torch.zeros_like(self.sample)
            self.ready[cell] = [room] if self.gradients else room.requires_grad_()

        return post

    def pull(self, cells: list[Any], cell: int) -> Any:
        cells[cell] = self.ready.pop(cell)
        return cells[cell]

    def clear(self) -> None:
        self.ready.clear()

    def pending(self) -> int:
        return len(self.ready)
