"""Options in text: `group_size=8`, and a name with its options, `interleaved-1f1b{chunks=4,group_size=8}`."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import UsageError

_WITH_OPTIONS = re.compile(r"\s*([^{}]+?)\s*\{([^{}]*)\}\s*")
_BETWEEN_NAMES = re.compile(r",(?![^{}]*\})")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "nan": math.nan, "inf": math.inf, "infinity": math.inf}


def split_options(text: str) -> tuple[str, list[str]]:
    """Split a name from its options.

    >>> split_options("interleaved-1f1b{chunks=4, group_size=8}"), split_options("zbv")
    (('interleaved-1f1b', ['chunks=4', 'group_size=8']), ('zbv', []))
    """
    match = _WITH_OPTIONS.fullmatch(text)
    return (text, []) if match is None else (match[1], [part.strip() for part in match[2].split(",") if part.strip()])


def split_names(text: str) -> list[str]:
    """Split a list of names at the commas that are not among options.

    >>> split_names("1f1b, interleaved-1f1b{chunks=4,group_size=8}")
    ['1f1b', 'interleaved-1f1b{chunks=4,group_size=8}']
    """
    return [name.strip() for name in _BETWEEN_NAMES.split(text) if name.strip()]


def format_options(name: str, options: Mapping[str, Any]) -> str:
    """Write a name with its options.

    >>> format_options("interleaved-1f1b", {"chunks": 4}), format_options("zbv", {})
    ('interleaved-1f1b{chunks=4}', 'zbv')
    """
    return f"{name}{{{','.join(f'{key}={value}' for key, value in options.items())}}}" if options else name


def read_assignments(what: str, parts: Iterable[str], example: str) -> dict[str, Any]:
    """Read texts like `group_size=8`: numbers, booleans, None and lists as in Python, and otherwise text. `what` begins the errors."""
    values: dict[str, Any] = {}
    for part in parts:
        name, equals, text = map(str.strip, part.partition("="))
        if name.isidentifier() and equals and not text:
            raise UsageError(f"{what}: {name}= has no value: write {example}")
        if not equals or not name.isidentifier():
            raise UsageError(f"{what}: {part.strip()!r} is not NAME=VALUE: write {example}")
        if name in values:
            raise UsageError(f"{what}: {name} is given twice")
        values[name] = _read_value(text)
    return values


def _read_value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, list, tuple)) else text
