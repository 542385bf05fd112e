"""The joint input after losses: every rank has what its stages need, and microbatches keep their weights and numbers."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PipelineError
from penstock.planner.losses import Survivors
from penstock.runtime.batch.joint_input import JointBatch, Offer
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.step_input import StepInput

COUNT = 4


def make_input(replica: int, **leave_out: Any) -> StepInput:
    """Inputs, targets and keyword arguments that tell their replica and microbatch."""
    numbers = [f"{replica}.{k}" for k in range(COUNT)]
    fields: dict[str, Any] = {
        "args": [(f"x{number}",) for number in numbers],
        "kwargs": {1: [{"mask": f"k{number}"} for number in numbers]},
        "targets": [f"y{number}" for number in numbers],
        "weights": [float(10 * replica + k + 1) for k in range(COUNT)],
    }
    return StepInput(scales=[], **(fields | leave_out))


def merge(name: str, survivors: Survivors, inputs: list[StepInput]) -> list[StepInput]:
    """The joint input of every survivor; all of them exchange values at the same time."""
    schedule = ps.schedule(name, survivors.pipeline, COUNT)
    batch = JointBatch(survivors, schedule.placement, schedule.graph, [Offer.of(one) for one in inputs], COUNT)
    sent: defaultdict[tuple[int, int], Queue[Any]] = defaultdict(Queue)

    def run(rank: int) -> StepInput:
        def exchange(source: int, target: int, value: Any) -> Any:
            if rank == source:
                sent[source, target].put(value)
                return value
            return sent[source, target].get(timeout=20)

        return batch.merge(inputs[rank], rank, exchange)

    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(run, range(len(inputs))))


@given(st.sampled_from(("1f1b", "zbv", "chimera")), st.sampled_from(((2, 2), (2, 3), (4, 2))), st.data())
def test_every_rank_has_what_its_stages_need(name: str, shape: tuple[int, int], data: st.DataObject) -> None:
    places = [(rank, replica) for rank in range(shape[0]) for replica in range(shape[1])]
    lost = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique_by=lambda place: place[0]))
    survivors = Survivors.after(*shape, lost)
    assume({replica for _, replica in survivors.places} == set(range(shape[1])))
    joint = merge(name, survivors, [make_input(replica) for _, replica in survivors.places])
    schedule = ps.schedule(name, shape[0], COUNT)
    placement, last = survivors.place(schedule.placement, COUNT), schedule.stages - 1
    total = sum(10 * replica + k + 1 for replica in range(shape[1]) for k in range(COUNT))
    for number in range(COUNT * shape[1]):
        k, replica = survivors.split_number(number)
        own = f"{replica}.{k}"
        assert joint[placement.rank_of(0, number)].args[number] == (f"x{own}",)
        assert joint[placement.rank_of(last, number)].targets[number] == f"y{own}"  # type: ignore[index]
        assert joint[placement.rank_of(1, number)].kwargs[1][number] == {"mask": f"k{own}"}
        for one in joint:
            assert one.scales[number] == (10 * replica + k + 1) / total
            assert one.number_of(number) == replica * COUNT + k


def test_orders_of_replicas_are_kept() -> None:
    survivors = Survivors.after(2, 2, [(1, 1)])
    inputs = [make_input(replica) for _, replica in survivors.places]
    for one, (_, replica) in zip(inputs, survivors.places, strict=True):
        one.permute([3, 1, 0, 2] if replica else [0, 1, 2, 3])
    joint = merge("1f1b", survivors, inputs)
    assert joint[0].order == tuple(number for k in range(COUNT) for number in (k, COUNT + [3, 1, 0, 2][k]))
    assert [joint[2].targets[2 * k + 1] for k in range(COUNT)] == ["y1.3", "y1.1", "y1.0", "y1.2"]  # type: ignore[index]


def test_results_are_those_of_a_replica() -> None:
    survivors = Survivors.after(2, 2, [(1, 1)])
    batch = JointBatch(survivors, ps.Placement.linear(2), ps.StageGraph.chain(2), [], COUNT)
    share: Any = ResultShare(
        losses={5: ("loss", 1.0), 2: ("other", 1.0)},
        side={(1, 4): "side"},
        metrics={"a": {(0, 7): 1}, "b": {(0, 1): 2}},
        outputs={6: "out"},
    )
    taken = batch.take_replica(share, 1)
    assert (taken.losses, taken.side, taken.metrics, taken.outputs) == (
        {1: ("loss", 1.0)},
        {(1, 0): "side"},
        {"a": {(0, 3): 1}},
        {2: "out"},
    )


@pytest.mark.parametrize(
    ("lost", "leave_out", "said"),
    [
        ([(0, 1)], {"args": [()] * COUNT}, "a rank of replica 1 is lost, and none of the others was given the inputs"),
        ([(1, 1)], {"targets": None}, "none of the others was given the target"),
        ([(1, 1)], {"kwargs": {}}, "none of the others was given the keyword arguments of stage 1"),
    ],
)
def test_what_no_survivor_has_is_refused(lost: list[tuple[int, int]], leave_out: dict[str, Any], said: str) -> None:
    survivors = Survivors.after(2, 2, lost)
    inputs = [make_input(replica, **(leave_out if replica else {})) for _, replica in survivors.places]
    with pytest.raises(PipelineError, match=said):
        merge("1f1b", survivors, inputs)
