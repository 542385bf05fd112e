"""The bound for a vocabulary that is spread over the ranks, against orders that the pass makes and the simulator times."""

from __future__ import annotations

import random

import pytest

import penstock as ps
from penstock.planner.bounds.spread_bound import bound_spread
from penstock.planner.problem import Problem


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half"])
def test_no_order_of_the_pass_beats_the_bound(name):
    draw = random.Random(name)
    for _ in range(8):
        ranks, microbatches = draw.choice((2, 3, 4)), draw.choice((1, 2, 6, 12))
        try:
            plain = ps.schedule(name, ranks=ranks, microbatches=microbatches)
        except ps.PenstockError:
            continue
        embedding = draw.random() < 0.5
        ends = {key: (draw.choice((0.0, 0.3, 2.0)) * embedding, *[0.0] * (plain.stages - 2), draw.choice((0.0, 0.3, 2.0))) for key in "st"}
        links = {key: draw.choice((0.0, 0.2, 1.0)) for key in ("broadcast", "combine", "latency", "optimizer")}
        stages = {key: tuple(draw.uniform(0.2, 2.0) for _ in range(plain.stages)) for key in "fiw"}
        multiples = {f"rank_{key}": [(draw.uniform(0, 2), draw.uniform(0, 2)) for _ in range(ranks)] for key in "st" if draw.random() < 0.5}
        costs = ps.Costs(**stages, **ends, **links, **multiples)
        bound = bound_spread(Problem(plain.placement, microbatches, costs), not any(str(action)[1] == "I" for action in plain[0]))
        for ahead in (0, 1, 3):
            spread = ps.spread_vocabulary(plain, costs, ps.Vocabulary(embedding=embedding, ahead=ahead))
            assert bound <= ps.simulate(ps.lower(spread), costs).makespan * (1 + 1e-9)


def test_the_bound_is_reached_where_nothing_waits():
    """One microbatch on two ranks: the way through both, S and T."""
    costs = ps.Costs(f=1.0, i=1.0, w=1.0, s=(0.0, 0.5), t=(0.0, 0.25))
    spread = ps.spread_vocabulary(ps.schedule("1f1b", ranks=2, microbatches=1), costs, ps.Vocabulary(embedding=False))
    made = ps.simulate(ps.lower(spread), costs).makespan
    assert bound_spread(Problem(spread.placement, 1, costs), True) == pytest.approx(made) == pytest.approx(6.5)
