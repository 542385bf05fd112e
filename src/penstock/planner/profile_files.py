"""Profiles as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def toml_text(data: dict[str, Any]) -> str:
    """Plain values, then lists of tables, which may hold such lists themselves."""
    return "\n".join(_lines(data, "")) + "\n"


def _lines(data: dict[str, Any], prefix: str) -> Iterator[str]:
    tables = {name: value for name, value in data.items() if isinstance(value, list)}
    for name, value in data.items():
        if name not in tables:
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
    for name, rows in tables.items():
        for row in rows:
            yield ""
            yield f"[[{prefix}{name}]]"
            yield from _lines(row, f"{prefix}{name}.")
