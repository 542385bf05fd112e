"""Every rank's packed actions in one flat array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ActionError, ScheduleError
from penstock.ir import codes
from penstock.ir.action import Action, pack_action, unpack_actions, unpack_code, unpack_row

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@cache
def _flag_kinds(kinds: tuple[int, ...]) -> Flags:
    """For the number of every kind, whether it is one of these."""
    flags = np.zeros(codes.MAX_KINDS, dtype=np.bool_)
    flags[list(kinds)] = True
    flags.flags.writeable = False
    return flags


def find_first(keys: Ints, entries: Ints, size: int) -> Ints:
    """A table of the first entry of each key, -1 if there is none."""
    table = np.full(size, -1, dtype=np.int64)
    table[keys[::-1]] = entries[::-1]
    return table


class Rows:
    """One row of codes per rank, end to end; entry e belongs to the rank whose slice of `offsets` holds e.

    An overlapped action is several entries and one *group*; every other action is a group of one.
    """

    def __init__(self, entries: Ints, offsets: Ints, slices: int = 1) -> None:
        self.codes = entries
        self.offsets = offsets
        self.slices = slices
        """How many slices each microbatch's sequences are cut into. A code has one number for both: microbatch x slices + slice."""

    def cut_into(self, slices: int) -> Rows:
        """The same codes, read as those of microbatches with this many slices."""
        return self if slices == self.slices else Rows(self.codes, self.offsets, slices)

    @classmethod
    def join(cls, rows: Sequence[Ints]) -> Rows:
        """Lay the rows end to end."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        entries = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        return cls(entries.astype(np.int64, copy=False), offsets)

    @classmethod
    def sorted_by(cls, entries: Ints, ranks: Ints, num_ranks: int) -> Rows:
        """Entries that are already in order, with the rank of each."""
        offsets = np.zeros(num_ranks + 1, dtype=np.int64)
        np.cumsum(np.bincount(ranks, minlength=num_ranks), out=offsets[1:])
        return cls(entries, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and np.array_equal(self.offsets, other.offsets) and np.array_equal(self.codes, other.codes)

    __hash__ = None  # type: ignore[assignment]

    def row(self, rank: int) -> Ints:
        """One rank's codes."""
        return self.codes[self.offsets[rank] : self.offsets[rank + 1]]

    def actions(self, rank: int) -> tuple[Action, ...]:
        """One rank's actions."""
        return unpack_row(self.row(rank), self.slices)

    @cached_property
    def rank(self) -> Ints:
        """The rank of each entry."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

    @cached_property
    def kind(self) -> Ints:
        return np.asarray(codes.kind_of(self.codes))

    @cached_property
    def stage(self) -> Ints:
        return np.asarray(codes.stage_of(self.codes))

    @cached_property
    def microbatch(self) -> Ints:
        """The number of each entry's microbatch; with slices, that of its microbatch and slice."""
        return np.asarray(codes.microbatch_of(self.codes))

    @cached_property
    def peer(self) -> Ints:
        return np.asarray(codes.peer_of(self.codes))

    @cached_property
    def heads(self) -> Flags:
        """Whether the entry is the first of its group."""
        heads = np.ones(len(self.codes), dtype=np.bool_)
        heads[1:] = ~codes.is_joined(self.codes[:-1])
        return heads

    @cached_property
    def group(self) -> Ints:
        """The group of each entry, counted over all ranks."""
        return np.cumsum(self.heads) - 1

    @cached_property
    def group_offsets(self) -> Ints:
        """The index of each rank's first group."""
        counts = np.concatenate(([0], np.cumsum(self.heads)))
        return np.asarray(counts[self.offsets], dtype=np.int64)

    @cached_property
    def step(self) -> Ints:
        """The index of each entry's group in its rank's row: the place that findings and excerpts name."""
        return np.asarray(self.group - self.group_offsets[self.rank], dtype=np.int64)

    @cached_property
    def kinds(self) -> frozenset[int]:
        """The kinds that any entry is of."""
        return frozenset(np.flatnonzero(np.bincount(self.kind)).tolist())

    def is_kind(self, *kinds: int) -> Flags:
        """Whether each entry is of one of the kinds."""
        return np.asarray(_flag_kinds(kinds)[self.kind])

    def action_at(self, entry: int) -> Action:
        """The whole action that an entry is part of."""
        return self.action_of(int(self.group[entry]))

    def action_of(self, group: int) -> Action:
        """The action of a group."""
        first, last = np.searchsorted(self.group, (group, group + 1)).tolist()
        return next(unpack_actions(self.codes[first:last].tolist(), self.slices))

    def part_at(self, entry: int) -> Action:
        """The entry as an action of its own, outside the group it runs in."""
        return self.action_for(int(self.codes[entry]))

    def action_for(self, code: int) -> Action:
        """The action of a code, which need not be one of the entries."""
        return unpack_code(code, self.slices)

    def keep(self, mask: Flags) -> Rows:
        """Only the entries of the mask; a group that loses its last part ends at the last one left."""
        group, rank, joined = self.group[mask], self.rank[mask], self.codes[mask] & ~codes.JOIN
        same = np.zeros(len(joined), dtype=np.bool_)
        same[:-1] = group[1:] == group[:-1]
        return Rows.sorted_by(joined | np.where(same, codes.JOIN, 0), rank, len(self))

    def insert(self, before: Ints, entries: Ints, ranks: Ints, tie: Ints | None = None) -> Rows:
        """New entries in front of the entries at `before` (the end of a rank is the start of the next), ties in the order of `tie`."""
        keys = (before, ranks) if tie is None else (tie, before, ranks)
        order = np.lexsort(keys)
        at = before[order]
        return Rows.sorted_by(
            np.insert(self.codes, at, entries[order]),
            np.insert(self.rank, at, ranks[order]),
            len(self),
        )

    @cached_property
    def group_ends(self) -> Ints:
        """For each entry, the index just behind its group."""
        starts = np.flatnonzero(self.heads)
        ends = np.append(starts[1:], len(self.codes))
        return np.asarray(ends[self.group], dtype=np.int64)

    @cached_property
    def group_starts(self) -> Ints:
        """For each entry, the index of its group's first part."""
        return np.asarray(np.flatnonzero(self.heads)[self.group], dtype=np.int64)


def pack_rows(actions: Sequence[Iterable[Any]] | Mapping[int, Iterable[Any]], slices: int = 1) -> Rows:
    """Pack written-out actions, one sequence per rank; None and empty text are idle slots."""
    if isinstance(actions, Mapping):
        absent = next((rank for rank in range(len(actions)) if rank not in actions), None)
        if absent is not None:
            raise ScheduleError(f"there are {len(actions)} rows of actions, but none for rank {absent}: ranks count from 0")
        actions = [actions[rank] for rank in range(len(actions))]
    return Rows.join([np.array(list(_pack_row(rank, row, slices)), dtype=np.int64) for rank, row in enumerate(actions)]).cut_into(slices)


def _pack_row(rank: int, row: Iterable[Any], slices: int) -> Iterator[int]:
    for place, cell in enumerate(row):
        if cell is None or cell == "":
            continue
        try:
            yield from pack_action(cell if isinstance(cell, Action) else Action.parse(str(cell)), slices)
        except ActionError as error:
            raise ActionError(f"entry {place} of rank {rank}: {error}") from None
