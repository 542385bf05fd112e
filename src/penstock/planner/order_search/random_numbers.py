"""A random number generator that runs plain and compiled (Lehmer's)."""

from __future__ import annotations

from penstock.planner.order_search.flat_problem import Column

MODULUS = 2147483647


def draw(state: Column) -> int:
    """The next random number, from 0 up to the modulus."""
    state[0] = state[0] * 48271 % MODULUS
    return int(state[0])
