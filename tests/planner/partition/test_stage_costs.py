"""Costs of the stages of a partition, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.planner.partition.assignment import Assignment
from penstock.planner.partition.stage_costs import reserves, sliced_stage_costs, stage_costs
from penstock.planner.problem import Problem
from planner.sliced_models import random_lengths, random_model

A = ps.Layer(f=1, i=2, w=3, activation=10, weight_stash=4, output=2, parameters=100, gradients=50, optimizer=25)
B = ps.Layer(f=2, i=1, w=0, activation=20, weight_stash=1, output=3)
C = ps.Layer(f=4, i=4, w=4, activation=6, weight_stash=6, output=9, parameters=8)


def test_a_stage_costs_what_its_layers_do():
    profile = ps.Profile([A, B, C], latency=0.5, bandwidth=7, input=1)
    costs = stage_costs(profile, (2, 1), ps.Placement.linear(2), (False, False))
    assert costs == ps.Costs(
        f=[3, 4], i=[3, 4], w=[3, 4], activation=[30, 6], weight_stash=[5, 6], output=[3, 9], parameters=[175, 8], latency=0.5, bandwidth=7
    )


def test_a_stage_takes_as_long_as_on_its_device():
    """Stages 0 and 3 are on rank 0, 1 and 2 on rank 1; a second forward runs at the speed of forwards."""
    profile = ps.Profile([A, B, C, A], latency=9)
    cluster = ps.Cluster([ps.Device(speed=2), ps.Device(speed={"f": 0.5, "i": 1, "w": 4})], latency=[[0, 1], [2, 0]], bandwidth=5)
    costs = stage_costs(profile, (1, 1, 1, 1), ps.Placement.v(2), (False, True, False, False), cluster)
    assert (costs.f, costs.i, costs.w) == ((0.5, 4, 8, 0.5), (1, 1 + 4, 4, 1), (1.5, 0, 1, 1.5))
    assert (costs.latency, costs.bandwidth) == (((0, 1), (2, 0)), 5)
    assert costs.activation == (10, 2, 6, 10)


def test_copies_of_the_model_take_as_long_as_on_their_own_devices():
    """Even microbatches run on ranks 0 and 1, odd ones the other way round; memory does not depend on the device."""
    profile = ps.Profile([replace(A, update=3.0), replace(B, update=1.0), C])
    cluster = ps.Cluster([ps.Device(speed=2), ps.Device(speed={"f": 0.5, "i": 1, "w": 4, "optimizer": 0.5})])
    placement, even = ps.Placement.bidirectional(2), stage_costs(profile, (2, 1), ps.Placement.linear(2), (False, True))
    costs = stage_costs(profile, (2, 1), placement, (False, True), cluster, microbatches=3)
    assert costs.f == ((1.5, 6, 1.5), (8, 2, 8))
    assert costs.i == ((1.5, 3, 1.5), (4 + 8, 2 + 2, 4 + 8))  # the second stage runs its forward again
    assert costs.w == ((1.5, 0.75, 1.5), (1, 2, 1))
    assert (costs.activation, costs.output) == (even.activation, even.output)
    assert costs.optimizer == (8, 0)  # on the slower device
    short = Problem.cut(profile, placement, 4, (2, 1), (False, True), assignment=Assignment(cluster, (0, 1))).shorten(1)
    assert short.costs.f == ((1.5,), (8,))


def test_speeds_may_be_those_of_each_layer():
    """What was measured on a device is what it takes there."""
    profile = ps.Profile([A, B, C])
    measured = ps.Profile([ps.Layer(f=3, i=3, w=1), ps.Layer(f=1, i=4, w=0), ps.Layer(f=8, i=1, w=2)])
    device = ps.Device(speed=profile.compare_speeds(measured))
    for own, wanted in zip(profile.on(device).layers, measured.layers, strict=True):
        assert (own.f, own.i, own.w) == pytest.approx((wanted.f, wanted.i, wanted.w))
    costs = stage_costs(profile, (2, 1), ps.Placement.linear(2), (False, False), ps.Cluster([device, ps.Device()]))
    assert costs.f == pytest.approx((4, 4))
    with pytest.raises(ps.PenstockError, match="speeds for 3 layers, but the model has 2"):
        ps.Profile([A, B]).on(device)
    with pytest.raises(ps.PenstockError, match=r"2 layers .* and of 3 layers .* cannot be compared"):
        ps.Profile([A, B]).compare_speeds(measured)


def test_recompute_runs_the_forward_again_and_keeps_the_input():
    profile = ps.Profile([A, B, C], input=1)
    placement = ps.Placement.linear(2)
    costs = stage_costs(profile, (1, 2), placement, (True, True))
    assert costs.i == (1 + 2, 6 + 5)
    assert costs.activation == (1, 2)
    assert reserves(profile, (1, 2), placement, (True, True)) == [10 - 1, 26 - 2]
    assert costs.parameters == (175 + 9, 8 + 24)
    one_rank = ps.Placement.looped(1, 2)
    assert reserves(profile, (1, 2), one_rank, (True, True)) == [24]  # only one of them at a time
    assert stage_costs(profile, (1, 2), one_rank, (True, False)).parameters == (175 + 9, 8)


def test_a_stage_may_hold_its_output_too():
    profile = ps.Profile([A, B, C], input=1, keeps_output=True)
    assert stage_costs(profile, (1, 2), ps.Placement.linear(2), (False, False)).activation == (10 + 2, 26)
    assert stage_costs(profile, (1, 2), ps.Placement.linear(2), (True, True)).activation == (1 + 2, 2)


def test_two_copies_exchange_their_gradients():
    profile = ps.Profile([A, C], latency=0.5, bandwidth=10)
    assert stage_costs(profile, (1, 1), ps.Placement.bidirectional(2), (False, False)).reduce == (5.5, 0.5)
    assert stage_costs(profile, (1, 1), ps.Placement.linear(2), (False, False)).reduce == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_stages_on_slices_cost_what_each_slice_costs_as_a_microbatch(seed):
    chance = np.random.default_rng(seed)
    profile, placement, lengths = random_model(chance, layers=7), ps.schedule("zbv", 2, 1).placement, random_lengths(chance, 96, 3)
    sizes, recompute = (2, 1, 3, 1), tuple((chance.uniform(size=4) < 0.5).tolist())
    cluster = ps.Cluster([ps.Device(speed=2), ps.Device(speed={"f": 0.5, "i": 1, "w": 3})]) if seed % 2 else None
    costs = sliced_stage_costs(profile, sizes, placement, recompute, lengths, microbatches=2, cluster=cluster)
    parts = [stage_costs(part, sizes, placement, recompute, cluster) for part in profile.cut_sequence(lengths)]
    for name in ("f", "i", "w", "activation", "weight_stash", "kept", "output"):
        for stage in range(4):
            values = [costs.of_stage(name, stage, unit) for unit in range(6)]
            assert values == pytest.approx([part.of_stage(name, stage) for part in parts] * 2), name
    spare = [reserves(part, sizes, placement, recompute) for part in profile.cut_sequence(lengths)]
    assert reserves(profile, sizes, placement, recompute, lengths) == pytest.approx(np.max(spare, axis=0).tolist())
