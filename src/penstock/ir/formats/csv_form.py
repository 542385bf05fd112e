"""PyTorch's CSV form of schedules and programs: one row per rank, one cell per action, an empty cell per idle slot."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from io import StringIO
from os import PathLike
from pathlib import Path

import numpy as np

from penstock.errors import ActionError, FileFormatError, ScheduleError
from penstock.ir.action import Action, pack_action
from penstock.ir.formats.infer import Cells, infer_table
from penstock.ir.formats.reading import read_text
from penstock.ir.grid import Grid
from penstock.ir.table import Table


def csv_text(table: Table) -> str:
    """Format a schedule spaced out by step, and a program without idle cells, which PyTorch does not accept there."""
    grid = Grid.dense(table) if table.lowered else Grid.spaced(table)
    return "".join(",".join("" if cell is None else str(cell) for cell in column) + "\r\n" for column in grid.columns)


def write_csv(table: Table, path: str | PathLike[str]) -> None:
    """Write the CSV form, all of it or nothing."""
    write_whole(path, csv_text(table))


def refuse_for_torch(table: Table) -> None:
    """Refuse a table that PyTorch's form cannot express: PyTorch would read it as something else."""
    if len(table.placement.copies) > 1:
        raise ScheduleError(
            f"PyTorch cannot express a {table.placement.kind} placement: there a stage is on one rank, here microbatches "
            "of the same stage run on two; write .json instead"
        )
    if table.graph.skips:
        source, target = table.graph.skips[0]
        raise ScheduleError(f"PyTorch cannot express the edge {source} -> {target} that skips stages: write .json instead")


def write_whole(path: str | PathLike[str], text: str | bytes) -> None:
    """Write a file so that a failure leaves the old one as it was."""
    data = text.encode() if isinstance(text, str) else text
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
        target.write_bytes(data)
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def read_csv(path: str | PathLike[str], *, strict: bool = True) -> Table:
    """A schedule or program from a CSV file; `strict=False` leaves missing and repeated actions to the verifier."""
    return parse_csv(StringIO(read_text(path, "CSV"), newline=""), os.fspath(path), strict=strict)


def parse_csv(lines: Iterable[str], file: str = "CSV", *, strict: bool = True) -> Table:
    """A schedule or program from the lines of a CSV file."""
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        raise FileFormatError(file, f"not a CSV file: {error}") from None
    return infer_table(parse_rows(file, rows), strict=strict)


def parse_rows(file: str, rows: list[list[str]]) -> Cells:
    """Parse a file with one row per rank; blank lines at its end are ignored."""
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows = rows[:-1]
    if not rows:
        raise FileFormatError(file, "the file is empty: a schedule has one row per rank and one cell per action")
    for number, row in enumerate(rows):
        if not any(cell.strip() for cell in row):
            raise FileFormatError(file, "the row is empty: every rank needs its actions", row=number)
    return parse_cells(file, rows)


def parse_cells(file: str, rows: list[list[str]]) -> Cells:
    """Cells as packed codes, each with the place it came from."""
    entries: list[int] = []
    places: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        for place, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                packed = pack_action(Action.parse(cell))
            except ActionError as error:
                raise FileFormatError(file, str(error), row=number, cell=place) from None
            entries += packed
            places += [(number, place)] * len(packed)
    where = np.array(places, dtype=np.int64).reshape(-1, 2)
    return Cells(file, np.array(entries, dtype=np.int64), where[:, 0], where[:, 1], [len(row) for row in rows])
