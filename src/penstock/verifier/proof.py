"""The result of a proof."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from penstock.text.numbers import format_count
from penstock.text.table import format_table
from penstock.text.units import Units


@dataclass(frozen=True)
class Proof:
    """A certificate that a schedule or program breaks none of the rules, and under which assumptions."""

    name: str
    lowered: bool
    placement: str
    ranks: int
    stages: int
    microbatches: int
    semantics: str
    rules: dict[str, str]
    """The rules that were tried, each with the invariant that holds; rules that do not apply to the table are left out."""
    actions: int
    messages: int
    slots: bool
    """Whether the slot counts of the channels were part of the proof; if not, slots are unlimited."""
    peak_memory: tuple[float, ...] | None = None
    """The most that each rank holds; None without costs and limit."""
    memory_limit: tuple[float, ...] | None = None
    host_memory: tuple[float, ...] | None = None
    """The most that the host holds for each rank, if activations are moved there; None without costs and limits."""
    host_memory_limit: tuple[float, ...] | None = None
    slices: int = 1
    """How many slices each microbatch is cut into."""
    in_bytes: bool = False
    """Whether memory is in bytes."""

    def __str__(self) -> str:
        what = "program" if self.lowered else "schedule"
        counts = format_count(self.actions, "action") + (f", {format_count(self.messages, 'message')}" if self.lowered else "")
        slices = f" of {self.slices} slices" if self.slices > 1 else ""
        lines = [
            f"proved: {f'{self.name!r}, ' if self.name else ''}a {what} on {format_count(self.ranks, 'rank')} "
            f"({self.placement}, {format_count(self.stages, 'stage')}, {format_count(self.microbatches, 'microbatch')}{slices}), {counts}"
        ]
        lines += format_table(list(self.rules.items()), left=None, indent="  ")
        lines += [f"  {self._write_assumptions()}"] if self.lowered else []
        lines += [f"  {self._write_memory()}"] if self.peak_memory is not None else []
        lines += [f"  {self._write_host_memory()}"] if self.host_memory is not None else []
        return "\n".join(lines)

    def _write_assumptions(self) -> str:
        if self.semantics == "rendezvous":
            return "semantics: rendezvous, one queue for each pair of ranks"
        return f"semantics: channels, {'with the slots of the buffers' if self.slots else 'slots unlimited'}"

    def _write_memory(self) -> str:
        return f"peak memory: {self._describe_highest(self.peak_memory or (), self.memory_limit)}"

    def _write_host_memory(self) -> str:
        return f"host memory: {self._describe_highest(self.host_memory or (), self.host_memory_limit)}"

    def _describe_highest(self, peaks: tuple[float, ...], limits: tuple[float, ...] | None) -> str:
        """The highest peak, its limit and its rank."""
        size = Units(in_bytes=True).size if self.in_bytes else "{:.6g}".format
        highest = max(range(len(peaks)), key=peaks.__getitem__)
        limit = "" if limits is None else f" of {size(limits[highest])} allowed"
        return f"{size(peaks[highest])}{limit}, on rank {highest}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
