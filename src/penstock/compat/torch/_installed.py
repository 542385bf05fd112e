"""Which torch this is the likeness of."""

from __future__ import annotations

from penstock.errors import MissingExtraError

LEAST = (2, 13)


def check_version(version: str) -> None:
    """Refuse a torch whose pipelining package has other parts than those that are built on here."""
    if tuple(map(int, version.split(".")[:2])) < LEAST:
        raise MissingExtraError("penstock.compat.torch", f"torch {LEAST[0]}.{LEAST[1]} or later (there is {version})", "torch")
