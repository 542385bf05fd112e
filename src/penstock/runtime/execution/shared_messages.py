"""Messages that several stages of one rank share: an output that they all read, and the sum of their gradients for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.ir.kind import Kind
from penstock.ir.program import Program

Message = tuple[int, int, int]
"""The stage that makes an output, the reader that its message is named after, and the microbatch."""


@dataclass(frozen=True)
class SharedMessages:
    """The shared messages that one rank sends or receives; empty for most programs."""

    carriers: dict[tuple[str, int, int, int], int] = field(default_factory=dict)
    """For activations or gradients, the source, the reader and the microbatch: the reader that the message is named after."""
    last_readers: dict[Message, int] = field(default_factory=dict)
    """For each shared output that this rank receives, the stage that reads it last."""
    sums: dict[Message, list[int]] = field(default_factory=dict)
    """For each sum that this rank sends, the stages whose gradients it is made of, the farthest first."""
    places: dict[tuple[bool, int, int], int] = field(default_factory=dict)
    """Where each forward (True) and backward of the rank stands in its program, by stage and microbatch."""

    @classmethod
    def of(cls, program: Program, rank: int) -> SharedMessages:
        linker, edges, rank_of = program.linker, program.graph.edges, program.placement.rank_of
        found = cls()
        for what, forward in (("activations", True), ("gradients", False)):
            sharers: dict[Message, set[int]] = {}
            for edge, carrier, microbatch in zip(*(column.tolist() for column in linker.shared(forward)), strict=True):
                (source, reader), named = edges[edge], edges[carrier][1]
                if rank in (rank_of(source, microbatch), rank_of(reader, microbatch)):
                    found.carriers[what, source, reader, microbatch] = named
                if rank == rank_of(reader, microbatch):
                    sharers.setdefault((source, named, microbatch), {named}).add(reader)
            if sharers and not found.places:
                found._find_places(program, rank)
            for message, stages in sharers.items():
                if forward:
                    found.last_readers[message] = max((found.places[True, stage, message[2]], stage) for stage in stages)[1]
                else:
                    found.sums[message] = sorted(stages, reverse=True)
        return found

    def _find_places(self, program: Program, rank: int) -> None:
        parts = (part for action in program[rank] for part in action.parts)
        for place, part in enumerate(parts):
            if part.kind in (Kind.F, Kind.B, Kind.I):
                self.places[part.kind is Kind.F, part.stage, part.microbatch or 0] = place

    def carrier(self, what: str, source: int, reader: int, microbatch: int) -> int:
        """The reader after which the message is named that this one has a part in: mostly itself."""
        return self.carriers.get((what, source, reader, microbatch), reader)

    def is_shared(self, source: int, reader: int, microbatch: int) -> bool:
        """Whether the output that a stage of this rank reads is one tensor for several of its stages."""
        return (source, self.carrier("activations", source, reader, microbatch), microbatch) in self.last_readers

    def is_read_again(self, source: int, reader: int, microbatch: int) -> bool:
        """Whether another stage of this rank reads the same message after this one."""
        message = (source, self.carrier("activations", source, reader, microbatch), microbatch)
        return self.last_readers.get(message, reader) != reader

    def parts(self, source: int, reader: int, microbatch: int) -> list[int]:
        """The stages whose gradients are summed with this one's, the farthest first; none if it goes alone."""
        return self.sums.get((source, self.carrier("gradients", source, reader, microbatch), microbatch), [])

    def addition(self, source: int, reader: int, microbatch: int) -> tuple[list[int], bool]:
        """The stages whose gradients a reader's backward adds to the sum for a source, in order, and whether the sum is begun already.

        Gradients are added from the farthest reader to the nearest. One whose turn has not come waits, and is added by a later backward.
        """
        now, latest = self.places.get((False, reader, microbatch), -1), -1
        added, begun = [], False
        for stage in self.parts(source, reader, microbatch):
            latest = max(latest, self.places[False, stage, microbatch])
            if latest == now:
                added.append(stage)
            begun = begun or latest < now
        return added, begun
