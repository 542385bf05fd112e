"""The versions of torch that the runtime works with.

The range has its one home here. `pyproject.toml`, the Makefile, the workflow, README and docs repeat it, and
`tests/runtime/torch_internals/test_torch_versions.py` compares them with it.
"""

from __future__ import annotations

from penstock.errors import TorchVersionError, name_extra

FIRST, LAST = (2, 11), (2, 15)
"""The first and the last minor version that work; patch releases of all between them do too."""


def describe_range() -> str:
    """Return the range in words, for example `2.11 to 2.15`."""
    return f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


def is_supported(version: str) -> bool:
    """Whether a version of torch is in the range, also as `2.13.1+cu126` or `2.14.0a0+git1234`."""
    major, minor = version.split(".")[:2]
    return FIRST <= (int(major), int(minor)) <= LAST


def check_torch_version(version: str) -> None:
    """Raise `TorchVersionError` if `penstock.runtime` and `penstock.compat.torch` do not work with this version of torch."""
    if not is_supported(version):
        raise TorchVersionError(f"penstock works with torch {describe_range()}, and torch {version} is installed: {name_extra('torch')}")
