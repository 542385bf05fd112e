"""Problems of a moderate size, for what holds of every order."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import penstock as ps
from penstock.ir.placement import Placement
from penstock.planner.problem import Problem

amounts = st.integers(1, 20).map(float)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks = draw(st.integers(1, 4))
    return draw(
        st.sampled_from(
            (Placement.linear(ranks), Placement.v(ranks), Placement.looped(ranks, 2), Placement.looped(ranks, 3), Placement.wave(ranks, 2))
        )
    )


@st.composite
def order_problems(draw: st.DrawFn, *, split: bool | None = None, sliced: bool = False) -> Problem:
    """Uneven times and sizes, slow links, reductions and an optimizer; memory for one microbatch at least.

    With `sliced`, microbatches may be cut into slices, each with times and sizes of its own, which keep something for the next.
    """
    placement, slices = draw(placements()), draw(st.sampled_from((1, 2, 3) if sliced else (1,)))
    microbatches = draw(st.integers(1, 6 if slices == 1 else 3))
    stages = placement.stages

    def row(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=stages, max_size=stages))

    fields: dict[str, Any] = {name: row(amounts) for name in ("f", "i", "w", "activation")}
    fields["weight_stash"] = [draw(st.integers(0, 10)) / 10 * size for size in fields["activation"]]
    latencies, ranks = st.sampled_from((0.0, 1.0, 30.0)), placement.ranks
    by_pair = st.lists(st.lists(latencies, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    fields |= {"latency": draw(st.one_of(latencies, by_pair)), "parameters": row(amounts)}
    if draw(st.booleans()):
        fields |= {"reduce": row(amounts), "optimizer": row(amounts)}
    if draw(st.booleans()):
        fields["b"] = [(i + w) * draw(st.sampled_from((0.7, 1.0))) for i, w in zip(fields["i"], fields["w"], strict=True)]
    if draw(st.booleans()):
        fields["contention"] = draw(st.sampled_from(("independent", "pair", "links")))
        if fields["contention"] == "links":  # one lane for both kinds of messages of each pair, and one more
            fields["lanes"] = [[(1 + one * ranks + other, 1 + one * ranks + other) for other in range(ranks)] for one in range(ranks)]
    alone = list(fields["activation"])
    if slices > 1:
        fields |= {name: row(amounts) for name in ("kept", "kept_gradients")}
        shares = draw(st.lists(st.sampled_from((0.5, 1.0, 2.0)), min_size=slices, max_size=slices))
        held = zip(fields["activation"], fields["kept"], fields["kept_gradients"], strict=True)
        alone = [sum(shares) * (own + kept) + sum(shares[:-1]) * sums for own, kept, sums in held]
        for name in ("f", "i", "w", "b", "activation", "weight_stash", "kept", "kept_gradients"):
            if name in fields:
                fields[name] = [[value * share for share in shares] * microbatches for value in fields[name]]
    costs = ps.Costs(**fields)
    static = [sum(fields["parameters"][s] for s in placement.stages_of(rank)) for rank in range(placement.ranks)]
    least = [sum(alone[s] for s in placement.stages_of(rank)) for rank in range(placement.ranks)]
    more = draw(st.sampled_from((1.0, 1.5, 3.0, None)))
    limit = None if more is None else tuple(kept + more * own for kept, own in zip(static, least, strict=True))
    wanted = draw(st.booleans()) if split is None else split
    return Problem(placement, microbatches, costs, limit, barrier=draw(st.booleans()), split=wanted, slices=slices)
