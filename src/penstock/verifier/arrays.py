"""Small array helpers that several rules share."""

from __future__ import annotations

import numpy as np

from penstock.ir.rows import Ints


def first_of(keys: Ints, entries: Ints, size: int) -> Ints:
    """A table of the first entry of each key, -1 where there is none."""
    table = np.full(size, -1, dtype=np.int64)
    table[keys[::-1]] = entries[::-1]
    return table


def position_in(keys: Ints) -> Ints:
    """For each value of a sorted array, how many equal ones come before it."""
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, dtype=np.int64)
    return np.arange(len(keys)) - np.repeat(starts, np.diff(np.append(starts, len(keys))))


def repeated(keys: Ints, entries: Ints) -> tuple[Ints, Ints]:
    """The entries whose key an earlier entry has, and for each the first that has it."""
    order = np.argsort(keys, kind="stable")
    place = position_in(keys[order])
    again = np.flatnonzero(place)
    return entries[order[again]], entries[order[again - place[again]]]
