"""Units of time and size: how times, sizes and bandwidths are read and written."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import CostsError, UsageError

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""The units of time, in seconds, the largest first."""
BYTES = {"B": 1} | {f"{p}{u}": b**n for u, b in (("B", 1000), ("iB", 1024)) for n, p in enumerate("KMGTP", start=1)}
"""The units of size, in bytes."""
LEAST_BYTES = 2**16
"""Fewer bytes of memory, or bytes per second, are never meant: the unit was forgotten."""
_SHOWN, _LARGE = 100, 10**100
"""Characters of a wrong value that an error shows, and whole numbers that it does not show at all."""
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,4}))?\s*([A-Za-z]*)\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


def seconds_per(unit: str) -> float:
    """Give the seconds in one unit of time: s, ms, us or ns."""
    if unit not in SECONDS:
        raise UsageError(f"unit must be one of {', '.join(SECONDS)}, got {unit!r}")
    return SECONDS[unit]


def parse_size(value: float | str, name: str | None = None) -> float:
    """Read a size: a number as it is, or text such as "40GiB" in bytes. `name` says in the error what the size is for.

    >>> parse_size("1.5KiB")
    1536.0
    """
    try:
        return _parse_text(value) if isinstance(value, str) else check_number("a size", value)
    except CostsError as error:
        raise (error if name is None else CostsError(f"{name}: {error}")) from None


def parse_time(value: float | str, name: str, unit: str | None = "s") -> float:
    """Read a time in `unit`: a number as it is, or text with a unit of its own, such as "5us". `name` says in the error what it is for.

    Text with a unit is refused if the other times have none: `unit` is then empty if they may have one (`time_unit`), and None if not.

    >>> parse_time("5us", "latency"), parse_time("5us", "latency", "ms"), parse_time(0.1, "latency", "ms")
    (5e-06, 0.005, 0.1)
    """
    if not isinstance(value, str):
        return check_number(name, value)
    match = _TIME.fullmatch(value)
    if match is None or match[3] not in {"", *SECONDS}:
        raise CostsError(f"{name}: {shorten(value)} is not a time: write a number and one of {', '.join(SECONDS)}, like 5us")
    if not match[3]:
        return check_number(name, float(value))
    if unit is None or unit not in SECONDS:
        hint = "" if unit is None else ", or give the unit of all times as time_unit"
        raise CostsError(f"{name}: {value!r} has a unit, but the other times have none: write a plain number{hint}")
    steps = round(math.log10(SECONDS[match[3]] / SECONDS[unit]))
    return check_number(name, float(f"{match[1]}e{int(match[2] or 0) + steps}"))  # rounded once: "20us" is exactly 2e-5 seconds


def parse_rate(value: float | str, name: str) -> float:
    """Read a bandwidth per unit of time: a number as it is, or text such as "12.5GB" in bytes. `name` says in the error what it is for.

    >>> parse_rate("12.5GB", "bandwidth")
    12500000000.0
    """
    if not isinstance(value, str):
        return check_number(name, value)
    try:
        return parse_size(value)
    except CostsError:
        raise CostsError(
            f"{name}: {shorten(value)} is not a bandwidth: write how many bytes pass per unit of time, as a size like 12.5GB (100 Gbit are "
            "12.5GB)"
        ) from None


def shorten(value: Any) -> str:
    """A wrong value as an error shows it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < _LARGE else "a number of more than 100 digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_number(name: str, value: Any) -> float:
    """Give a finite number of at least 0 as a float; refuse anything else."""
    if type(value) is float and 0 <= value <= sys.float_info.max:
        return value  # the most common by far
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy scalar
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CostsError(f"{name} must be a number, got {shorten(value)}")
    if not 0 <= value <= sys.float_info.max:
        raise CostsError(f"{name} must be a finite number of at least 0, got {shorten(value)}")
    return float(value)


def check_count(name: str, value: Any, least: int = 1, most: int | None = None, *, error: Callable[[str], Exception] = CostsError) -> int:
    """Give a whole number from `least` to `most` as an int; refuse anything else. `error` makes the exception from a sentence."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy scalar
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        until = "" if most is None else f" and at most {most}"
        raise error(f"{name} must be a whole number of at least {least}{until}, got {value!r}")
    return value


def has_byte_unit(size: object) -> bool:
    """Whether a size is written in bytes, like "40GiB"."""
    return isinstance(size, str) and size.rstrip().endswith("B")


def has_time_unit(time: object) -> bool:
    """Whether a time is written with its unit, like "5us"."""
    return isinstance(time, str) and time.rstrip().endswith(tuple(SECONDS))


def _parse_text(text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in {"", *BYTES}:
        meant = _guess_size(text)
        hint = f"did you mean {meant}? " if meant else ""
        raise CostsError(f"{shorten(text)} is not a size: {hint}write a number and one of {', '.join(BYTES)}, like 40GiB")
    return check_number("a size", float(match[1]) * float(BYTES[match[2] or "B"]))


def _guess_size(text: str) -> str | None:
    """The size that was probably meant by a unit in the wrong case or without its B."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None:
        return None
    units = {unit.lower(): unit for unit in BYTES} | {unit.lower().removesuffix("b"): unit for unit in BYTES if len(unit) > 1}
    unit = units.get(match[2].lower()) or units.get(match[2].lower().rstrip("b"))
    return None if unit is None else f"{match[1]}{unit}"


@dataclass(frozen=True)
class Units:
    """How to write times and sizes: the unit that times are in, and whether sizes are bytes."""

    time_unit: str = ""
    in_bytes: bool = False

    def time(self, value: float) -> str:
        """
        >>> Units("s").time(0.00123), Units().time(12.5)
        ('1.23 ms', '12.5')
        """
        if self.time_unit not in SECONDS:
            return f"{value:.6g} {self.time_unit}".rstrip()
        seconds = value * SECONDS[self.time_unit]
        unit, length = next(((unit, length) for unit, length in SECONDS.items() if abs(seconds) >= length), ("ns", 1e-9))
        return f"{seconds / length:.5g} {unit}"

    def size(self, value: float, up: bool = False) -> str:
        """Write four significant digits; with `up`, never fewer bytes than there are.

        >>> Units(in_bytes=True).size(1.5 * 2**30), Units().size(2.5)
        ('1.5GiB', '2.5')
        """
        suffixes = _BINARY if self.in_bytes else ("",)
        step = 0
        while step + 1 < len(suffixes) and abs(value) >= 1024:
            value /= 1024
            step += 1
        return f"{_round_up(value) if up else value:.4g}{suffixes[step]}"


def _round_up(value: float) -> float:
    """Round up to four significant digits."""
    if value <= 0:
        return value
    last = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / last * (1 - 1e-12)) * last
