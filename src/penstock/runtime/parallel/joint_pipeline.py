"""The survivors of a mesh as one pipeline, in place of the replicas' own: its schedule, and the exchanges of its ranks about a step."""

from __future__ import annotations

import contextlib
from typing import Any

from penstock.errors import CostsError, PipelineError, PlanError, ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.table import Table
from penstock.planner.losses import Survivors, TakeOver, take_over
from penstock.runtime.batch.joint_input import JointBatch, Offer
from penstock.runtime.batch.order import identify_schedule
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.parallel.data_parallel import DataParallel, SameOnDataRanks
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.transport.subgroup import get_subgroup
from penstock.text.numbers import format_count


class JointPipeline:
    """All ranks that are left of a mesh, numbered from 0 in the order of the mesh.

    `plan` is the plan of one pipeline, if there is one: new schedules are chosen on its costs and within its memory limits. Backwards are
    split if `split` allows it and that is faster.
    """

    def __init__(self, mesh: PipelineMesh, plan: Any, *, split: bool, deadline: float) -> None:
        self.mesh, self.split, self.deadline = mesh, split, deadline
        try:
            self.survivors: Survivors = mesh.find_survivors()
        except ScheduleError as error:
            raise self._refuse(error) from error
        left = {replica for _, replica in self.survivors.places}
        for replica in range(self.survivors.data):
            if replica not in left:
                raise self._refuse(
                    f"all ranks of replica {replica} are lost, which alone loaded its part of each batch: start again from the last "
                    f"checkpoint, with a data loader that splits batches over {format_count(len(left), 'replica')}"
                )
        self.group = mesh.join_survivors()
        self.rank = self.group.rank
        self.replica = self.survivors.places[self.rank][1]
        """The replica whose batches this rank is given."""
        self.batch: JointBatch | None = None
        """How the batch of the present step is distributed."""
        costs = getattr(plan, "costs", None)
        self._costs = costs if isinstance(costs, Costs) else None
        self._limits = getattr(plan, "memory_limit", None)
        self._taken: dict[tuple[str, int], TakeOver] = {}

    def take_over(self, table: Table) -> TakeOver:
        """The joint schedule in place of one pipeline's schedule or program."""
        key = identify_schedule(table), table.microbatches
        if key not in self._taken:
            try:
                self._taken[key] = take_over(
                    table, self.survivors, costs=self._find_costs(table), memory_limit=self._limits, split=self.split
                )
            except (ScheduleError, PlanError) as error:
                raise self._refuse(error) from error
        return self._taken[key]

    def _find_costs(self, table: Table) -> Costs | None:
        """The plan's costs; None if there are none, or they are those of other microbatches."""
        if self._costs is not None:
            with contextlib.suppress(CostsError):
                self._costs.check(table.stages, table.units, table.ranks)
                return self._costs
        return None

    def _refuse(self, error: Exception | str) -> PipelineError:
        lost = [self.mesh.whole.describe_rank(rank) for rank in range(self.mesh.whole.ranks) if rank not in self.mesh.whole.members]
        return PipelineError(f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost, and the others cannot go on: {error}")

    def describe(self, table: Table) -> str:
        """One line: which ranks were lost, which run their microbatches in the present step, and how long a step takes now."""
        taken, describe = self.take_over(table), self.mesh.whole.describe_rank
        ranks = {self.mesh.locate(rank): rank for rank in range(self.mesh.whole.ranks)}
        members = self.group.members  # those of the mesh may be fewer by now
        microbatches = table.microbatches if self.batch is None else self.batch.count
        counts = {
            describe(ranks[place]): {
                describe(members[taker]): count for taker, count in self.survivors.count_taken(place, microbatches).items()
            }
            for place in self.survivors.lost
        }
        parts = []
        for lost, by_taker in counts.items():
            total = sum(by_taker.values())
            takers = " and ".join(f"{count} on {taker}" for taker, count in by_taker.items())
            runs = (
                f"its {total} microbatches run on {next(iter(by_taker))}"
                if len(by_taker) == 1
                else f"of its {total} microbatches run {takers}"
            )
            parts.append(f"{lost} was lost; {runs}")
        return "; ".join([*parts, f"predicted step {taken.slowdown:.3g} of before"])

    # Steps ------------------------------------------------------------------------------------------------------------

    def agree(self, step_input: StepInput, name: str, table: Table, data: DataParallel) -> StepInput:
        """Agree on a step with all survivors, and return the joint input; `table` is what one pipeline would run."""
        own = SameOnDataRanks.of(step_input), Offer.of(step_input), data.replicated.list_changed()
        same, offers, changed = zip(*self.group.gather(self.rank, name, own, self.deadline), strict=True)
        SameOnDataRanks.check(same, self.group.describe_rank)
        if data.group is not None:
            data.copy_changed_buffers([changed[self.group.members.index(member)] for member in data.group.members])
        self.batch = JointBatch(self.survivors, table.placement, table.graph, offers, len(step_input.args))
        return self.batch.merge(step_input, self.rank, self._exchange)

    def _exchange(self, source: int, target: int, value: Any) -> Any:
        pair = get_subgroup(self.mesh.whole, sorted((self.group.members[source], self.group.members[target])))
        values = pair.gather(pair.rank, "batch", value, self.deadline)
        return values[pair.members.index(self.group.members[source])]

    def gather_columns(self, name: str, value: Any) -> list[Any]:
        """All-gather of values that peers have in common, such as sums of gradients: only the first peer of each column sends its value.

        The others' values are empty, so that nothing is counted twice.
        """
        first = self.survivors.list_peers(self.survivors.places[self.rank][0])[0]
        sent = value if self.rank == first else {} if isinstance(value, dict) else None
        return self.group.gather(self.rank, name, sent, self.deadline)

    # Results ----------------------------------------------------------------------------------------------------------

    def take_replica(self, shares: list[ResultShare], replica: int) -> list[ResultShare]:
        """A replica's part of the shares of all survivors."""
        assert self.batch is not None
        return [self.batch.take_replica(share, replica) for share in shares]

    def keep_own(self, shares: list[ResultShare]) -> list[ResultShare]:
        """The shares of all survivors, without what those of other replicas tell of their batches."""
        assert self.batch is not None
        return self.batch.keep_own(shares, self.replica)
