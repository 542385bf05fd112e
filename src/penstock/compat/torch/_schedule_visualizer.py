"""Torch's schedule visualizer: lists of actions, spaced by our simulator, and their picture.

`get_schedule_ops("InterleavedZeroBubble", 4, 8)` returns the lists, `visualize_schedule(ops, "test.png")` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import _schedule_visualizer as _torch_visualizer
from torch.distributed.pipelining._schedule_visualizer import _ComputationTypeVisual, action_type_to_color_mapping

from penstock.compat.torch.orders import Order, _Action, find_stage_ranks, pack_rows, unpack_rows
from penstock.compat.torch.schedule_base import _PipelineSchedule
from penstock.compat.torch.schedules import PipelineScheduleMulti, PipelineScheduleSingle, _PipelineScheduleRuntime, get_schedule_class
from penstock.errors import MissingExtraError, PenstockError
from penstock.ir.costs import Costs
from penstock.ir.kind import COMPUTE
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.simulator.simulate import simulate

Ops = list[list[_Action | None]]
_COLORS: Any = action_type_to_color_mapping  # torch's types of actions are equal to ours
_COMMUNICATION = _ComputationTypeVisual("black", "Communication")


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_visualizer, name)


def get_schedule_ops(  # noqa: PLR0917 - torch's own signature
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> Ops:
    """List each rank's actions: with idle slots by `add_spacing`, with messages by `with_comms`, with late receives by `defer_pp_recv`."""
    if add_spacing and with_comms:
        raise ValueError("Cannot add spacing and view comms at the same time")
    schedule_class: Any = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    if not issubclass(schedule_class, PipelineScheduleSingle | PipelineScheduleMulti):
        raise ValueError(f"Invalid schedule: {schedule}")
    single = issubclass(schedule_class, PipelineScheduleSingle)
    chunks = (1 if single else 2) if num_stages_per_rank is None else num_stages_per_rank
    if (chunks != 1) if single else (chunks < 2):
        raise AssertionError(f"Expected num_stages_per_rank to be {'1' if single else 'at least 2'}, got {chunks}")
    stage = SimpleNamespace(group_rank=0, group_size=pp_degree, num_stages=chunks * pp_degree, submod=None)
    order: Order | None = schedule_class(stage if single else [stage] * chunks, num_microbatches).pipeline_order
    if order is None:
        raise AssertionError("Expected pipeline_order to not be None")
    if with_comms:
        runtime = _PipelineScheduleRuntime([stage] * chunks, num_microbatches, defer_pp_recv=defer_pp_recv)
        runtime._prepare_schedule_with_comms(_keep_compute(order))
        return [list(runtime.pipeline_order_with_comms[rank]) for rank in range(pp_degree)]
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _keep_compute(order: Order) -> Order:
    return {rank: [action for action in row if action is None or action.is_compute_op] for rank, row in order.items()}


def add_schedule_op_spacing(schedule: Sequence[Sequence[_Action | None]]) -> Ops:
    """Space the compute actions by idle slots, as the simulator times them: one step per forward or half of a backward."""
    order = _keep_compute(dict(enumerate(schedule)))
    rank_of_stage = find_stage_ranks(order)
    if not rank_of_stage:
        return [[] for _ in order]
    rows = pack_rows(order)
    table = Schedule.from_rows(
        rows.keep(rows.is_kind(*COMPUTE)),
        Placement.custom([rank_of_stage.get(stage, 0) for stage in range(max(rank_of_stage) + 1)], ranks=len(order)),
        int(rows.microbatch.max()) + 1,
    )
    try:
        timeline = simulate(table, Costs())
    except PenstockError as error:
        raise RuntimeError(f"No progress made in scheduling - possible deadlock: {error}") from error
    actions = unpack_rows(table.rows)
    pairs = (zip(actions[rank], timeline.spans(rank), strict=True) for rank in range(len(order)))
    return [[slot for action, span in row for slot in (*[None] * round(span.wait), action)] for row in pairs]


# Pictures -------------------------------------------------------------------------------------------------------------


def visualize_schedule(schedule: Sequence[Sequence[_Action | None]], filename: str | None = None) -> None:
    """Draw the lists, one row per rank, into a file or on the screen."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingExtraError("visualize_schedule", "matplotlib", "plot") from error
    longest = max((len(row) for row in schedule), default=0)
    figure, axes = plt.subplots(figsize=(longest + 2, len(schedule) + 2))
    _draw(axes, schedule, font=min(longest, len(schedule)) + 4)
    if filename is None:
        plt.show()
    else:
        figure.savefig(filename, bbox_inches="tight")
    plt.close(figure)


def _draw(axes: Any, schedule: Sequence[Sequence[_Action | None]], font: int) -> None:
    from matplotlib.patches import Rectangle

    ranks, end, used = len(schedule), 0, dict[_ComputationTypeVisual, None]()
    for rank, row in enumerate(schedule):
        start = 0
        for action in row:
            visual = _COMMUNICATION if action is None else _COLORS.get(action.computation_type, _COMMUNICATION)
            if action is not None:
                used[visual] = None
                border = 1 if action.sub_actions is None else 2
                axes.add_patch(
                    Rectangle((start, ranks - rank - 1), visual.width, 1, facecolor=visual.color, edgecolor="black", linewidth=border)
                )
                middle = start + visual.width / 2, ranks - rank - 0.5
                axes.text(*middle, str(action), ha="center", va="center", fontsize=font, color="white")
            start += visual.width
        end = max(end, start)
    axes.set_xlim(-0.5, end + 1)
    axes.set_ylim(-0.5, ranks + 0.5)
    axes.set_yticks([ranks - rank - 0.5 for rank in range(ranks)], [f"Rank {rank}" for rank in range(ranks)], fontsize=font)
    axes.set_xticklabels([])
    handles = [Rectangle((0, 0), 1, 1, facecolor=visual.color, edgecolor="black", label=visual.text) for visual in used]
    axes.legend(handles=handles, loc="upper right", fontsize=font)
