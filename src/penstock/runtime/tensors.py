"""The connections that carry tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.runtime.device import direct_connection, direct_tensor, stop
from penstock.runtime.group import Route
from penstock.runtime.stores import PrefixStore


class Tensors:
    """One connection for all ranks, or one for each channel: then no message waits behind one of another channel."""

    def __init__(self, board: Any, rank: int, ranks: int, deadline: float, *, edges: bool) -> None:
        self.board, self.rank, self.deadline, self.edges = PrefixStore("tensors", board), rank, deadline, edges
        self._shared = None if edges else direct_connection(self.board, rank, ranks, deadline)
        self._edges: dict[Route, Any] = {}
        self._warm: set[Any] = set()

    def of(self, route: Route, peer: int) -> tuple[Any, int]:
        """The connection of a route, and the peer's number there."""
        if not self.edges:
            return self._shared, peer
        return self._edges[route], int(peer == route[1])

    def open(self, routes: Sequence[Route]) -> None:
        """Connect what is not connected yet, in an order that is the same on every rank, and send something small both ways."""
        for route in routes:
            source, target, what = route
            pair = route if self.edges else (min(source, target), max(source, target))
            if self.rank not in (source, target) or pair in self._warm:
                continue
            self._warm.add(pair)
            if self.edges:
                board = PrefixStore(f"{source}/{target}/{what}", self.board)
                self._edges[route] = direct_connection(board, int(self.rank == target), 2, self.deadline)
            self._greet(route, first=self.rank == min(source, target))

    def _greet(self, route: Route, *, first: bool) -> None:
        connection, peer = self.of(route, route[0] if self.rank == route[1] else route[1])
        sent, got = direct_tensor(), direct_tensor()
        for sends in (first, not first):
            (connection.send([sent], peer, 0) if sends else connection.recv([got], peer, 0)).wait()

    def stop(self) -> None:
        for connection in (self._shared, *self._edges.values()):
            if connection is not None:
                stop(connection)
        self._shared = None
        self._edges.clear()
