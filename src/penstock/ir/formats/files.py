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
    return read_csv(path, strict=strict) if _is_csv(path) else read_json(path)


def save(table: Table, path: str | PathLike[str]) -> None:
    """Write a `.csv` or `.json` file."""
    (write_csv if _is_csv(path) else write_json)(table, path)


def _is_csv(path: str | PathLike[str]) -> bool:
    suffix = Path(path).suffix.lower()
    if suffix not in (".csv", ".json"):
        raise FileFormatError(str(path), f"the suffix {suffix!r} is not one of .csv, .json")
    return suffix == ".csv"
