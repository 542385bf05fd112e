"""Plans that share a vocabulary out over devices of different speeds and memory, against every way to do it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product
from typing import Any

import pytest

import penstock as ps
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from penstock.planner.profile.vocabulary import spread_ends

PARTS = 6
"""Rows are shared out in so many equal parts."""


@dataclass(frozen=True)
class Case:
    """A small model with a large head, on two or three devices."""

    profile: ps.Profile
    cluster: ps.Cluster
    microbatches: int

    @classmethod
    def draw(cls, chance: random.Random, limited: bool) -> Case:
        ranks = chance.choice((2, 3))

        def draw_layer(least: int, most: int) -> ps.Layer:
            times = {name: float(chance.randint(least, most)) for name in "fiw"}
            size = float(chance.randint(least, most)) if limited else 0.0
            return ps.Layer(**times, activation=size, weight_stash=size / 2, output=1.0, parameters=size, gradients=size)

        layers = [replace(draw_layer(0, 1), i=0.0), *(draw_layer(1, 3) for _ in range(ranks + 1)), draw_layer(6, 12)]
        speeds: list[Any] = [1.0, 2.0, 0.5, {"f": 2.0, "i": 1.0, "w": 0.5}]
        static = 2 * sum(layer.static for layer in layers) / ranks
        devices = [
            ps.Device(speed=chance.choice(speeds), memory=chance.choice((0.9, 1.2, 2.0)) * static if limited else None)
            for _ in range(ranks)
        ]
        latency = [[chance.choice((0.0, 0.5)) for _ in devices] for _ in devices]
        return cls(ps.Profile(layers), ps.Cluster(devices, latency=latency, bandwidth=chance.choice((None, 10.0))), 4)

    @property
    def asked(self) -> dict[str, Any]:
        return {"cluster": self.cluster, "microbatches": self.microbatches, "schedules": ["1f1b", "zb-h1"], "seconds": 0, "near": 0.0}

    def list_problems(self) -> Iterator[Problem]:
        """Every order of the devices with every partition and all rows in equal parts: no rank has no rows."""
        ranks, profile = len(self.cluster), spread_ends(self.profile, len(self.cluster))
        counts = [parts for parts in product(range(1, PARTS), repeat=ranks) if sum(parts) == PARTS]
        inner = combinations(range(2, len(profile) - 1), ranks - 1)
        cuts = [tuple(last - first for first, last in pairwise((0, *cut, len(profile)))) for cut in inner]
        for devices, sizes, parts in product(permutations(range(ranks)), cuts, counts):
            assignment = Assignment(self.cluster, devices).take_rows([part / PARTS for part in parts])
            limits = None if self.cluster.memory_limit is None else assignment.arrange(self.cluster.memory_limit)
            shape = profile, ps.Placement.linear(ranks), self.microbatches, sizes, (False,) * ranks
            yield Problem.cut(*shape, limits, True, True, (), assignment)

    def find_best(self) -> float:
        """The least time of either schedule with its vocabulary spread, of those that fit."""
        best = float("inf")
        for name in ("1f1b", "zb-h1"):
            plain = ps.schedule(name, len(self.cluster), self.microbatches)
            for problem in self.list_problems():
                if problem.work < best:
                    timeline = problem.evaluate(ps.spread_vocabulary(plain, problem.costs))
                    best = min(best, problem.objective(timeline)) if problem.fits(timeline) else best
        return best
