"""Give the microbatches of lost ranks to their peers, under a joint schedule of all survivors that is proved."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import PlanError, ScheduleError
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.ir.costs import Costs, check_costs
from penstock.ir.kind import SHARES
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table, check_table
from penstock.passes.lower import lower
from penstock.planner.losses.merged_rows import JointRows, lower_joint, time_table
from penstock.planner.losses.survivors import Place, Survivors, check_pipeline
from penstock.planner.problem import SLACK
from penstock.planner.request import Limit, check_limits
from penstock.simulator.timeline import Timeline
from penstock.text.checks import check_flag
from penstock.text.numbers import format_number
from penstock.verifier.proof import Proof
from penstock.verifier.verify import verify


@dataclass(frozen=True, eq=False)
class TakeOver:
    """The joint schedule of all survivors with its proof, and what it costs."""

    survivors: Survivors
    schedule: Schedule
    proof: Proof
    timeline: Timeline
    """The predicted step of all survivors."""
    before: Timeline
    """The predicted step of one pipeline before the loss; all replicas ran at the same time."""

    @property
    def slowdown(self) -> float:
        """The predicted time of a step over that before the loss."""
        return self.timeline.makespan / self.before.makespan if self.before.makespan else 1.0

    @property
    def throughput(self) -> float:
        """The predicted throughput over that before the loss."""
        return 1 / self.slowdown if self.slowdown else 1.0

    def count_taken(self, place: Place) -> dict[int, int]:
        """How many microbatches of a lost place each of its peers runs."""
        return self.survivors.count_taken(place, self.schedule.microbatches // self.survivors.data)

    def describe(self) -> str:
        """One line: who was lost, who runs its microbatches, and how long a step takes now."""
        parts = []
        for rank, replica in self.survivors.lost:
            taken = self.count_taken((rank, replica))
            on = " and ".join(f"{count} on (pp {rank}, dp {self.survivors.places[taker][1]})" for taker, count in taken.items())
            parts.append(f"(pp {rank}, dp {replica}) is lost, and its microbatches run elsewhere: {on}")
        return "; ".join([*parts, f"predicted step {format_number(self.slowdown)} of before"])


def take_over(
    schedule: Table, survivors: Survivors, *, costs: Costs | None = None, memory_limit: Limit = None, split: bool = True
) -> TakeOver:
    """Give the microbatches of lost ranks to their peers, under a joint schedule that is proved.

    `schedule` is that of one pipeline. `memory_limit` is one size, or one per rank of the pipeline; rows are reordered to stay below it.
    `split` says whether backwards may be split. Raises `PlanError` with the numbers if no order fits the memory.

    >>> from penstock.schedules.registry import schedule
    >>> after = take_over(schedule("1f1b", ranks=2, microbatches=4), Survivors.after(2, 2, lost=[(1, 1)]))
    >>> print(after.describe())
    (pp 1, dp 1) is lost, and its microbatches run elsewhere: 4 on (pp 1, dp 0); predicted step 1.667 of before
    """
    check_table(schedule, "take_over")
    if not isinstance(survivors, Survivors):
        raise ScheduleError(f"survivors must be penstock.Survivors, like Survivors.after(4, 2, lost=[(1, 0)]), got {survivors!r}")
    costs = check_costs(costs)
    check_flag("split", split)
    single = schedule if isinstance(schedule, Schedule) else Program.start(schedule).schedule()
    _check_schedule(single, survivors)
    costs.check(single.stages, single.units, single.ranks)
    costs = costs.with_slowest_link()  # a table of links knows those of one pipeline, and not those between several
    before = time_table(lower(single), costs)
    joint = JointRows(single, survivors, costs, _spread_limits(memory_limit, survivors))
    best: tuple[Schedule, Timeline] | None = None
    excess: tuple[float, int, float] | None = None
    for candidate, timeline in joint.list_candidates(split):
        over = joint.find_excess(timeline)
        if over is None:
            if best is None or timeline.makespan < best[1].makespan * (1 - SLACK):
                best = candidate, timeline
        elif excess is None or over < excess:
            excess = over
    if best is None:
        assert excess is not None
        _, rank, peak = excess
        place, limit = survivors.places[rank], joint.limits[rank]
        raise PlanError(
            f"rank {rank} (pp {place[0]}, dp {place[1]}) would hold {format_number(peak)} of at most {format_number(limit)} when peers run "
            "the microbatches of lost ranks, in the best of all orders that were tried: give it more memory, or start again from the last "
            "checkpoint with fewer replicas"
        )
    chosen, timeline = best
    proof = verify(lower_joint(chosen), memory_limit=None if memory_limit is None else joint.limits, costs=joint.costs)
    return TakeOver(survivors, chosen, proof, timeline, before)


def _check_schedule(schedule: Schedule, survivors: Survivors) -> None:
    check_pipeline(schedule.placement, survivors.pipeline)
    if schedule.slices > 1:
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} cuts microbatches into {schedule.slices} slices, which must stay on one rank: peers can "
            "take over only whole microbatches, so use a schedule without slices, or start again from a checkpoint after a loss"
        )
    if schedule.rows.is_kind(*SHARES).any():
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} spreads the vocabulary over its ranks, and the share of a lost rank is needed for every "
            "microbatch: use a schedule that keeps the vocabulary on one rank, or start again from a checkpoint after a loss"
        )
    if schedule.microbatches * survivors.data > MAX_MICROBATCHES:
        raise ScheduleError(f"{schedule.microbatches} microbatches x {survivors.data} replicas: at most {MAX_MICROBATCHES} are supported")


def _spread_limits(limit: Limit, survivors: Survivors) -> tuple[float, ...]:
    """The memory limit of each survivor: that of its rank in the pipeline."""
    limits = check_limits(limit, survivors.pipeline)
    return tuple(math.inf if limits is None else limits[rank] for rank, _ in survivors.places)
