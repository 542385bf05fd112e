"""A rank's program as a list of operations on prepared cells.

Everything that can be known before a step is settled here once: which cell an input comes from, which channel a message goes
to, which stage and microbatch an operation is for. A step walks the list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.deferred import Deferral
from penstock.runtime.extras import collect, unwrap
from penstock.runtime.group import Group
from penstock.runtime.result import Share
from penstock.runtime.stage import Stage
from penstock.runtime.values import add_grads, as_list, cut, detached, roots, take_grads

Operation = Callable[[], None]
Overlap = Callable[[Action, list[Operation]], None]
"""Runs the operations of actions that go together."""


class _Empty:
    """What is in a cell that nothing has been put into."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()


@dataclass
class Feed:
    """What one step is fed with: inputs, keyword arguments and targets by microbatch, and how much each counts."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    seed: int | None = None
    outputs: bool = False
    share: Share = field(default_factory=Share)


@dataclass
class Context:
    """What a forward leaves for the backward."""

    leaves: list[Any]
    roots: list[Tensor]
    grads: list[Tensor | None] | None
    """What the roots' gradients start from where the loss is made here; None where they come from the readers."""
    side: list[Tensor]
    deferral: Deferral | None


class Inbox:
    """The receiving end of a channel: receives are posted in order, and messages go to them in order."""

    def __init__(self, queue: deque[Any], wait: Callable[[Callable[[], bool], str], None], name: str) -> None:
        self.queue, self.wait, self.name = queue, wait, name
        self.posted: deque[int] = deque()

    def pull(self, cells: list[Any], cell: int) -> Any:
        """The message that was posted for the cell."""
        while cells[cell] is EMPTY:
            if not self.queue:
                self.wait(lambda: bool(self.queue), self.name)
            cells[self.posted.popleft()] = self.queue.popleft()
        return cells[cell]


class Executor:
    """One rank's operations for one program."""

    def __init__(
        self, program: Program, rank: int, stages: dict[int, Stage], *, group: Group, deadline: float, overlap: Overlap | None = None
    ) -> None:
        self.program, self.rank, self.stages, self.group, self.deadline = program, rank, stages, group, deadline
        self.overlap = overlap
        self.cells: list[Any] = []
        self.feed: Feed = Feed([], {}, None, [])
        self.training = program.training
        self._places: dict[Any, int] = {}
        self._inboxes: dict[Any, Inbox] = {}
        self.actions = program[rank]
        kinds = {
            (part.stage, part.microbatch): part.kind for action in self.actions for part in action.parts if part.kind in (Kind.B, Kind.I)
        }
        self._split = {key for key, kind in kinds.items() if kind is Kind.I}
        self.operations: list[Operation] = [self._operation(action) for action in self.actions]
        self._blank = [EMPTY] * len(self._places)
        self.cells[:] = self._blank

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, feed: Feed, observe: Callable[[int], None] | None = None) -> Share:
        """Walk the list once."""
        self.feed = feed
        at = 0
        try:
            if observe is None:
                for at, operation in enumerate(self.operations):  # noqa: B007 - `at` names the place of a failure
                    operation()
            else:
                for at, operation in enumerate(self.operations):
                    operation()
                    observe(at)
        except Exception as error:
            error.__penstock_action__ = self.actions[at]  # type: ignore[attr-defined]
            raise
        finally:
            self.clear()
        return feed.share

    def clear(self) -> None:
        """Let go of everything a step held."""
        self.cells[:] = self._blank
        self.feed = Feed([], {}, None, [])
        for inbox in self._inboxes.values():
            inbox.posted.clear()

    def held(self) -> dict[str, int]:
        """How many forward contexts, weight stashes and received messages are held now."""
        counts = {"contexts": 0, "stashes": 0, "received": 0}
        names = {"context": "contexts", "stash": "stashes", "received": "received"}
        for key, cell in self._places.items():
            if key[0] in names and self.cells[cell] is not EMPTY:
                counts[names[key[0]]] += 1
        counts["received"] += sum(len(inbox.posted) for inbox in self._inboxes.values())
        return counts

    # Cells and channels -----------------------------------------------------------------------------------------------

    def _cell(self, *key: Any) -> int:
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = len(self.cells)
            self.cells.append(EMPTY)
        return found

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self.group.wait(self.rank, ready, what, self.deadline)

    def _rank_of(self, stage: int, microbatch: int) -> int:
        return self.program.placement.rank_of(stage, microbatch)

    def _inbox(self, source: int, kind: str) -> Inbox:
        key = (source, self.rank, kind)
        if key not in self._inboxes:
            self._inboxes[key] = Inbox(self.group.channel(key), self._wait, f"{kind} from rank {source}")
        return self._inboxes[key]

    def _source(self, what: str, stage: int, other: int, microbatch: int) -> Callable[[], Any]:
        """How to get what another stage made for this one: `activations` of a lower stage, `gradients` of a higher."""
        cells = self.cells
        if self._rank_of(other, microbatch) == self.rank:
            cell = self._cell("handed", what, other, stage, microbatch)

            def take_handed() -> Any:
                value, cells[cell] = cells[cell], EMPTY
                return value

            return take_handed
        cell = self._cell("received", what, other, stage, microbatch)
        inbox = self._inbox(self._rank_of(other, microbatch), what)

        def take_received() -> Any:
            value = cells[cell]
            if value is EMPTY:
                value = inbox.pull(cells, cell)
            cells[cell] = EMPTY
            return value

        return take_received

    def _target(self, what: str, stage: int, other: int, microbatch: int) -> int:
        """The cell that what this stage made for another goes into: the other's own, or that of its send."""
        here = self._rank_of(other, microbatch) == self.rank
        return self._cell("handed" if here else "sending", what, stage, other, microbatch)

    # Operations -------------------------------------------------------------------------------------------------------

    def _operation(self, action: Action) -> Operation:  # noqa: PLR0911 - one a kind
        if action.sub_actions:
            parts = [self._operation(part) for part in action.sub_actions]
            return self._together(action, parts)
        stage, microbatch = action.stage, action.microbatch or 0
        match action.kind:
            case Kind.F:
                return self._forward(stage, microbatch) if self.training else self._infer(stage, microbatch)
            case Kind.B | Kind.I:
                return self._backward(stage, microbatch)
            case Kind.W:
                return self._weights(stage, microbatch)
            case Kind.SEND_F | Kind.SEND_B:
                return self._send(action)
            case Kind.RECV_F | Kind.RECV_B:
                return self._receive(action)
            case _:
                return _nothing  # sharding and reduction are data parallelism's, and there is none here

    def _together(self, action: Action, parts: list[Operation]) -> Operation:
        """Parts that run together: by the overlap executor if there is one, else one after the other, with the same numbers."""
        overlap = self.overlap
        if overlap is not None:
            return lambda: overlap(action, parts)
        if len(parts) == 2:
            one, two = parts

            def both() -> None:
                one()
                two()

            return both

        def all_parts() -> None:
            for part in parts:
                part()

        return all_parts

    def _send(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", 1) if action.kind is Kind.SEND_F else ("gradients", -1)
        other = action.stage + step if action.peer is None else action.peer
        cells, cell = self.cells, self._cell("sending", what, action.stage, other, microbatch)
        group = self.group
        queue = group.channel((self.rank, self._rank_of(other, microbatch), what))
        parallel = group.parallel

        def send() -> None:
            queue.append(cells[cell])
            cells[cell] = EMPTY
            if parallel:
                group.changed()

        return send

    def _receive(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", -1) if action.kind is Kind.RECV_F else ("gradients", 1)
        other = action.stage + step if action.peer is None else action.peer
        cell = self._cell("received", what, other, action.stage, microbatch)
        posted = self._inbox(self._rank_of(other, microbatch), what).posted

        def receive() -> None:
            posted.append(cell)

        return receive

    def _inputs(self, stage: int, microbatch: int) -> list[Callable[[], Any]]:
        """Where a stage's inputs come from: its neighbour first, then stages farther off."""
        lower = self.program.graph.inputs_of(stage)
        return [self._source("activations", stage, other, microbatch) for other in sorted(lower, reverse=True)]

    def _apply(self, stage: int, microbatch: int) -> Callable[[list[Any]], Any]:
        """Run the stage's module: on the microbatch's own arguments at the front, on what came in elsewhere."""
        part = self.stages[stage]
        module = part.module
        front = not self.program.graph.inputs_of(stage)

        def apply(inputs: list[Any]) -> Any:
            feed = self.feed
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
            if feed.seed is not None:
                part.seed(feed.seed, microbatch)
            if front:
                return module(*feed.args[microbatch], **kwargs)
            if len(inputs) == 1 and type(inputs[0]) is not tuple:
                return module(inputs[0], **kwargs)
            first = inputs[0] if isinstance(inputs[0], tuple) else (inputs[0],)
            return module(*first, *inputs[1:], **kwargs)

        return apply

    def _forward(self, stage: int, microbatch: int) -> Operation:
        cells, part = self.cells, self.stages[stage]
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch)
        readers = [self._target("activations", stage, other, microbatch) for other in self.program.graph.outputs_of(stage)]
        context = self._cell("context", stage, microbatch)
        deferrable = part.deferrable() if (stage, microbatch) in self._split else None
        last = not readers
        loss_fn = part.loss_fn if last else None

        def forward() -> None:
            leaves = [take() for take in takes]
            with collect() as extras:
                if deferrable is None:
                    deferral = None
                    made = unwrap(apply(leaves))
                else:
                    deferral = Deferral()
                    with deferrable.forward(deferral):
                        made = unwrap(apply(leaves))
                if last:
                    ends, grads = self._finish(made, microbatch, loss_fn)
                else:
                    ends, grads = roots(made), None
            side = self._extras(stage, microbatch, extras) if extras.losses or extras.metrics else []
            cells[context] = Context(leaves, ends, grads, side, deferral)
            for reader in readers:
                cells[reader] = cut(made)

        return forward

    def _finish(self, made: Any, microbatch: int, loss_fn: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """The loss of a microbatch, and where its backward starts."""
        feed = self.feed
        if feed.outputs:
            feed.share.outputs[microbatch] = detached(made)
        if loss_fn is None:
            return roots(made), [torch.ones_like(root) for root in roots(made)]
        loss = loss_fn(made) if feed.targets is None else loss_fn(made, feed.targets[microbatch])
        feed.share.losses[microbatch] = loss.detach()
        if not loss.requires_grad:
            return [], []
        return [loss], [torch.full_like(loss, feed.scales[microbatch])]

    def _extras(self, stage: int, microbatch: int, extras: Any) -> list[Tensor]:
        """Weighted side losses, to go backward from here, and metrics."""
        share, scale = self.feed.share, self.feed.scales[microbatch]
        side = [loss * scale for loss in extras.losses]
        if side:
            share.side[stage, microbatch] = torch.stack([loss.detach() for loss in side]).sum()
        for name, value in extras.metrics.items():
            share.metrics.setdefault(name, {})[stage, microbatch] = value
        return [loss for loss in side if loss.requires_grad]

    def _infer(self, stage: int, microbatch: int) -> Operation:
        """A forward that leaves nothing behind."""
        cells = self.cells
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch)
        readers = [self._target("activations", stage, other, microbatch) for other in self.program.graph.outputs_of(stage)]
        loss_fn = self.stages[stage].loss_fn

        def infer() -> None:
            with collect() as extras:
                made = unwrap(apply([take() for take in takes]))
                if not readers:
                    self._finish(made, microbatch, loss_fn if self.feed.targets is not None else None)
            if extras.losses or extras.metrics:
                self._extras(stage, microbatch, extras)
            for reader in readers:
                cells[reader] = made

        return infer

    def _backward(self, stage: int, microbatch: int) -> Operation:
        cells, part = self.cells, self.stages[stage]
        takes = [self._source("gradients", stage, other, microbatch) for other in self.program.graph.outputs_of(stage)]
        lower = sorted(self.program.graph.inputs_of(stage), reverse=True)
        writers = [self._target("gradients", stage, other, microbatch) for other in lower]
        context = self._cell("context", stage, microbatch)
        stash = self._cell("stash", stage, microbatch) if (stage, microbatch) in self._split else None
        deferrable = None if stash is None else part.deferrable()

        def backward() -> None:
            held: Context = cells[context]
            cells[context] = EMPTY
            if takes:
                found = takes[0]()
                for take in takes[1:]:
                    found = add_grads(found, take())
                grads = as_list(found)
            else:
                grads = held.grads or []
            ends = held.roots
            if None in grads or held.side:
                pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
                pairs += [(loss, torch.ones_like(loss)) for loss in held.side]
                ends, grads = [end for end, _ in pairs], [grad for _, grad in pairs]
            if ends:
                if deferrable is None or held.deferral is None:
                    torch.autograd.backward(ends, grads)
                else:
                    deferrable.backward_input(held.deferral, ends, grads)
            if stash is not None:
                cells[stash] = held.deferral
            for writer, leaves in zip(writers, held.leaves, strict=True):
                cells[writer] = take_grads(leaves)

        return backward

    def _weights(self, stage: int, microbatch: int) -> Operation:
        cells, cell, part = self.cells, self._cell("stash", stage, microbatch), self.stages[stage]

        def weights() -> None:
            deferral: Deferral = cells[cell]
            cells[cell] = EMPTY
            part.backward_weights(deferral)

        return weights


def _nothing() -> None:
    """An action that has nothing to do here."""
