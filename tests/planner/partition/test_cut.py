"""Partitions against every way to cut."""

from __future__ import annotations

import random
import sys
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PlacementError
from penstock.planner.partition import cut
from penstock.planner.partition.cut import cut_layers
from penstock.planner.partition.layer_runs import Cutting, LayerRuns, PeakMoment
from planner.model_strategies import models, numbers

PLACEMENTS = [
    ps.Placement.linear(1),
    ps.Placement.linear(3),
    ps.Placement.v(2),
    ps.Placement.v(3),
    ps.Placement.looped(2, 2),
    ps.Placement.looped(2, 3),
    ps.Placement.wave(1, 2),
    ps.Placement.bidirectional(4),
    ps.Placement.bidirectional(3),
    ps.Placement.custom([1, 0, 1], ranks=2),
]


class Reference:
    """What a partition gives the ranks, layer by layer and in so many words."""

    def __init__(
        self,
        profile: ps.Profile,
        placement: ps.Placement,
        recompute: list[bool],
        moments: list[PeakMoment],
        cluster: ps.Cluster | None = None,
    ) -> None:
        self.profile, self.placement, self.recompute, self.moments = profile, placement, recompute, moments
        devices = [ps.Device()] * placement.ranks if cluster is None else cluster.devices
        self.speeds = [device.speeds for device in devices]

    def load(self, cuts: tuple[int, ...]) -> float:
        spent = [0.0] * self.placement.ranks
        for copy in self.placement.copies:
            for stage, rank in enumerate(copy):
                for layer in self.profile.layers[cuts[stage] : cuts[stage + 1]]:
                    speeds = self.speeds[rank]
                    taken = layer.f / speeds.f + layer.i / speeds.i + layer.w / speeds.w + self.recompute[stage] * layer.f / speeds.f
                    spent[rank] += taken / len(self.placement.copies)
        return max(spent)

    def held(self, cuts: tuple[int, ...], moment: PeakMoment) -> float:
        total, spare = moment.other, 0.0
        for stage, activations, stashes in zip(self.placement.stages_of(moment.rank), moment.activations, moment.stashes, strict=True):
            first, last = cuts[stage], cuts[stage + 1]
            layers = self.profile.layers[first:last]
            given_ = self.profile.input if first == 0 else self.profile.layers[first - 1].output
            output = self.profile.layers[last - 1].output if self.profile.keeps_output and last < len(self.profile) else 0.0
            whole = sum(layer.activation for layer in layers)
            total += sum(layer.parameters for layer in layers) + stashes * sum(layer.weight_stash for layer in layers)
            total += activations * ((given_ if self.recompute[stage] else whole) + output)
            again = max(whole - given_, 0.0) if self.recompute[stage] else 0.0
            spare = max(spare, again + max(layer.workspace for layer in layers))
        return total + spare

    def excess(self, cuts: tuple[int, ...], limits: list[float]) -> float:
        always = [
            PeakMoment(rank, (1,) * len(held), (0,) * len(held))
            for rank, held in enumerate(map(self.placement.stages_of, range(self.placement.ranks)))
        ]
        return max(max(self.held(cuts, moment) - limits[moment.rank], 0.0) for moment in [*always, *self.moments])

    def all_cuts(self) -> list[tuple[int, ...]]:
        layers = len(self.profile)
        return [(0, *inner, layers) for inner in combinations(range(1, layers), self.placement.stages - 1)]


def moments_for(draw: st.DrawFn, placement: ps.Placement) -> list[PeakMoment]:
    made = []
    for rank in draw(st.lists(st.integers(0, placement.ranks - 1), max_size=2)):
        held = len(placement.stages_of(rank))
        counts = [tuple(draw(st.lists(st.integers(0, 3), min_size=held, max_size=held))) for _ in range(2)]
        made.append(PeakMoment(rank, counts[0], counts[1], draw(numbers)))
    return made


speeds = st.sampled_from((1.0, 0.5, 3.0, {"f": 1.0, "i": 2.0, "w": 0.25}))


def draw_cluster(draw: st.DrawFn, placement: ps.Placement) -> ps.Cluster | None:
    """Devices of different speeds, or None."""
    return None if draw(st.booleans()) else ps.Cluster([ps.Device(speed=draw(speeds)) for _ in range(placement.ranks)])


@pytest.mark.slow
@pytest.mark.parametrize("everything", [True, False], ids=["all-cuts", "no-short-cut"])
@given(data=st.data())
@settings(max_examples=150)
def test_no_cut_is_better(everything: bool, data: st.DataObject) -> None:
    placement = data.draw(st.sampled_from(PLACEMENTS))
    profile = data.draw(models().filter(lambda model: len(model) >= placement.stages))
    recompute = data.draw(st.lists(st.booleans(), min_size=placement.stages, max_size=placement.stages))
    moments, cluster = moments_for(data.draw, placement), draw_cluster(data.draw, placement)
    limits = data.draw(st.none() | st.lists(st.integers(0, 150).map(float), min_size=placement.ranks, max_size=placement.ranks))
    with pytest.MonkeyPatch.context() as patch:
        if not everything:
            patch.setattr(cut, "FEW", 0)
        found = cut_layers(profile, placement, recompute=recompute, limits=limits, moments=moments, cluster=cluster)
    reference = Reference(profile, placement, recompute, moments, cluster)
    cuts = (0, *np.cumsum(found.sizes).tolist())
    assert len(found.sizes) == placement.stages
    assert min(found.sizes) >= 1
    assert cuts[-1] == len(profile)
    assert found.load == pytest.approx(reference.load(cuts))
    ways = reference.all_cuts()
    fitting = ways if limits is None else [way for way in ways if not reference.excess(way, limits)]
    assert max(found.excesses) == pytest.approx(0.0 if limits is None else reference.excess(cuts, limits))
    if fitting and found.exact:
        assert found.fits
        assert found.load == pytest.approx(min(map(reference.load, fitting)))
    if everything or placement.chunks == 1:
        assert found.exact
        assert found.fits == bool(fitting)
        if limits is not None and not fitting:
            assert max(found.excesses) == pytest.approx(min(reference.excess(way, limits) for way in ways))


@pytest.mark.parametrize("placement", [ps.Placement.v(3), ps.Placement.bidirectional(4)], ids=lambda placement: placement.kind)
@given(data=st.data())
def test_mirrored_stages_are_exact_without_trying_everything(placement: ps.Placement, data: st.DataObject) -> None:
    profile = data.draw(models(10).filter(lambda model: len(model) >= placement.stages))
    cluster = draw_cluster(data.draw, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "FEW", 0)
        found = cut_layers(profile, placement, cluster=cluster)
    reference = Reference(profile, placement, [False] * placement.stages, [], cluster)
    assert found.exact
    assert found.load == pytest.approx(min(map(reference.load, reference.all_cuts())))


@given(models(9), st.sampled_from([0.0, 0.1, 0.5]))
def test_slack_buys_more_even_stages(profile: ps.Profile, slack: float) -> None:
    placement = ps.Placement.v(2)
    if len(profile) < placement.stages:
        return
    least, found = cut_layers(profile, placement), cut_layers(profile, placement, slack=slack)
    reference = Reference(profile, placement, [False] * 4, [])

    def uneven(way: tuple[int, ...]) -> float:
        return sum(sum(layer.time for layer in profile.layers[a:b]) ** 2 for a, b in pairwise(way))

    allowed = [way for way in reference.all_cuts() if reference.load(way) <= least.load * (1 + slack) * (1 + 1e-9)]
    assert uneven((0, *np.cumsum(found.sizes).tolist())) == pytest.approx(min(map(uneven, allowed)))


def test_many_layers_over_many_stages():
    """Embedding and head count: the head alone takes as long as two and a half blocks, so that its rank gets fewer."""
    block = ps.Layer(f=1, i=1, w=1, activation=1)
    layers = [ps.Layer(f=0.25, i=0, w=0), *[block] * 126, ps.Layer(f=2.5, i=2.5, w=2.5)]
    profile = ps.Profile(layers)
    for placement in (ps.Placement.linear(64), ps.Placement.v(32), ps.Placement.looped(32, 2), ps.Placement.wave(16, 2)):
        found = cut_layers(profile, placement)
        assert sum(found.sizes) == 128
        assert found.load < profile.time / placement.ranks * 1.3
    assert cut_layers(profile, ps.Placement.linear(64)).load == 7.5  # that of the head alone
    assert (
        cut_layers(profile, ps.Placement.v(32)).load == 0.25 + 2 * 3 + 7.5
    )  # embedding, two blocks and the head; 31 ranks have four blocks


@pytest.mark.parametrize("limit", [None, 1.15])
def test_uneven_layers_on_a_v_are_cut_exactly(limit):
    """128 layers that differ by up to a factor of two: the exact cut is within a percent of the mean, which no cut can be below."""
    chance = random.Random(1)

    def layer() -> ps.Layer:
        f, i, w, activation, parameters = (1 + chance.random() for _ in range(5))
        return ps.Layer(f=f, i=i, w=w, activation=activation, output=0.1, parameters=2 * parameters)

    profile, placement = ps.Profile([layer() for _ in range(128)], input=0.1), ps.Placement.v(8)
    held = sum(each.static + each.activation for each in profile.layers) / placement.ranks
    found = cut_layers(profile, placement, limits=None if limit is None else (limit * held,) * placement.ranks)
    assert found.exact
    assert found.fits
    assert profile.time / placement.ranks <= found.load <= profile.time / placement.ranks * 1.01


def test_too_few_layers():
    with pytest.raises(PlacementError, match="3 layers are too few for 4 stages"):
        cut_layers(ps.Profile([ps.Layer(f=1, i=1, w=1)] * 3), ps.Placement.v(2))


@pytest.mark.parametrize(
    "placement", [ps.Placement.looped(3, 2), ps.Placement.looped(2, 4), ps.Placement.wave(2, 2)], ids=lambda each: each.kind
)
def test_branch_and_bound_agrees_with_every_way_to_cut(placement, monkeypatch):
    """On models small enough to try all cuts, but told not to."""
    chance = random.Random(3)
    for _ in range(5):
        profile = ps.Profile([ps.Layer(f=chance.randint(1, 20), i=0, w=0, activation=chance.randint(1, 3)) for _ in range(13)])
        limits = [chance.choice([24.0, 100.0])] * placement.ranks
        every = cut_layers(profile, placement, limits=limits)
        with monkeypatch.context() as patched:
            patched.setattr(cut, "FEW", 0)
            found = cut_layers(profile, placement, limits=limits)
        assert every.exact
        assert found.load == pytest.approx(every.load) if found.exact else not found.fits


def test_branch_and_bound_goes_deeper_than_the_interpreter_recurses() -> None:
    placement = ps.Placement.looped(2, sys.getrecursionlimit())
    layers = [ps.Layer(f=1.0 + place % 3, i=1.0, w=1.0) for place in range(placement.stages + 2)]
    cutting = Cutting(LayerRuns(ps.Profile(layers)), placement, (False,) * placement.stages, None, ())
    start = np.array([*range(placement.stages), len(layers)], dtype=np.int64)  # the last stage has three layers
    best, _ = cut._branch_and_bound(cutting, start)
    assert len(best) == placement.stages + 1
    assert (np.diff(best) > 0).all()
    assert cutting.loads(best[None, :]).max() < cutting.loads(start[None, :]).max()
