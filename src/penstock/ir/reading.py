"""Files as text and as data, with an error that says what is wrong with them."""

from __future__ import annotations

import json
import os
import tomllib
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import FileFormatError

SUFFIXES = (".json", ".toml")


def read_text(path: str | PathLike[str], what: str) -> str:
    """The text in a file that is to be a `what`, line ends as they are; a mark of its encoding at the start is left out."""
    data = Path(path).read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(os.fspath(path), f"not a {what} file: byte {error.start} is no text in UTF-8") from None


def read_json(path: str | PathLike[str]) -> Any:
    """What a JSON file holds."""
    text = read_text(path, "JSON")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error if text.strip() else "it is empty"
        raise FileFormatError(os.fspath(path), f"not a JSON file: {reason}") from None


def read_settings(path: str | PathLike[str]) -> Any:
    """What a `.json` or `.toml` file holds."""
    if suffix_of(path) == ".json":
        return read_json(path)
    text = read_text(path, "TOML")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileFormatError(os.fspath(path), f"not a TOML file: {error}") from None


def suffix_of(path: str | PathLike[str]) -> str:
    """`.json` or `.toml`; anything else is refused."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise FileFormatError(os.fspath(path), f"the suffix {suffix!r} is not one of {', '.join(SUFFIXES)}")
    return suffix
