"""Read files as text and as data, and check the fields of data, with errors that name the file and the fault."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import FileFormatError, nearest

SUFFIXES = (".json", ".toml")


def read_text(path: str | PathLike[str], what: str) -> str:
    """Return the text of a file with its line ends; `what` names the format in errors. A byte order mark is dropped."""
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(os.fspath(path), f"not a {what} file: byte {error.start} is not UTF-8") from None


def read_json(path: str | PathLike[str]) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path, "JSON"), os.fspath(path))


def parse_json(text: str | bytes, file: str, what: str = "JSON file") -> Any:
    """Parse JSON from a file; `what` names the text in errors."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error if text.strip() else "it is empty"
        raise FileFormatError(file, f"not a {what}: {reason}") from None


def read_settings(path: str | PathLike[str]) -> Any:
    """Read a `.json` or `.toml` file."""
    if suffix_of(path) == ".json":
        return read_json(path)
    text = read_text(path, "TOML")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileFormatError(os.fspath(path), f"not a TOML file: {error}") from None


def suffix_of(path: str | PathLike[str]) -> str:
    """Return `.json` or `.toml`; refuse any other suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise FileFormatError(os.fspath(path), f"the suffix {suffix!r} is not one of {', '.join(SUFFIXES)}")
    return suffix


def check_fields(
    data: Any,
    fields: Mapping[str, tuple[type, ...]],
    *,
    error: Callable[[str], Exception],
    required: Iterable[str] | None = None,
    closed: bool = False,
) -> dict[str, Any]:
    """Check the fields of a JSON object by their types, and give the object back.

    `fields` maps each name to the types that its value may have, exactly: `True` is not an `int`. `required` fields must be there, by
    default all; a `closed` object has no others. `error` makes the exception from a sentence, such as `UsageError` or
    `partial(FileFormatError, file)`.
    """
    if not isinstance(data, dict):
        raise error(f"the data must be an object, got {json_type(data)}")
    for name in fields if required is None else required:
        if name not in data:
            raise error(f"{name!r} is missing")
    for name, value in data.items():
        if name not in fields:
            if closed:
                raise error(f"there is no field {name[:_SHOWN]!r}: {nearest(name[:_SHOWN], fields)}")
        elif type(value) not in fields[name]:
            raise error(f"{name!r} must be {' or '.join(_TYPE_NAMES[kind] for kind in fields[name])}, got {json_type(value)}")
    return data


def json_type(value: Any) -> str:
    """Name the JSON type of a value."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


_SHOWN = 200
"""Characters of an unknown name that an error shows."""
_TYPE_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
