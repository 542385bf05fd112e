"""Load and save schedules and programs by the file's suffix."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from penstock.errors import FileFormatError
from penstock.ir.formats.csv_form import read_csv, write_csv
from penstock.ir.formats.json_form import read_json, write_json
from penstock.ir.table import Table


def load(path: str | PathLike[str], *, strict: bool = True) -> Table:
    """Load a `Schedule` or a `Program`, told apart by content, from a `.csv` or `.json` file.

    `strict=False` accepts a CSV with missing or repeated actions, which the verifier reports.
    """
    match Path(path).suffix.lower():
        case ".csv":
            return read_csv(path, strict=strict)
        case ".json":
            return read_json(path)
        case other:
            raise FileFormatError(str(path), f"the suffix {other!r} is not one of .csv, .json")


def save(table: Table, path: str | PathLike[str]) -> None:
    """Write a `.csv` or `.json` file."""
    match Path(path).suffix.lower():
        case ".csv":
            write_csv(table, path)
        case ".json":
            write_json(table, path)
        case other:
            raise FileFormatError(str(path), f"the suffix {other!r} is not one of .csv, .json")
