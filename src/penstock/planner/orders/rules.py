"""Rules for list scheduling: a first lot that covers the usual ones, and small changes to a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.orders.dispatch import Rule
from penstock.planner.orders.shop import Floats, Shop

_DEPTHS = ((9.0, 9.0), (1.0, 0.2), (1.0, 0.5), (0.8, 0.3), (0.7, 0.5), (0.6, 0.6), (1.2, 0.1), (0.9, 0.9))
"""Shares of what memory holds that the first and the last stage may have under way; a line between."""
_MANNERS = ((0.0, 0.0), (0.6, 0.6), (0.0, 0.6), (0.3, 0.3))
"""Overruns and patiences."""


@dataclass(frozen=True)
class Rules:
    """The rules for one shop."""

    shop: Shop

    @cached_property
    def pace(self) -> float:
        """What one microbatch takes of a rank's time."""
        return float(np.sum(self.shop.duration)) / (self.shop.ranks * self.shop.microbatches)

    @cached_property
    def usual(self) -> float:
        """What a node takes."""
        return float(np.mean(self.shop.duration)) or 1.0

    @cached_property
    def _way(self) -> Floats:
        """When each kind and stage would run for a microbatch alone."""
        stages = self.shop.stages
        times = np.reshape(self.shop.duration, (3 * stages, -1)).mean(axis=1) + np.reshape(self.shop.travel, (3 * stages, -1)).mean(axis=1)
        way = np.concatenate((times[:stages], times[stages : 2 * stages][::-1]))
        begins = np.concatenate(([0.0], np.cumsum(way)[:-1]))
        inputs = begins[stages:][::-1]
        return np.concatenate((begins[:stages], inputs, inputs + times[stages : 2 * stages]))

    @cached_property
    def _bases(self) -> list[Floats]:
        """I first, F first, or the older microbatch; of the forwards the deeper, the shallower or the older one."""
        stages, big = self.shop.stages, 4 * self.pace * self.shop.microbatches
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
            made = way.copy()
            made[:stages] += forward
            made[stages : 2 * stages] += backward
            bases.append(made)
        return bases

    @cached_property
    def _room(self) -> Floats:
        """How many activations of each stage its rank's memory holds."""
        shop = self.shop
        rank = np.reshape(shop.rank, (3, shop.stages, -1))[0, :, 0]
        size = np.reshape(shop.activation, (shop.stages, -1)).max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(size > 0, np.asarray(shop.limit)[rank] / size, np.inf)
        return np.minimum(room, shop.microbatches)

    def _counts(self, first: float, last: float) -> Ints:
        """So many microbatches of each stage, as shares of what memory holds."""
        share = np.linspace(first, last, self.shop.stages)
        return np.clip(np.round(self._room * share), 1, self.shop.microbatches).astype(np.int64)

    def _rule(self, base: Floats, counts: Ints, under_way: bool, overrun: float, patience: float) -> Rule:
        """A rule that limits the microbatches under way, or the forwards ahead of the first backward."""
        free = np.full(self.shop.stages, self.shop.microbatches, dtype=np.int64)
        return Rule(base, self.pace, counts if under_way else free, free if under_way else counts, overrun, patience)

    def first(self) -> Iterator[Rule]:
        """The usual ones."""
        for base, depths, under_way, manner in product(self._bases, _DEPTHS, (False, True), _MANNERS):
            yield self._rule(base, self._counts(*depths), under_way, *manner)

    def drawn(self, chance: np.random.Generator) -> Rule:
        """Any rule of the kind of the first ones."""
        first = chance.uniform(0.2, 1.3)
        counts = self._counts(first, first * chance.random())
        manner = [float(each) for each in chance.choice(_SHARES, 2)]
        return self._rule(self._bases[chance.integers(len(self._bases))], counts, bool(chance.random() < 0.3), *manner)

    def changed(self, rule: Rule, chance: np.random.Generator) -> Rule:
        """The rule with a small change, or with two."""
        made = self._changed(rule, chance)
        return self._changed(made, chance) if chance.random() < 0.3 else made

    def _changed(self, rule: Rule, chance: np.random.Generator) -> Rule:
        what = chance.random()
        if what < 0.5:
            return rule._replace(base=self._other_base(rule.base, chance))
        if what < 0.7:
            return rule._replace(ahead=self._other_counts(rule.ahead, chance))
        if what < 0.9:
            return rule._replace(most=self._other_counts(rule.most, chance))
        share = float(chance.choice(_SHARES))
        return rule._replace(overrun=share) if what < 0.95 else rule._replace(patience=share)

    def _other_counts(self, counts: Ints, chance: np.random.Generator) -> Ints:
        low, high = self._range(chance)
        made = counts.copy()
        made[low:high] += chance.choice((-1, 1))
        return np.clip(made, 1, self.shop.microbatches)

    def _other_base(self, base: Floats, chance: np.random.Generator) -> Floats:
        """The turns of one kind on some stages shifted; or those of W to soon after its I."""
        stages, made = self.shop.stages, base.copy()
        low, high = self._range(chance)
        kind = chance.integers(3)
        here = slice(kind * stages + low, kind * stages + high)
        if kind == 2 and chance.random() < 0.5:
            made[here] = base[stages + low : stages + high] + chance.uniform(0, 3) * self.pace
        else:
            made[here] += chance.normal() * self.usual * chance.choice((0.3, 1.0, 3.0, 10.0, 30.0))
        return made

    def _range(self, chance: np.random.Generator) -> tuple[int, int]:
        """Half of the time one stage, else several."""
        low = int(chance.integers(self.shop.stages))
        return (low, low + 1) if chance.random() < 0.5 else (low, low + 1 + int(chance.integers(self.shop.stages - low)))


_SHARES = (0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
