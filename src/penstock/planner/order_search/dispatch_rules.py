"""Dispatch rules for list scheduling, and the search for good ones: a set of usual rules, then small changes to the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np

from penstock.ir.rows import Floats, Ints
from penstock.planner.budget import SearchBudget
from penstock.planner.order_search.dispatch import DispatchRule
from penstock.planner.order_search.evaluator import Evaluator, Order
from penstock.planner.order_search.flat_problem import Flags, FlatProblem

_DEPTHS = ((9.0, 9.0), (1.0, 0.2), (1.0, 0.5), (0.8, 0.3), (0.7, 0.5), (0.6, 0.6), (1.2, 0.1), (0.9, 0.9))
"""Shares of the memory's capacity that the first and the last stage may have in flight, linear in between."""
_MANNERS = ((0.0, 0.0), (0.6, 0.6), (0.0, 0.6), (0.3, 0.3))
"""Overruns and patiences."""
_SHARES = (0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Overruns and patiences to draw from."""
_DRAWN = 200
"""Rules drawn at random besides the usual ones."""
_KEPT = 3
"""Rules that are improved further."""
_HEAT = 0.3
"""The loss accepted at first when a rule is changed, as a share of a node's time."""


@dataclass(frozen=True)
class DispatchRules:
    """The rules for one problem."""

    flat: FlatProblem

    @cached_property
    def pace(self) -> float:
        """Mean time of a rank per microbatch."""
        return float(np.sum(self.flat.duration)) / (self.flat.ranks * self.flat.microbatches)

    @cached_property
    def usual(self) -> float:
        """Mean time of a node."""
        return float(np.mean(self.flat.duration)) or 1.0

    @cached_property
    def _way(self) -> Floats:
        """When each kind and stage would run for a microbatch alone."""
        stages = self.flat.stages
        times = np.reshape(self.flat.duration, (3 * stages, -1)).mean(axis=1) + np.reshape(self.flat.travel, (3 * stages, -1)).mean(axis=1)
        way = np.concatenate((times[:stages], times[stages : 2 * stages][::-1]))
        begins = np.concatenate(([0.0], np.cumsum(way)[:-1]))
        inputs = begins[stages:][::-1]
        return np.concatenate((begins[:stages], inputs, inputs + times[stages : 2 * stages]))

    @cached_property
    def _bases(self) -> list[Floats]:
        """I first, F first, or the older microbatch first; among forwards the deeper, the shallower or the older one."""
        stages, big = self.flat.stages, 4 * self.pace * self.flat.microbatches
        deep = np.arange(stages) * big
        way = self._way.copy()
        way[2 * stages :] += 100 * big * stages
        bases = []
        for forward, backward in (
            (-deep * 0.01, -big),
            (0.0, -big),
            (deep, -big),
            (-big - deep, 0.0),
            (-big + deep * 0.01, 0.0),
            (0.0, 0.0),
            (0.0, -float(self._way.max()) / 2),
        ):
            base = way.copy()
            base[:stages] += forward
            base[stages : 2 * stages] += backward
            bases.append(base)
        return bases

    @cached_property
    def _room(self) -> Floats:
        """How many activations of each stage its rank's memory holds."""
        flat = self.flat
        rank = np.reshape(flat.rank, (3, flat.stages, -1))[0, :, 0]
        size = np.reshape(flat.activation, (flat.stages, -1)).max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(size > 0, np.asarray(flat.limit)[rank] / size, np.inf)
        return np.minimum(room, flat.microbatches)

    def _draw_counts(self, first: float, last: float) -> Ints:
        """Microbatches of each stage, as shares of what memory holds."""
        share = np.linspace(first, last, self.flat.stages)
        return np.clip(np.round(self._room * share), self.flat.slices, self.flat.microbatches).astype(np.int64)

    def _build_rule(self, base: Floats, counts: Ints, under_way: bool, overrun: float, patience: float) -> DispatchRule:
        """A rule that limits the microbatches in flight, or the forwards ahead of the first backward."""
        free = np.full(self.flat.stages, self.flat.microbatches, dtype=np.int64)
        return DispatchRule(base, self.pace, counts if under_way else free, free if under_way else counts, overrun, patience)

    def list_usual(self) -> Iterator[DispatchRule]:
        """The usual rules."""
        for base, depths, under_way, manner in product(self._bases, _DEPTHS, (False, True), _MANNERS):
            yield self._build_rule(base, self._draw_counts(*depths), under_way, *manner)

    def draw_rule(self, chance: np.random.Generator) -> DispatchRule:
        """A random rule of the same kind as the usual ones."""
        first = chance.uniform(0.2, 1.3)
        counts = self._draw_counts(first, first * chance.random())
        manner = [float(share) for share in chance.choice(_SHARES, 2)]
        return self._build_rule(self._bases[chance.integers(len(self._bases))], counts, bool(chance.random() < 0.3), *manner)

    def change(self, rule: DispatchRule, chance: np.random.Generator) -> DispatchRule:
        """The rule with one or two small changes."""
        changed = self._change(rule, chance)
        return self._change(changed, chance) if chance.random() < 0.3 else changed

    def _change(self, rule: DispatchRule, chance: np.random.Generator) -> DispatchRule:
        what = chance.random()
        if what < 0.5:
            return rule._replace(base=self._change_base(rule.base, chance))
        if what < 0.7:
            return rule._replace(ahead=self._change_counts(rule.ahead, chance))
        if what < 0.9:
            return rule._replace(most=self._change_counts(rule.most, chance))
        share = float(chance.choice(_SHARES))
        return rule._replace(overrun=share) if what < 0.95 else rule._replace(patience=share)

    def _change_counts(self, counts: Ints, chance: np.random.Generator) -> Ints:
        low, high = self._draw_range(chance)
        changed = counts.copy()
        changed[low:high] += chance.choice((-1, 1))
        return np.clip(changed, self.flat.slices, self.flat.microbatches)

    def _change_base(self, base: Floats, chance: np.random.Generator) -> Floats:
        """Shift the priorities of one kind on some stages; or move those of W to soon after its I."""
        stages, changed = self.flat.stages, base.copy()
        low, high = self._draw_range(chance)
        kind = chance.integers(3)
        here = slice(kind * stages + low, kind * stages + high)
        if kind == 2 and chance.random() < 0.5:
            changed[here] = base[stages + low : stages + high] + chance.uniform(0, 3) * self.pace
        else:
            changed[here] += chance.normal() * self.usual * chance.choice((0.3, 1.0, 3.0, 10.0, 30.0))
        return changed

    def _draw_range(self, chance: np.random.Generator) -> tuple[int, int]:
        """One stage with probability one half, else several."""
        low = int(chance.integers(self.flat.stages))
        return (low, low + 1) if chance.random() < 0.5 else (low, low + 1 + int(chance.integers(self.flat.stages - low)))


@dataclass
class RuleTrack:
    """A rule that is changed repeatedly, and the best order that it gave."""

    rule: DispatchRule
    full: Flags
    objective: float
    best_rule: DispatchRule
    best: Order


@dataclass
class RuleSearch:
    """Searches dispatch rules for one problem. `least` is a bound: an order that reaches it ends the search."""

    evaluator: Evaluator
    budget: SearchBudget
    chance: np.random.Generator
    least: float = 0.0
    tracks: list[RuleTrack] = field(default_factory=list)

    @property
    def orders(self) -> list[Order]:
        """The best order of each track, the best first."""
        return sorted((track.best for track in self.tracks), key=lambda order: order.objective)

    def begin(self, most: int = 100_000) -> None:
        """Try the usual rules and some random ones; keep the best with different objectives. None is kept if no rule fits the memory."""
        rules = DispatchRules(self.evaluator.flat)
        todo = [(rule, full) for rule in rules.list_usual() for full in self._list_fulls()]
        todo += [(rules.draw_rule(self.chance), full) for _ in range(_DRAWN) for full in self._list_fulls()]
        by_objective: dict[float, tuple[DispatchRule, Flags]] = {}
        worst = math.inf
        for index in self.chance.permutation(len(todo))[:most].tolist():
            rule, full = todo[index]
            objective = self._time(rule, full, worst)
            if 0 <= objective < math.inf and objective not in by_objective:
                by_objective[objective] = rule, full
                worst = sorted(by_objective)[_KEPT - 1] if len(by_objective) >= _KEPT else math.inf
            if self._is_done(objective) or (self.budget.over and (by_objective or objective < 0)):
                break
        for objective in sorted(by_objective)[:_KEPT]:
            self._add(*by_objective[objective])

    def take_over(self, others: list[RuleTrack]) -> None:
        """Start from the rules of tracks that were found for fewer microbatches."""
        microbatches = self.evaluator.flat.microbatches
        for track in others:
            rule, fewer = track.best_rule, len(track.full) // self.evaluator.flat.stages
            counts = [np.where(count >= fewer, microbatches, count) for count in (rule.most, rule.ahead)]
            self._add(rule._replace(most=counts[0], ahead=counts[1]), np.repeat(track.full[::fewer], microbatches))

    def _add(self, rule: DispatchRule, full: Flags) -> None:
        objective = self._time(rule, full)
        if objective >= 0:
            self.tracks.append(RuleTrack(rule, full, objective, rule, Order(self.evaluator.last_order, full, objective, "list")))

    def _list_fulls(self) -> list[Flags]:
        """All backwards split, all full, or both choices if both can be useful."""
        flat = self.evaluator.flat
        fulls = [np.zeros(self.evaluator.cells, dtype=np.int8)] if flat.is_split else []
        return fulls + ([np.ones(self.evaluator.cells, dtype=np.int8)] if flat.may_merge or not flat.is_split else [])

    def _time(self, rule: DispatchRule, full: Flags, bound: float = math.inf) -> float:
        self.budget.spend(1)
        return self.evaluator.dispatch(rule, full, bound)

    def _is_done(self, objective: float) -> bool:
        return 0 <= objective <= self.least * (1 + 1e-9)

    def climb(self) -> None:
        """Change the rules in turn; slightly worse rules are accepted too, less and less."""
        rules, begin = DispatchRules(self.evaluator.flat), self.budget.share
        turn = 0
        while self.tracks and not self.budget.over and not self._is_done(min(track.best.objective for track in self.tracks)):
            track = self.tracks[turn % len(self.tracks)]
            turn += 1
            rule = rules.change(track.rule, self.chance)
            left = (self.budget.end - self.budget.share) / max(self.budget.end - begin, 1e-9)
            bound = track.objective + _HEAT * rules.usual * max(left, 0.0) * self.chance.exponential()
            objective = self._time(rule, track.full, bound)
            if 0 <= objective <= bound:
                track.rule, track.objective = rule, objective
                if objective < track.best.objective:
                    track.best_rule, track.best = rule, Order(self.evaluator.last_order, track.full, objective, "list")
