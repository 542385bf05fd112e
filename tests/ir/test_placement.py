"""Placements against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.strategies import placements
from penstock.errors import PlacementError
from penstock.ir.placement import Placement, recognise

ranks = st.integers(1, 9)
few = st.integers(1, 4)


def maps(placement: Placement) -> list[list[int]]:
    """The rank of every stage, for each copy, asked one by one."""
    return [[placement.rank_of(s, copy) for s in range(placement.stages)] for copy in range(len(placement.copies))]


@given(ranks)
def test_linear_puts_stage_s_on_rank_s(p: int) -> None:
    assert maps(Placement.linear(p)) == [list(range(p))]


@given(ranks, few)
def test_looped_puts_stage_s_on_rank_s_mod_p(p: int, chunks: int) -> None:
    placement = Placement.looped(p, chunks)
    assert maps(placement) == [[s % p for s in range(p * chunks)]]
    assert placement.chunks == chunks


@given(ranks)
def test_v_holds_r_and_2p_minus_1_minus_r(p: int) -> None:
    placement = Placement.v(p)
    assert [placement.stages_of(r) for r in range(p)] == [(r, 2 * p - 1 - r) for r in range(p)]
    assert placement.stages == 2 * p


@given(ranks, few)
def test_wave_repeats_the_v(p: int, waves: int) -> None:
    placement = Placement.wave(p, waves)
    assert placement.chunks == 2 * waves
    for stage in range(placement.stages):
        assert placement.rank_of(stage) == Placement.v(p).rank_of(stage % (2 * p))


@given(ranks, st.integers(0, 9))
def test_bidirectional_mirrors_the_odd_microbatches(p: int, microbatch: int) -> None:
    placement = Placement.bidirectional(p)
    for stage in range(p):
        assert placement.rank_of(stage, microbatch) == (stage if microbatch % 2 == 0 else p - 1 - stage)
    assert [placement.stages_of(r) for r in range(p)] == [tuple(dict.fromkeys((r, p - 1 - r))) for r in range(p)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_custom_is_the_map_it_was_given(copy: list[int]) -> None:
    placement = Placement.custom(copy)
    assert maps(placement) == [copy]
    assert placement.ranks == max(copy) + 1
    assert Placement.custom(copy, ranks=7).ranks == 7


@given(placements())
def test_rank_chunk_and_stages_say_the_same(placement: Placement) -> None:
    """A stage of a copy is found again at its chunk of its rank, and every chunk is used; a stage of several copies is held once."""
    used = set()
    for microbatch in range(len(placement.copies)):
        for stage in range(placement.stages):
            rank, chunk = placement.rank_of(stage, microbatch), placement.chunk_of(stage, microbatch)
            assert placement.stages_of(rank)[chunk] == stage
            used.add((rank, chunk))
    assert sorted(used) == [(r, c) for r in range(placement.ranks) for c in range(len(placement.stages_of(r)))]
    assert placement.chunks == max(len(placement.stages_of(r)) for r in range(placement.ranks))


def test_a_stage_that_a_rank_runs_for_several_copies_is_held_once() -> None:
    placement = Placement.custom([0, 2], [1, 2])
    assert [placement.stages_of(rank) for rank in range(3)] == [(0,), (0,), (1,)]
    assert (placement.chunks, placement.chunk_of(1, 1)) == (1, 0)


@given(placements(), st.integers(0, 7))
def test_whole_arrays_get_the_ranks_of_their_elements(placement: Placement, microbatch: int) -> None:
    stages = np.arange(placement.stages)
    assert placement.ranks_of(stages, np.full_like(stages, microbatch)).tolist() == [placement.rank_of(s, microbatch) for s in stages]


@given(placements())
def test_a_recognised_placement_is_the_same_map(placement: Placement) -> None:
    found = recognise(Placement.custom(*placement.copies, ranks=placement.ranks))
    assert (found.ranks, found.copies) == (placement.ranks, placement.copies)
    assert Placement.from_json(placement.to_json()) == found


@pytest.mark.parametrize(
    "placement",
    [Placement.linear(4), Placement.looped(3, 2), Placement.v(4), Placement.wave(3, 2), Placement.bidirectional(4)],
    ids=lambda placement: placement.kind,
)
def test_each_family_is_recognised_by_its_map(placement: Placement) -> None:
    assert recognise(Placement.custom(*placement.copies, ranks=placement.ranks)) == placement
    assert placement.describe() == f"{placement.kind}, {placement.ranks} ranks, {placement.stages} stages"


def test_what_belongs_to_no_family_stays_custom() -> None:
    assert recognise(Placement.custom([0, 0, 1, 1])).kind == "custom"
    assert recognise(Placement.custom([0, 1], ranks=3)).kind == "custom"
    assert recognise(Placement.custom([0], ranks=2)).kind == "custom"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Placement.linear(0), "0 ranks: a linear placement needs at least 1"),
        (lambda: Placement.v(-2), "-2 ranks"),
        (lambda: Placement.looped(4, 0), "at least one chunk"),
        (lambda: Placement.wave(4, 0), "at least one chunk"),
        (Placement.custom, "needs the rank of each stage"),
        (lambda: Placement.custom([]), "needs the rank of each stage"),
        (lambda: Placement.custom([0, 1], [1]), "copies of [2, 1] stages"),
        (lambda: Placement.custom([0, -1]), "rank -1 in a placement over 1 ranks"),
        (lambda: Placement.custom([0, 4], ranks=4), "rank 4 in a placement over 4 ranks: ranks run from 0 to 3"),
        (lambda: Placement.looped(4096, 16), "65536 stages: at most 65535"),
    ],
)
def test_maps_that_cannot_be_are_refused(make: object, said: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()  # type: ignore[operator]
    assert said in str(caught.value)
