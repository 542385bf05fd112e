"""One interface for three engines: torch's own package, the drop-in that has its names, and `Pipeline`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Our names, and torch's classes of the same order."""
DEADLINE = 20.0
"""Seconds that a rank waits for another."""


@dataclass
class Result:
    """What the rank of the last stage got from a step."""

    output: Any = None
    losses: list[Tensor] = field(default_factory=list)


def count_stages(name: str, ranks: int) -> int:
    return ps.schedule(name, ranks, 4).stages


def held_stages(name: str, ranks: int, rank: int) -> list[int]:
    """The stages of a rank in a schedule of that name."""
    return list(ps.schedule(name, ranks, 4).placement.stages_of(rank))


class TorchEngine:
    """A package with the names of `torch.distributed.pipelining`."""

    def __init__(self, name: str, package: str) -> None:
        self.name, self.package = name, package

    def load(self, module: str = "") -> Any:
        """Import the package, or a module of it."""
        return importlib.import_module(f"{self.package}.{module}" if module else self.package)

    def build(
        self,
        modules: Sequence[nn.Module],
        name: str,
        microbatches: int,
        loss_fn: Callable[..., Any] = functional.mse_loss,
        *,
        group: Any = None,
        order: list[str] | None = None,
    ) -> TorchRunner:
        """Build this rank's part; `order` has one row of compute actions per rank, in place of the schedule's own."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        held = held_stages(name, ranks, rank)
        stages = [
            self.load().PipelineStage(modules[index], index, len(modules), torch.device("cpu"), group=group or dist.group.WORLD)
            for index in held
        ]
        if ranks == 1:  # torch 2.11 connects a stage with its neighbours first, which gloo refuses if all are on one rank
            for stage in stages:
                stage._get_init_p2p_neighbors_ops = list
        if order is not None:
            parse = self.load("schedules")._Action.from_str
            runner = self.load("schedules")._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn)
            runner._prepare_schedule_with_comms({index: [parse(cell) for cell in row.split()] for index, row in enumerate(order)})
        else:
            runner = getattr(self.load(), CLASSES[name])(stages[0] if len(modules) == ranks else stages, microbatches, loss_fn=loss_fn)
        return TorchRunner(runner, is_first=0 in held, is_last=len(modules) - 1 in held)


@dataclass
class TorchRunner:
    runner: Any
    is_first: bool
    is_last: bool

    def step(self, x: Any, target: Any) -> Result:
        return self._call(self.runner.step, x, target)

    def eval(self, x: Any, target: Any) -> Result:
        return self._call(self.runner.eval, x, target)

    def _call(self, method: Callable[..., Any], x: Any, target: Any) -> Result:
        result = Result()
        arguments = (x,) if self.is_first else ()
        last = {"target": target, "losses": result.losses} if self.is_last else {}
        result.output = method(*arguments, **last)
        return result


class PenstockEngine:
    """`Pipeline` on the same stages, in the same processes."""

    name, package = "Penstock", ""

    def build(
        self,
        modules: Sequence[nn.Module],
        name: str,
        microbatches: int,
        loss_fn: Callable[..., Any] = functional.mse_loss,
        *,
        mesh: Any = None,
        order: list[str] | None = None,
    ) -> PenstockRunner:
        schedule: Any = name
        if order is not None:
            rows = [row.split() for row in order]
            schedule = ps.Schedule.from_actions(rows, ps.schedule(name, len(rows), microbatches).placement)
        options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        count = microbatches if order is None else None
        return PenstockRunner(
            Pipeline(nn.ModuleList(modules), schedule=schedule, microbatches=count, loss_fn=loss_fn, deadline=DEADLINE, **options)
        )


@dataclass
class PenstockRunner:
    pipe: Pipeline

    def step(self, x: Any, target: Any) -> Result:
        result = self.pipe.step(x, target=target, outputs=True)
        return Result(result.outputs, list(result.losses or ()))

    def eval(self, x: Any, target: Any) -> Result:
        result = self.pipe.eval_step(x, target=target)
        return Result(result.outputs, list(result.losses or ()))


ENGINES: tuple[Any, ...] = (
    TorchEngine("torch", "torch.distributed.pipelining"),
    PenstockEngine(),
    TorchEngine("drop-in", "penstock.compat.torch"),
)
