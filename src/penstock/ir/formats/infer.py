"""Infer from a bare table of actions its microbatches, placement and graph, and whether it is a schedule or a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import FileFormatError
from penstock.ir.action import unpack_code
from penstock.ir.dependencies import peer_stages
from penstock.ir.graph import StageGraph
from penstock.ir.kind import COMPUTE, RECEIVES, SEND_WAITS, SENDS, Kind
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

    @property
    def rows(self) -> Rows:
        return Rows.sorted_by(self.codes, self.row, len(self.lengths))

    def error(self, entry: int, reason: str) -> FileFormatError:
        return FileFormatError(self.file, reason, row=int(self.row[entry]), cell=int(self.cell[entry]))

    def name(self, entry: int) -> str:
        return str(unpack_code(int(self.codes[entry])))


def infer_table(cells: Cells, *, strict: bool = True) -> Table:
    """The schedule or program that the cells hold; strict refuses repeated and missing compute actions."""
    rows = cells.rows
    compute = rows.is_kind(*COMPUTE)
    if not compute.any():
        raise FileFormatError(cells.file, "there is no compute action: a schedule needs F, and for training B, or I and W")
    stages, microbatches = int(rows.stage[compute].max()) + 1, int(rows.microbatch[compute].max()) + 1
    if microbatches > compute.sum() or stages > compute.sum():
        worst = int(np.argmax(np.where(compute, np.maximum(rows.microbatch, rows.stage), -1)))
        raise cells.error(worst, f"{cells.name(worst)} cannot belong to a file of only {int(compute.sum())} compute actions")
    if strict:
        _refuse_repeats(cells, rows, compute, stages, microbatches)
        _refuse_holes(cells, rows, stages, microbatches)
    placement = _placement(cells, rows, compute, stages, strict)
    graph = _graph(rows, stages)
    name = cells.file.replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    if _is_program(rows, placement, graph):
        return Program(rows, placement, microbatches, graph=graph, name=name)
    return Schedule.from_rows(rows.keep(compute), placement, microbatches, graph=graph, name=name)


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

    def seen(*kinds: Kind) -> Flags:
        table = np.zeros(shape, dtype=np.bool_)
        of_kind = rows.is_kind(*kinds)
        table[rows.stage[of_kind], rows.microbatch[of_kind]] = True
        return table

    wanted = [("F", seen(Kind.F))]
    if rows.is_kind(Kind.B, Kind.I, Kind.W).any():
        wanted += [("B, or I and W,", seen(Kind.B, Kind.I)), ("B, or I and W,", seen(Kind.B, Kind.W))]
    for what, table in wanted:
        if table.all():
            continue
        stage, microbatch = (int(v) for v in np.argwhere(~table)[0])
        having = int(table[:, microbatch].sum())
        if what == "F" and 2 * having < stages:
            raise _stray(cells, rows, microbatch, having, stages)
        holders = np.flatnonzero(rows.stage == stage)
        if not len(holders):
            raise FileFormatError(cells.file, f"stage {stage} is on no rank, though stages go up to {stages - 1}")
        row = int(rows.rank[holders[0]])
        short = (
            f"; the row ends after {cells.lengths[row]} cells, the longest has {max(cells.lengths)}"
            if cells.lengths[row] < max(cells.lengths)
            else ""
        )
        raise FileFormatError(
            cells.file, f"stage {stage} has no {what} for microbatch {microbatch} of 0..{microbatches - 1}{short}", row=row
        )


def _stray(cells: Cells, rows: Rows, microbatch: int, having: int, stages: int) -> FileFormatError:
    """Blame a microbatch that most stages lack on the stages that have it, or a later one: it is too much there, not missing elsewhere."""
    first = int(np.flatnonzero(rows.is_kind(*COMPUTE) & (rows.microbatch >= microbatch))[0])
    held = f"only {having} of {stages} stages have" if having else "no stage has"
    return cells.error(
        first, f"{cells.name(first)} is beyond the others: {held} an F for microbatch {microbatch}; microbatches count from 0"
    )


def _placement(cells: Cells, rows: Rows, compute: Flags, stages: int, strict: bool) -> Placement:
    """One copy if each stage is on one rank; two if its even microbatches are on one rank and its odd ones on another."""
    maps = np.full((2, stages), -1, dtype=np.int64)
    entries = np.flatnonzero(compute)[::-1]  # assigned backwards, so that the first action of a stage gives its rank
    copy, stage, rank = rows.microbatch[entries] % 2, rows.stage[entries], rows.rank[entries]
    maps[copy, stage] = rank
    maps = np.where(maps < 0, maps[::-1], maps)
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


def _graph(rows: Rows, stages: int) -> StageGraph:
    """The chain, and one edge per message that names its peer; further edges that this message carries are not in the file."""
    peers = peer_stages(rows)
    skips = np.flatnonzero(
        rows.is_kind(*SENDS, *RECEIVES) & (rows.peer >= 0) & (rows.stage < stages) & (peers < stages) & (rows.stage != peers)
    )
    pairs = {(min(a, b), max(a, b)) for a, b in zip(rows.stage[skips].tolist(), peers[skips].tolist(), strict=True)}
    return StageGraph.chain(stages, sorted(pairs))


def _is_program(rows: Rows, placement: Placement, graph: StageGraph) -> bool:
    """Messages or sharding make a program; so do reductions alone where nothing has to cross ranks."""
    if rows.is_kind(*SENDS, *RECEIVES, *SEND_WAITS, Kind.UNSHARD, Kind.RESHARD).any():
        return True
    crosses = any(copy[a] != copy[b] for copy in placement.copies for a, b in graph.edges)
    return not crosses and bool(rows.is_kind(Kind.REDUCE_GRAD).any())
