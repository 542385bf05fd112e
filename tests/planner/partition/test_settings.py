"""Scores of all orders of the devices with all partitions."""

from __future__ import annotations

import math
import random

import pytest

import penstock as ps
from penstock.planner.partition.assignment import Orders
from penstock.planner.partition.settings import MOST_SETTINGS, SettingScores
from planner.small_clusters import draw_copied_case, draw_named_case


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["1f1b", "zbv", "chimera", "dualpipe"])
def test_no_schedule_is_faster_than_the_bound_of_its_setting(seed: int, name: str) -> None:
    """Every setting that a schedule fits in is listed, and simulated it takes at least what the bound says."""
    chance = random.Random(seed)
    case = draw_copied_case(chance, paired=seed % 2 == 1) if name in {"chimera", "dualpipe"} else draw_named_case(chance)
    placement = ps.schedule(name, len(case.cluster), case.microbatches).placement
    if placement.stages > len(case.profile):
        pytest.skip("more stages than layers")
    scores = SettingScores(case.profile, placement, case.cluster, case.microbatches, (False,) * placement.stages, case.limits)
    bounds = {(setting.assignment.devices, setting.sizes): setting.bound for setting in scores.list_best(10_000)}
    assert len(bounds) <= scores.count
    orders = Orders(case.cluster, placement, case.limits)
    for time, problem in case.list_timed([name]):
        assert bounds[orders.rename(problem.devices), problem.sizes] <= time * (1 + 1e-9)


def test_the_first_setting_is_the_fastest_for_a_pipeline_that_never_waits() -> None:
    """Two microbatches: the fast device takes nearly all layers, because the slow ones would only delay them."""
    model = ps.Profile([ps.Layer(f=1, i=1, w=1)] * 8)
    cluster = ps.Cluster([ps.Device(), ps.Device(speed=4.0), ps.Device()])
    scores = SettingScores(model, ps.Placement.linear(3), cluster, 2, (False,) * 3)
    times = {}
    for setting in scores.list_best(scores.count):
        loads = [
            size * 3 / cluster.devices[device].speeds.rate for size, device in zip(setting.sizes, setting.assignment.devices, strict=True)
        ]
        times[setting] = sum(loads) + max(loads)
    assert len(times) == scores.count == 3 * 21
    assert list(times.values()) == sorted(times.values())
    assert next(iter(times)).sizes[next(iter(times)).assignment.devices.index(1)] == 6


def test_there_is_an_end_to_what_is_scored() -> None:
    cluster = ps.Cluster([ps.Device(speed=speed) for speed in (1.0, 2.0, 3.0, 4.0)])
    scores = SettingScores(ps.Profile([ps.Layer(f=1, i=1, w=1)] * 40), ps.Placement.linear(4), cluster, 2, (False,) * 4)
    assert scores.count == 24 * math.comb(39, 3) > MOST_SETTINGS
    assert scores.list_best(10) == []
