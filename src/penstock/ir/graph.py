"""The graph of stages: which stage reads the output of which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.errors import PlacementError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class StageGraph:
    """Stages and the edges between them, each from a lower stage to a higher one.

    Usually a chain. `skips` adds edges that jump over stages: an encoder's output read by a late decoder stage.

    >>> StageGraph.chain(4, skips=[(0, 3)]).inputs_of(3)
    (0, 2)
    """

    stages: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for source, target in self.edges:
            if not 0 <= source < target < self.stages:
                raise PlacementError(f"edge {source} -> {target}: an edge goes from a lower to a higher stage of 0..{self.stages - 1}")
        object.__setattr__(self, "edges", tuple(sorted(set(self.edges))))

    @classmethod
    def chain(cls, stages: int, skips: Iterable[tuple[int, int]] = ()) -> StageGraph:
        """Each stage feeds the next; `skips` are the further edges."""
        return cls(stages, (*((s, s + 1) for s in range(stages - 1)), *((int(a), int(b)) for a, b in skips)))

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The edges that jump over stages."""
        return tuple((a, b) for a, b in self.edges if b != a + 1)

    @property
    def is_chain(self) -> bool:
        return len(self.edges) == self.stages - 1 and not self.skips

    def inputs_of(self, stage: int) -> tuple[int, ...]:
        """The stages whose outputs this one reads."""
        return self._inputs[stage]

    def outputs_of(self, stage: int) -> tuple[int, ...]:
        """The stages that read this one's output."""
        return self._outputs[stage]

    @cached_property
    def _inputs(self) -> tuple[tuple[int, ...], ...]:
        return self._list_neighbours([(b, a) for a, b in self.edges])

    @cached_property
    def _outputs(self) -> tuple[tuple[int, ...], ...]:
        return self._list_neighbours(self.edges)

    @cached_property
    def edge_table(self) -> NDArray[np.int64]:
        """One row per edge: its lower and its higher stage."""
        import numpy as np

        return np.array(self.edges, dtype=np.int64).reshape(-1, 2)

    def _list_neighbours(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        lists: list[list[int]] = [[] for _ in range(self.stages)]
        for stage, other in pairs:
            lists[stage].append(other)
        return tuple(map(tuple, lists))

    @cached_property
    def input_table(self) -> NDArray[np.int64]:
        """One row per stage: its inputs, filled up with -1."""
        return _pad(self._inputs)

    @cached_property
    def output_table(self) -> NDArray[np.int64]:
        """One row per stage: its readers, filled up with -1."""
        return _pad(self._outputs)


def _pad(lists: tuple[tuple[int, ...], ...]) -> NDArray[np.int64]:
    import numpy as np

    width = max(map(len, lists), default=0)
    return np.array([[*others, *[-1] * (width - len(others))] for others in lists], dtype=np.int64).reshape(len(lists), width)
