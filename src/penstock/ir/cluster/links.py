"""Links between pairs of ranks: tables of latency, bandwidth and shared lanes, one row per sender and one column per receiver.

A *lane* is what messages queue for: a network card's way out, say. Every message occupies an out lane and an in lane while it travels; they
may be the same. Values on the diagonal mean nothing, because a rank sends itself no messages; they are kept as 0, unlimited and (0, 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import CostsError
from penstock.text.numbers import format_count
from penstock.text.units import check_number, has_time_unit, parse_rate, parse_time

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Latency = float | tuple[tuple[float, ...], ...]
"""One number, or one per pair of ranks."""
Bandwidth = float | None | tuple[tuple[float | None, ...], ...]
"""The same; None is unlimited."""
Lanes = tuple[tuple[tuple[int, int], ...], ...]
"""The out lane and the in lane of each pair of ranks."""


def check_latency(name: str, value: Any, unit: str | None = None) -> Latency:
    """Give a latency as a number, or as a table of numbers; also from times like "20us" if the other times have a `unit`."""

    def check_time(place: str, time: Any) -> float:
        return check_number(place, time) if unit is None and not has_time_unit(time) else parse_time(time, place, unit)

    return _check_table(name, value, check_time, 0.0) if is_table(value) else check_time(name, value)


def check_bandwidth(name: str, value: Any, text: bool = False) -> Bandwidth:
    """Give a bandwidth as a number, None, or a table of them; with `text`, also from sizes like "50GB". In a table, infinity is None."""

    def check_rate(place: str, rate: Any) -> float | None:
        if rate is None or (isinstance(rate, float) and rate == math.inf and place != name):
            return None
        size = parse_rate(rate, place) if text else check_number(place, rate)
        if not size:
            raise CostsError(
                f"{place} must be more than 0, got {rate}: a link without bandwidth carries no messages; leave out unlimited ones"
            )
        return size

    return _check_table(name, value, check_rate, None) if is_table(value) else check_rate(name, value)


def check_lanes(name: str, value: Any) -> Lanes:
    """Give a table of lanes, numbered anew from 0 in the order in which they appear, so that equal sharing gives equal tables."""
    table = _check_table(name, value, _check_pair, (0, 0))
    numbers: dict[int, int] = {}
    return tuple(
        tuple(
            (0, 0) if row == column else (numbers.setdefault(out, len(numbers)), numbers.setdefault(into, len(numbers)))
            for column, (out, into) in enumerate(pairs)
        )
        for row, pairs in enumerate(table)
    )


def _check_pair(place: str, value: Any) -> tuple[int, int]:
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(type(lane) is int and lane >= 0 for lane in pair):
        raise CostsError(f"{place} must be an out lane and an in lane, two whole numbers of at least 0 like [0, 1], got {value!r}")
    return pair[0], pair[1]


def is_table(value: Any) -> bool:
    """Whether a value is a table rather than one number: a sequence, or an array with dimensions."""
    return (isinstance(value, Sequence) and not isinstance(value, (str, bytes))) or getattr(value, "ndim", 0) > 0


def _check_table(name: str, value: Any, check: Callable[[str, Any], Any], within: Any) -> tuple[tuple[Any, ...], ...]:
    """A square table whose items pass a check; `within` is the value that its diagonal gets."""
    rows = value.tolist() if hasattr(value, "tolist") else value
    if not is_table(rows) or not rows or not all(is_table(row) for row in rows):
        raise CostsError(f"{name} must be a table with one row per sending rank and one value per receiving rank, got {value!r}")
    for source, row in enumerate(rows):
        if len(row) != len(rows):
            raise CostsError(
                f"{name} has {format_count(len(rows), 'row')}, but row {source} has {format_count(len(row), 'value')}: a row has one value "
                "per rank"
            )
    return tuple(
        tuple(within if source == target else check(f"{name}[{source}][{target}]", item) for target, item in enumerate(row))
        for source, row in enumerate(rows)
    )


def check_ranks(name: str, value: Any, ranks: int) -> None:
    """Refuse a table for another number of ranks."""
    if isinstance(value, tuple) and len(value) != ranks:
        raise CostsError(f"{name} is a table for {len(value)} ranks, but there are {ranks}: give one row and one column per rank")


def permute(value: Any, order: Sequence[int]) -> Any:
    """A table with its rows and columns in another order: `order[k]` is the rank that becomes rank k. One number stays as it is."""
    return tuple(tuple(value[source][target] for target in order) for source in order) if isinstance(value, tuple) else value


def as_array(value: Latency | Bandwidth) -> NDArray[np.float64]:
    """A latency or bandwidth as an array, unlimited as infinity."""
    import numpy as np

    if isinstance(value, tuple):
        return np.array([[math.inf if item is None else item for item in row] for row in value], dtype=np.float64)
    return np.array(math.inf if value is None else value, dtype=np.float64)
