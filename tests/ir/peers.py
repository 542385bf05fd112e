"""PyTorch's own schedule objects, without processes or models."""

from __future__ import annotations

import csv
from os import PathLike
from unittest import mock

from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action, _PipelineScheduleRuntime, get_schedule_class
from torch.distributed.pipelining.stage import PipelineStage


def _stages(ranks: int, chunks: int) -> list[PipelineStage]:
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * chunks, None
    return [stage] * chunks


def order_of(name: str, ranks: int, microbatches: int, chunks: int = 1) -> dict[int, list[_Action | None]]:
    """The compute order that PyTorch makes, idle slots and all."""
    made = get_schedule_class(name)
    stages = _stages(ranks, chunks)
    order = made(stages[0] if issubclass(made, PipelineScheduleSingle) else stages, microbatches).pipeline_order
    assert order is not None
    return order


def runtime(ranks: int, microbatches: int, chunks: int = 1) -> _PipelineScheduleRuntime:
    """An empty runtime: it loads and writes files and lowers orders."""
    return _PipelineScheduleRuntime(_stages(ranks, chunks), microbatches)


def lowered(name: str, ranks: int, microbatches: int, chunks: int = 1) -> _PipelineScheduleRuntime:
    """The runtime with PyTorch's lowering of its own order."""
    made = runtime(ranks, microbatches, chunks)
    order = order_of(name, ranks, microbatches, chunks)
    made.pipeline_order = {rank: [a for a in row if a is None or a.is_compute_op] for rank, row in order.items()}
    made._prepare_schedule_with_comms(made.pipeline_order)
    return made


def write_order(order: dict[int, list[_Action | None]], path: str | PathLike[str]) -> None:
    """What PyTorch's `_dump_csv` writes, for its schedules that have none."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(order.values())


def texts(order: dict[int, list[_Action | None]]) -> list[list[str]]:
    """The order without idle slots, as text."""
    return [[repr(action) for action in row if action is not None] for row in order.values()]
