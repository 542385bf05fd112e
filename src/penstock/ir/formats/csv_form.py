"""PyTorch's CSV form of schedules and programs: one row per rank, one cell per action, an empty cell per idle slot.

PyTorch has no slices. A file of a table with q of them has the number microbatch x q + slice in place of the microbatch, so that PyTorch
reads it as an order of microbatches; behind its first action it says `slices=q`, which PyTorch's reader passes over: `0F0 slices=4`.

A file has only actions: its microbatches, placement and graph, and whether it is a schedule or a program, are inferred from them.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from os import PathLike
from pathlib import Path

import numpy as np

from penstock.errors import ActionError, FileFormatError, ScheduleError
from penstock.ir.action import Action, pack_action, unpack_code
from penstock.ir.dependencies import peer_stages
from penstock.ir.formats.action_text import format_action
from penstock.ir.formats.reading import read_text
from penstock.ir.graph import StageGraph
from penstock.ir.grid import Grid
from penstock.ir.kind import COMPUTE, COPIES, RECEIVES, SEND_WAITS, SENDS, SPREAD, Kind
from penstock.ir.placement import Placement, recognise
from penstock.ir.program import Program
from penstock.ir.rows import Flags, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table


@dataclass(frozen=True)
class Cells:
    """The codes of a file and the row and cell that each came from."""

    file: str
    codes: Ints
    row: Ints
    cell: Ints
    lengths: list[int]
    slices: int = 1

    @property
    def rows(self) -> Rows:
        return Rows.sorted_by(self.codes, self.row, len(self.lengths)).cut_into(self.slices)

    def error(self, entry: int, reason: str) -> FileFormatError:
        return FileFormatError(self.file, reason, row=int(self.row[entry]), cell=int(self.cell[entry]))

    def name(self, entry: int) -> str:
        return str(unpack_code(int(self.codes[entry]), self.slices))

    def unit_name(self, unit: int) -> str:
        """`microbatch 3`, or `microbatch 3, slice 1`."""
        microbatch, part = divmod(unit, self.slices)
        return f"microbatch {microbatch}" + (f", slice {part}" if self.slices > 1 else "")


def infer_table(cells: Cells, *, strict: bool = True) -> Table:
    """The schedule or program that the cells hold; strict refuses repeated and missing compute actions."""
    rows = cells.rows
    compute = rows.is_kind(*COMPUTE)
    if not compute.any():
        raise FileFormatError(cells.file, "there is no compute action: a schedule needs F, and for training B, or I and W")
    stages, microbatches = int(rows.stage[compute].max()) + 1, int(rows.microbatch[compute].max()) // cells.slices + 1
    units = microbatches * cells.slices
    if units > compute.sum() or stages > compute.sum():
        worst = int(np.argmax(np.where(compute, np.maximum(rows.microbatch, rows.stage), -1)))
        raise cells.error(worst, f"{cells.name(worst)} cannot belong to a file of only {int(compute.sum())} compute actions")
    if strict:
        _refuse_repeats(cells, rows, compute, stages, units)
    placement = _infer_placement(cells, rows, compute, stages, strict)
    if strict:
        _refuse_holes(cells, rows, stages, units)
    graph = _infer_graph(rows, stages)
    name = cells.file.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    if _is_program(rows, placement, graph):
        return Program(rows, placement, microbatches, graph=graph, name=name, slices=cells.slices)
    return Schedule.from_rows(
        rows.keep(compute | rows.is_kind(*COPIES, *SPREAD)), placement, microbatches, graph=graph, name=name, slices=cells.slices
    )


def infer_placement(rows: Rows) -> Placement:
    """The placement of written-out actions: each stage on the rank that computes it; refused if the actions do not say that."""
    compute = rows.is_kind(*COMPUTE)
    if not compute.any():
        raise ScheduleError("the placement cannot be inferred, because there is no compute action: give placement=")
    try:
        cells = Cells("the actions", rows.codes, rows.rank, rows.step, np.diff(rows.group_offsets).tolist())
        return _infer_placement(cells, rows, compute, int(rows.stage[compute].max()) + 1, strict=True)
    except FileFormatError as error:
        raise ScheduleError(f"the placement cannot be inferred: {error}. Correct the actions, or give placement=") from None


def _refuse_repeats(cells: Cells, rows: Rows, compute: Flags, stages: int, microbatches: int) -> None:
    entries = np.flatnonzero(compute)
    keys = (rows.kind[entries] * stages + rows.stage[entries]) * microbatches + rows.microbatch[entries]
    order = np.argsort(keys, kind="stable")
    again = order[1:][keys[order][1:] == keys[order][:-1]]
    if len(again):
        second = int(entries[again.min()])
        first = int(entries[keys == keys[again.min()]][0])
        place = f"row {int(cells.row[first]) + 1}, cell {int(cells.cell[first]) + 1}"
        reason = f"{cells.name(second)} is there twice; the first is in {place}"
        raise cells.error(second, reason)


def _refuse_holes(cells: Cells, rows: Rows, stages: int, microbatches: int) -> None:
    """Every stage and microbatch needs its forward and, if anything trains, its backward."""
    shape = (stages, microbatches)

    def mark_cells(*kinds: Kind) -> Flags:
        table = np.zeros(shape, dtype=np.bool_)
        of_kind = rows.is_kind(*kinds)
        table[rows.stage[of_kind], rows.microbatch[of_kind]] = True
        return table

    needed = [("F", mark_cells(Kind.F))]
    if rows.is_kind(Kind.B, Kind.I, Kind.W).any():
        needed += [("B, or I and W,", mark_cells(Kind.B, Kind.I)), ("B, or I and W,", mark_cells(Kind.B, Kind.W))]
    for what, table in needed:
        if table.all():
            continue
        stage, microbatch = (int(v) for v in np.argwhere(~table)[0])
        having = int(table[:, microbatch].sum())
        if what == "F" and 2 * having < stages and (rows.microbatch[rows.is_kind(*COMPUTE)] >= microbatch).any():
            raise _make_stray_error(cells, rows, microbatch, having, stages)
        holders = np.flatnonzero(rows.stage == stage)
        row = int(rows.rank[holders[0]])
        short = (
            f"; the row ends after {cells.lengths[row]} cells, the longest has {max(cells.lengths)}"
            if cells.lengths[row] < max(cells.lengths)
            else ""
        )
        raise FileFormatError(
            cells.file,
            f"stage {stage} has no {what} for {cells.unit_name(microbatch)} of 0..{microbatches // cells.slices - 1}{short}",
            row=row,
        )


def _make_stray_error(cells: Cells, rows: Rows, microbatch: int, having: int, stages: int) -> FileFormatError:
    """Blame a microbatch that most stages lack on the stages that have it, or a later one: it is too much there, not missing elsewhere."""
    first = int(np.flatnonzero(rows.is_kind(*COMPUTE) & (rows.microbatch >= microbatch))[0])
    count = f"only {having} of {stages} stages have" if having else "no stage has"
    return cells.error(
        first, f"{cells.name(first)} is beyond the others: {count} an F for {cells.unit_name(microbatch)}; microbatches count from 0"
    )


def _infer_placement(cells: Cells, rows: Rows, compute: Flags, stages: int, strict: bool) -> Placement:
    """One copy if each stage is on one rank; two if its even microbatches are on one rank and its odd ones on another."""
    maps = np.full((2, stages), -1, dtype=np.int64)
    entries = np.flatnonzero(compute)[::-1]  # assigned backwards, so that the first action of a stage gives its rank
    copy, stage, rank = rows.microbatch[entries] % 2, rows.stage[entries], rows.rank[entries]
    maps[copy, stage] = rank
    maps = np.where(maps < 0, maps[::-1], maps)
    nowhere = np.flatnonzero(maps[0] < 0)
    if strict and len(nowhere):
        raise FileFormatError(cells.file, f"stage {int(nowhere[0])} is on no rank, though stages go up to {stages - 1}")
    maps = np.where(maps < 0, 0, maps)
    away = entries[rank != maps[copy, stage]][::-1]
    if strict and len(away):
        second = int(away[0])
        home = int(maps[rows.microbatch[second] % 2, rows.stage[second]])
        raise cells.error(
            second,
            f"{cells.name(second)} is on rank {int(rows.rank[second])}, but stage {int(rows.stage[second])} is on rank {home}: "
            "a stage belongs to one rank, or in a bidirectional file to one for even and one for odd microbatches",
        )
    ranks = len(rows)
    one_copy = bool((maps[0] == maps[1]).all())
    return recognise(Placement.custom(*(maps[:1] if one_copy else maps).tolist(), ranks=ranks))


def _infer_graph(rows: Rows, stages: int) -> StageGraph:
    """The chain, and one edge per message that names its peer; further edges that this message carries are not in the file."""
    peers = peer_stages(rows)
    skips = np.flatnonzero(
        rows.is_kind(*SENDS, *RECEIVES) & (rows.peer >= 0) & (rows.stage < stages) & (peers < stages) & (rows.stage != peers)
    )
    pairs = {(min(a, b), max(a, b)) for a, b in zip(rows.stage[skips].tolist(), peers[skips].tolist(), strict=True)}
    return StageGraph.chain(stages, sorted(pairs))


def _is_program(rows: Rows, placement: Placement, graph: StageGraph) -> bool:
    """Messages or sharding make a program; so do reductions alone if nothing has to cross ranks."""
    if rows.is_kind(*SENDS, *RECEIVES, *SEND_WAITS, Kind.UNSHARD, Kind.RESHARD).any():
        return True
    crosses = any(copy[a] != copy[b] for copy in placement.copies for a, b in graph.edges)
    return not crosses and bool(rows.is_kind(Kind.REDUCE_GRAD).any())


def csv_text(table: Table) -> str:
    """Format a schedule spaced out by step, and a program without idle cells, which PyTorch does not accept there."""
    grid = Grid.dense(table) if table.lowered else Grid.spaced(table)
    lines = [",".join("" if cell is None else format_action(cell, table.slices) for cell in column) + "\r\n" for column in grid.columns]
    if table.slices > 1:
        lines[0] = re.sub(r"[^,\r\n]+", rf"\g<0> slices={table.slices}", lines[0], count=1)
    return "".join(lines)


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
    copies = np.flatnonzero(table.rows.is_kind(*COPIES))
    if len(copies):
        raise ScheduleError(
            f"PyTorch cannot express {table.rows.part_at(int(copies[0]))} and {len(copies) - 1} more copies of activations to host memory "
            "and back: write .json instead, or lower the schedule without offload"
        )
    spread = np.flatnonzero(table.rows.is_kind(*SPREAD))
    if len(spread):
        raise ScheduleError(
            f"PyTorch cannot express {table.rows.part_at(int(spread[0]))} and {len(spread) - 1} more actions of a vocabulary that is "
            "spread over the ranks: write .json instead, or leave embedding and head on the first and last stage"
        )


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
    place = next(place for place, cell in enumerate(rows[0]) if cell.strip())
    action, slices = split_slices(rows[0][place])
    first = [*rows[0][:place], action, *rows[0][place + 1 :]]
    return parse_cells(file, [first, *rows[1:]], slices)


def split_slices(cell: str) -> tuple[str, int]:
    """The first action of a file, and the number of slices behind it; 1 if it says none.

    >>> split_slices("0F0 slices=4"), split_slices("0F0")
    (('0F0', 4), ('0F0', 1))
    """
    match = _SLICES.fullmatch(cell)
    return (cell, 1) if match is None else (match[1], int(match[2]))


_SLICES = re.compile(r"(.*\S)\s+slices=([1-9][0-9]{0,7})\s*")


def parse_cells(file: str, rows: list[list[str]], slices: int = 1) -> Cells:
    """Cells as packed codes, each with the place it came from."""
    entries: list[int] = []
    places: list[tuple[int, int]] = []
    for number, row in enumerate(rows):
        for place, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                packed = pack_action(Action.parse(cell), slices)
            except ActionError as error:
                raise FileFormatError(file, str(error), row=number, cell=place) from None
            entries += packed
            places += [(number, place)] * len(packed)
    where = np.array(places, dtype=np.int64).reshape(-1, 2)
    return Cells(file, np.array(entries, dtype=np.int64), where[:, 0], where[:, 1], [len(row) for row in rows], slices)
