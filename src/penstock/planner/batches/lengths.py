"""Costs of samples by their lengths: a part that grows with the length, and a part of attention that grows with its square."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from penstock.errors import CostsError
from penstock.text.units import check_number

LONGEST = 1 << 40
"""The most tokens of a sample: far more than any has, and few enough for the numbers to stay exact."""

MicrobatchLengths = int | Sequence[int]
"""The tokens of one sample, or of each sample that is packed into a microbatch."""


@dataclass(frozen=True)
class LengthCosts:
    """The time of samples as a multiple of the time of one sample of `sequence` tokens.

    >>> LengthCosts(1024, quadratic=0.5).of([2048])
    3.0
    >>> LengthCosts(1024, quadratic=0.5).of([1024, 1024])
    2.0
    """

    sequence: int
    """The length that counts as 1."""
    quadratic: float = 0.0
    """The share of that sample's time that grows with the square of the length; the rest grows with the length."""

    def __post_init__(self) -> None:
        check_length(self.sequence, "sequence")
        object.__setattr__(self, "quadratic", check_number("quadratic", self.quadratic))
        if self.quadratic > 1:
            raise CostsError(f"quadratic must be a share of the time from 0 to 1, got {self.quadratic:g}")

    def of(self, lengths: Sequence[int]) -> float:
        """The time of these samples. The sums are whole numbers, so that no machine rounds them differently."""
        tokens, squares = sum(lengths), sum(length * length for length in lengths)
        return (1 - self.quadratic) * tokens / self.sequence + self.quadratic * squares / self.sequence**2


def check_length(value: Any, name: str) -> int:
    """Return a number of tokens as an `int`; refuse anything but a whole number from 1 to `LONGEST`."""
    try:
        length = int(value)
    except (TypeError, ValueError, OverflowError):
        length = 0
    if isinstance(value, bool) or length != value or length < 1:
        raise CostsError(f"{name} must be a whole number of tokens, at least 1, got {value!r}")
    if length > LONGEST:
        raise CostsError(f"{name} must be a number of tokens up to {LONGEST}, got one of {len(str(length))} digits")
    return length


def read_lengths(lengths: Any) -> list[tuple[int, ...]]:
    """Return the samples' lengths of each microbatch; a single number is a microbatch of one sample."""
    microbatches = [_read_microbatch(value, f"lengths[{index}]") for index, value in enumerate(_as_list(lengths, "lengths"))]
    if not microbatches:
        raise CostsError("lengths of 0 microbatches: give the lengths of at least 1")
    return microbatches


def _read_microbatch(value: Any, name: str) -> tuple[int, ...]:
    if not hasattr(value, "__len__"):
        return (check_length(value, name),)
    samples = tuple(check_length(length, f"{name}[{sample}]") for sample, length in enumerate(_as_list(value, name)))
    if not samples:
        raise CostsError(f"{name} is empty: a microbatch has at least 1 sample")
    return samples


def _as_list(value: Any, name: str) -> list[Any]:
    """A sequence, array or tensor as a list."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(listed, (str, bytes, Mapping, Set)) or not hasattr(listed, "__len__"):
        raise CostsError(f"{name} must be a sequence, got {type(value).__name__}")
    return list(listed)
