"""Drift of a rank against its own past: planted changes are found once, where they are; noise is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from penstock.runtime import Drift
from penstock.runtime.measure.drift import WARM_UP, WINDOW, DriftWatch

RANKS, STEPS = 4, 200
BASE = 0.010


@dataclass
class Seconds:
    """How a rank spent a step."""

    forward: float = BASE
    backward: float = 2 * BASE
    overlapped: float = 0.0
    waits: dict[int, float] = field(default_factory=dict)


Change = Callable[[int, list[Seconds]], None]


def jitter(step: int, source: random.Random, noise: Callable[[random.Random], float]) -> list[Seconds]:
    """One step of four ranks whose times all jitter; each waits for its neighbours."""
    ranks = [Seconds(BASE * noise(source), 2 * BASE * noise(source)) for _ in range(RANKS)]
    for rank, seconds in enumerate(ranks):
        seconds.waits = {peer: 0.5 * BASE * noise(source) for peer in (rank - 1, rank + 1) if peer in range(RANKS)}
    return ranks


def normal(source: random.Random) -> float:
    return max(0.2, source.gauss(1.0, 0.15))


def with_spikes(source: random.Random) -> float:
    """Mostly steady, with one step in ten that takes up to twenty times as long."""
    return source.uniform(5, 20) if source.random() < 0.1 else source.uniform(0.97, 1.03)


def two_speeds(source: random.Random) -> float:
    """Two of five steps take twice as long, as with a garbage collection or a page of data that is not cached."""
    return (2.0 if source.random() < 0.4 else 1.0) * source.uniform(0.98, 1.02)


NOISES = [normal, with_spikes, two_speeds]


def watch(change: Change, noise: Callable[[random.Random], float] = normal, seed: int = 0, steps: int = STEPS) -> Iterator[Drift]:
    """Run steps with a change planted, and yield the reports."""
    watching, source = DriftWatch(), random.Random(seed)
    for step in range(1, steps + 1):
        ranks = jitter(step, source, noise)
        change(step, ranks)
        yield from watching.add(step, (8, 64), 4 * BASE, ranks)


def no_change(step: int, ranks: list[Seconds]) -> None:
    pass


@pytest.mark.parametrize("noise", NOISES)
def test_jitter_over_200_steps_is_not_reported(noise: Callable[[random.Random], float]) -> None:
    reports = [str(drift) for seed in range(100) for drift in watch(no_change, noise, seed)]
    assert not reports


@pytest.mark.parametrize("noise", [normal, with_spikes])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_reported_once_with_what_changed(kind: str, noise: Callable[[random.Random], float], seed: int) -> None:
    began, factor = 101, 1.8

    def slow(step: int, ranks: list[Seconds]) -> None:
        if step >= began:
            setattr(ranks[2], kind, factor * getattr(ranks[2], kind))
            ranks[1].waits[2] += 0.8 * BASE
            ranks[3].waits[2] += 0.8 * BASE
            ranks[0].waits[1] += 0.8 * BASE  # who waits for a rank that waits is no news of its own

    (drift,) = watch(slow, noise, seed)
    assert (drift.rank, drift.kind, drift.peer) == (2, kind, None)
    assert abs(drift.since - began) <= 3
    assert began + WINDOW // 2 < drift.step <= began + WINDOW + 5
    assert drift.change == pytest.approx(factor - 1, abs=0.25)
    assert set(drift.waiting) == {1, 3}
    for longer in drift.waiting.values():
        assert longer == pytest.approx(0.8 * BASE, rel=0.4)
    named = "forwards" if kind == "forward" else "backwards"
    assert "rank 2 takes" in str(drift)
    assert f"its {named} since step {drift.since}" in str(drift)
    assert "rank 1 waits" in str(drift)


def test_each_change_is_reported_once_and_so_is_the_way_back() -> None:
    def slow_for_a_while(step: int, ranks: list[Seconds]) -> None:
        if 101 <= step <= 250:
            ranks[0].forward *= 2

    slower, faster = watch(slow_for_a_while, steps=400)
    assert (slower.rank, slower.kind, faster.rank, faster.kind) == (0, "forward", 0, "forward")
    assert abs(slower.since - 101) <= 3
    assert abs(faster.since - 251) <= 3
    assert slower.change == pytest.approx(1, abs=0.2)
    assert faster.change == pytest.approx(-0.5, abs=0.1)


def test_two_ranks_that_change_together_are_both_reported() -> None:
    def both(step: int, ranks: list[Seconds]) -> None:
        if step >= 80:
            ranks[1].forward *= 1.7
            ranks[3].backward *= 1.7

    assert {(drift.rank, drift.kind) for drift in watch(both)} == {(1, "forward"), (3, "backward")}


def test_a_rank_that_waits_longer_while_all_compute_as_before_is_a_slow_link() -> None:
    def slow_link(step: int, ranks: list[Seconds]) -> None:
        if step >= 90:
            ranks[2].waits[1] += 1.5 * BASE
            ranks[3].waits[2] += 0.9 * BASE

    (drift,) = watch(slow_link)
    assert (drift.rank, drift.kind, drift.peer) == (2, "waiting", 1)
    assert abs(drift.since - 90) <= 3
    assert drift.after - drift.before == pytest.approx(1.5 * BASE, rel=0.15)
    assert "for rank 1 since step" in str(drift)
    assert "compute times of all ranks have stayed" in str(drift)


def test_a_change_too_small_to_matter_is_not_reported() -> None:
    def slightly(step: int, ranks: list[Seconds]) -> None:
        if step >= 80:
            ranks[1].forward *= 1.08

    assert not list(watch(slightly, lambda source: source.uniform(0.999, 1.001)))


def test_steps_of_another_shape_are_compared_with_their_own() -> None:
    """Every third step has twice the microbatches, and takes twice as long."""
    watching, source = DriftWatch(), random.Random(1)
    for step in range(1, 301):
        ranks, shape = jitter(step, source, normal), (8, 64)
        if step % 3 == 0:
            shape = (16, 128)
            ranks = [Seconds(2 * each.forward, 2 * each.backward, 0.0, each.waits) for each in ranks]
        assert not watching.add(step, shape, 4 * BASE, ranks)


def test_slow_first_steps_are_not_a_reference() -> None:
    def warm_up(step: int, ranks: list[Seconds]) -> None:
        if step <= WARM_UP:
            for seconds in ranks:
                seconds.forward *= 50

    assert not list(watch(warm_up))
