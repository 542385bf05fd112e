"""Read files as text and as data, and check the fields of data, with errors that name the file and the fault."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING
from dataclasses import fields as fields_of
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import FileFormatError, nearest

SUFFIXES = (".json", ".toml")
FORMAT = "penstock"
"""The `format` of files that name their `type`: schedules, programs, timelines and plans."""
_TOO_DEEP = "its lists or tables are nested too deeply"


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


def parse_json(text: str | bytes, file: str, what: str = "JSON file", *, strict: bool = False) -> Any:
    """Parse JSON from a file; `what` names the text in errors. `strict` refuses NaN and infinity, which are not in the standard."""
    try:
        return json.loads(text, parse_constant=_refuse_constant if strict else None)
    except (ValueError, RecursionError) as error:
        reason: object = error if text.strip() else "it is empty"
        if isinstance(error, RecursionError):
            reason = _TOO_DEEP
        raise FileFormatError(file, f"not a {what}: {reason}") from None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def read_settings(path: str | PathLike[str]) -> Any:
    """Read a `.json` or `.toml` file."""
    if suffix_of(path) == ".json":
        return read_json(path)
    return parse_toml(read_text(path, "TOML"), os.fspath(path))


def parse_toml(text: str, file: str) -> Any:
    """Parse TOML from a file."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # integers of too many digits are a plain ValueError
        reason = _TOO_DEEP if isinstance(error, RecursionError) else error
        raise FileFormatError(file, f"not a TOML file: {reason}") from None


def suffix_of(path: str | PathLike[str]) -> str:
    """Return `.json` or `.toml`; refuse any other suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise FileFormatError(os.fspath(path), f"the suffix {suffix!r} is not one of {', '.join(SUFFIXES)}")
    return suffix


def check_fields(
    data: Any,
    fields: Mapping[str, tuple[type, ...] | None],
    *,
    error: Callable[[str], Exception],
    required: Iterable[str] | None = None,
    closed: bool = False,
) -> dict[str, Any]:
    """Check the fields of a JSON object by their types, and give the object back.

    `fields` maps each name to the types that its value may have, exactly: `True` is not an `int`; None stands for any type. `required`
    fields must be there, by default all; a `closed` object has no others. `error` makes the exception from a sentence, such as
    `UsageError` or `partial(FileFormatError, file)`.
    """
    if not isinstance(data, dict):
        raise error(f"the data must be an object, got {json_type(data)}")
    for name in data:
        if closed and name not in fields:
            raise error(f"there is no field {str(name)[:_SHOWN]!r}: {nearest(str(name)[:_SHOWN], fields)}")
    missing = [repr(name) for name in (fields if required is None else required) if name not in data]
    if missing:
        raise error(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for name, types in fields.items():
        if types and name in data and type(data[name]) not in types:
            raise error(f"{name!r} must be {' or '.join(_TYPE_NAMES[kind] for kind in types)}, got {json_type(data[name])}")
    return data


def check_record(
    data: Any,
    record: type,
    what: str,
    *,
    error: Callable[[str], Exception],
    types: Mapping[str, tuple[type, ...]] | None = None,
    omit: Collection[str] = (),
) -> dict[str, Any]:
    """Check that an object has the fields of a dataclass: all that have no default, and none that it does not have or that `omit` names.

    `what` names the object in errors. The dataclass checks its values itself, except those in `types`.
    """
    known = {field.name: field for field in fields_of(record) if field.name not in omit}
    required = [name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING]
    named = {**dict.fromkeys(known), **(types or {})}
    kind = data.get("type") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if isinstance(kind, str):
        raise error(f"not {what}: it is a saved {kind[:_SHOWN]}")
    return check_fields(data, named, error=lambda reason: error(f"{what}: {reason}"), required=required, closed=True)


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
