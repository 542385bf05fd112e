"""Costs of a slice of the sequence on a layer, from its length and the tokens before it, and how they are fitted to measurements.

A slice of n tokens after a prefix of p costs

    fixed + token n + pair n (p + n/2) + prefix p

`fixed` is what every slice costs, whatever its length. `token` is the part of each token by itself. `pair` is causal attention: each token
of the slice meets the p tokens before the slice and, on average, half of the slice. `prefix` is what is done or held for each token of
the prefix, such as a copy of its keys and values.

However a sequence of T tokens is cut, the pairs of its slices add up to T^2/2. So the work of a microbatch depends on the number of its
slices, by the fixed part alone, and not on their lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import CostsError
from penstock.ir.formats.reading import check_record
from penstock.ir.rows import Floats
from penstock.text.units import parse_size

TERMS = ("fixed", "token", "pair", "prefix")
TIME_TERMS = TERMS[:3]
"""Terms of a time."""
_TIMES = ("f", "i", "w")
_COSTS = (*_TIMES, "activation", "weight_stash", "workspace")
_PER_TOKEN = ("keys", "key_gradients")
SUM_BYTES = 4
"""Gradients of keys and values with fewer bytes per number are summed over slices in so many."""


@dataclass(frozen=True)
class SliceCost:
    """A time or size of a slice.

    >>> SliceCost(fixed=1.0, token=0.5, pair=0.25).at(length=4, prefix=8)
    13.0
    """

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    prefix: float = 0.0

    def __post_init__(self) -> None:
        for name in TERMS:
            object.__setattr__(self, name, parse_size(getattr(self, name), name))

    def at(self, length: Any, prefix: Any) -> Any:
        """The cost of a slice; of many at once if both are arrays."""
        return self.fixed + self.token * length + self.pair * length * (prefix + length / 2) + self.prefix * prefix

    def scaled(self, factor: float) -> SliceCost:
        return SliceCost(*(factor * getattr(self, name) for name in TERMS))

    def __add__(self, other: SliceCost) -> SliceCost:
        return SliceCost(*(getattr(self, name) + getattr(other, name) for name in TERMS))

    def to_json(self) -> dict[str, float]:
        """The terms that are not 0."""
        return {name: getattr(self, name) for name in TERMS if getattr(self, name)}


@dataclass(frozen=True, kw_only=True)
class SliceCosts:
    """The costs of a slice on one layer. A `SliceCost` may be given as a table of its terms, as it is written in files."""

    f: SliceCost
    i: SliceCost
    w: SliceCost
    activation: SliceCost = SliceCost()
    """Held from a slice's F to its I, without its keys and values."""
    weight_stash: SliceCost = SliceCost()
    """Held from a slice's I to its W."""
    workspace: SliceCost = SliceCost()
    """Extra memory while one of its actions runs."""
    keys: float = 0.0
    """Keys and values per token, which later slices read. Held on the device until the backward of the first slice, also if the slice is
    recomputed or its activation is moved to the host."""
    key_gradients: float = 0.0
    """The sum of their gradients per token, which the backwards of later slices add to."""
    error: float = 0.0
    """The largest difference between a measured time of F, I and W together and the fitted one, as a share of the measured time."""

    def __post_init__(self) -> None:
        for name in _COSTS:
            value = getattr(self, name)
            if isinstance(value, SliceCost):
                continue
            check_record(value, SliceCost, f"{name} of a slice", error=CostsError)
            try:
                object.__setattr__(self, name, SliceCost(**value))
            except CostsError as error:
                raise CostsError(f"{name} of a slice: {error}") from None
        for name in (*_PER_TOKEN, "error"):
            object.__setattr__(self, name, parse_size(getattr(self, name), name))

    def scaled(self, factor: float) -> SliceCosts:
        """The same layer at a microbatch size `factor` times as large, assuming proportional growth."""
        costs: dict[str, Any] = {name: getattr(self, name).scaled(factor) for name in _COSTS}
        return replace(self, **costs, **{name: factor * getattr(self, name) for name in _PER_TOKEN})

    def at_speed(self, f: float, i: float, w: float) -> SliceCosts:
        """The same layer on a device that is so many times as fast in each kind of action."""
        return replace(self, f=self.f.scaled(1 / f), i=self.i.scaled(1 / i), w=self.w.scaled(1 / w))

    def to_json(self) -> dict[str, Any]:
        costs = {name: getattr(self, name).to_json() for name in _COSTS}
        numbers = {name: getattr(self, name) for name in (*_PER_TOKEN, "error") if getattr(self, name)}
        return {name: value for name, value in costs.items() if value or name in _TIMES} | numbers

    @classmethod
    def from_json(cls, data: Any) -> SliceCosts:
        return cls(**check_record(data, cls, "slices of a layer", error=CostsError))


def list_prefixes(lengths: Sequence[int]) -> list[int]:
    """The tokens before each slice.

    >>> list_prefixes([4, 3, 2])
    [0, 4, 7]
    """
    return [0, *accumulate(lengths[:-1])]


# Fitting --------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A measured slice."""

    length: int
    prefix: int
    value: float


def fit_slice_cost(points: Iterable[Point], terms: Sequence[str] = TIME_TERMS) -> tuple[SliceCost, float]:
    """The cost that comes nearest to measured ones by least squares of relative differences, no term below 0; and the largest difference.

    The best fit is the plain least-squares fit on the terms that are not 0 in it, so every set of terms is tried.

    >>> cost, error = fit_slice_cost([Point(1, 0, 3.0), Point(2, 0, 4.0), Point(4, 0, 6.0), Point(2, 2, 4.0)])
    >>> round(cost.fixed, 9), round(cost.token, 9), round(cost.pair, 9), round(error, 9)
    (2.0, 1.0, 0.0, 0.0)
    """
    measured = list(points)
    if not measured:
        raise CostsError("a slice cost cannot be fitted to no measurements: measure at least one slice")
    length, prefix, value = np.array(measured, dtype=np.float64).T
    weight = np.where(value > 0, 1 / np.where(value > 0, value, 1.0), 1 / max(float(value.max()), 1e-300))
    columns = {name: SliceCost(**{name: 1.0}).at(length, prefix) * np.ones(len(value)) * weight for name in terms}
    best, least = SliceCost(), float(((value * weight) ** 2).sum())
    for count in range(1, len(terms) + 1):
        for chosen in combinations(terms, count):
            matrix = np.column_stack([columns[name] for name in chosen])
            scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)  # pairs are many orders of magnitude more than tokens
            solution = np.linalg.lstsq(matrix / scale, value * weight, rcond=None)[0] / scale
            squares = float(((matrix @ solution - value * weight) ** 2).sum())
            if (solution >= 0).all() and squares < least - 1e-18 * len(value):
                best, least = SliceCost(**dict(zip(chosen, solution.tolist(), strict=True))), squares
    fitted: Floats = best.at(length, prefix)
    return best, float((np.abs(fitted - value) * weight).max())
