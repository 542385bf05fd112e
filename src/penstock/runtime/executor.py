"""A rank's program as a list of operations on prepared cells.

Everything that can be known before a step is settled here once: which cell an input comes from, which channel a message goes
to, which stage and microbatch an operation is for. A step walks the list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.cells import EMPTY, NOTHING, Context, Feed, Inbox
from penstock.runtime.deferred import Deferral
from penstock.runtime.extras import Extras, collect, unwrap
from penstock.runtime.group import Group
from penstock.runtime.loss import Loss
from penstock.runtime.randomness import draw_from
from penstock.runtime.result import Share
from penstock.runtime.stage import Stage
from penstock.runtime.values import add_grads, changeable, cut, detached, roots, take_grads, versions

Operation = Callable[[], None]
Overlap = Callable[[Action, list[Operation]], None]
"""Runs the operations of actions that go together."""

_run_backward = Variable._execution_engine.run_backward
"""What `torch.autograd.backward` calls once it has checked its arguments, which takes longer than the backward of a small layer."""


class Executor:
    """One rank's operations for one program."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: dict[int, Stage],
        *,
        loss: Loss,
        group: Group,
        deadline: float,
        overlap: Overlap | None = None,
    ) -> None:
        self.program, self.rank, self.stages, self.loss, self.group, self.deadline = program, rank, stages, loss, group, deadline
        self.overlap = overlap
        self.cells: list[Any] = []
        self.feed = NOTHING
        self.extras = Extras()
        self._failed_part: Action | None = None
        self._places: dict[Any, int] = {}
        self._inboxes: dict[Any, Inbox] = {}
        self.actions = program[rank]
        self._split = {(part.stage, part.microbatch) for action in self.actions for part in action.parts if part.kind is Kind.I}
        self.operations: list[Operation] = [self._operation(action) for action in self.actions]
        self._blank = [EMPTY] * len(self._places)
        self.cells[:] = self._blank

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, feed: Feed, observe: Callable[[int], None] | None = None) -> Share:
        """Walk the list once."""
        self.feed, self._failed_part = feed, None
        feed.share.microbatches = self.program.microbatches
        at = 0
        try:
            with collect() as self.extras:
                for at, operation in enumerate(self.operations):
                    operation()
                    if observe is not None:
                        observe(at)
        except Exception:
            if self._failed_part is None:
                self._failed_part = self.actions[at]
            raise
        finally:
            self.clear()
        return feed.share

    @property
    def failed_at(self) -> Action | None:
        """The action that raised, where the last run failed on this rank."""
        return self._failed_part

    def clear(self) -> None:
        """Let go of everything a step held."""
        self.cells[:] = self._blank
        self.feed = NOTHING
        for inbox in self._inboxes.values():
            inbox.channel.posted.clear()

    def held(self) -> dict[str, int]:
        """How many forward contexts, weight stashes and received messages are held now."""
        counts = {"contexts": 0, "stashes": 0, "received": 0}
        names = {"context": "contexts", "stash": "stashes", "received": "received"}
        for key, cell in self._places.items():
            if key[0] in names and self.cells[cell] is not EMPTY:
                counts[names[key[0]]] += 1
        counts["received"] += sum(len(inbox.channel.posted) for inbox in self._inboxes.values())
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

    def _inbox(self, source: int, what: str) -> Inbox:
        key = (source, self.rank, what)
        if key not in self._inboxes:
            self._inboxes[key] = Inbox(self.group, key, self._wait)
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
            return self._together(action)
        stage, microbatch = action.stage, action.microbatch or 0
        match action.kind:
            case Kind.F:
                return self._forward(stage, microbatch) if self.program.training else self._infer(stage, microbatch)
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

    def _together(self, action: Action) -> Operation:
        """Parts that run together: by the overlap executor if there is one, else one after the other, with the same numbers."""
        parts = [self._named(part, self._operation(part)) for part in action.sub_actions]
        overlap = self.overlap
        if overlap is not None:
            return lambda: overlap(action, parts)

        def all_parts() -> None:
            for part in parts:
                part()

        return all_parts

    def _named(self, part: Action, operation: Operation) -> Operation:
        """The operation, which says of a failure that it was in this part."""

        def named() -> None:
            try:
                operation()
            except Exception:
                self._failed_part = part
                raise

        return named

    def _send(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", 1) if action.kind is Kind.SEND_F else ("gradients", -1)
        other = action.stage + step if action.peer is None else action.peer
        cells, cell = self.cells, self._cell("sending", what, action.stage, other, microbatch)
        group, target = self.group, self._rank_of(other, microbatch)
        channel, parallel = group.channel((self.rank, target, what)), group.parallel
        messages, slots = channel.messages, self._slots(target, action.kind)

        def send() -> None:
            if len(messages) >= slots and not channel.has_room(slots):
                self._wait(lambda: channel.has_room(slots), f"rank {target} to take {what}")
            messages.append(cells[cell])
            cells[cell] = EMPTY
            if parallel:
                group.changed()

        return send

    def _slots(self, target: int, kind: Kind) -> int:
        """How many messages may be under way to another rank at once."""
        buffers = self.program.buffers
        return self.program.microbatches * self.program.stages if buffers is None else buffers.channels[self.rank, target, kind]

    def _receive(self, action: Action) -> Operation:
        microbatch = action.microbatch or 0
        what, step = ("activations", -1) if action.kind is Kind.RECV_F else ("gradients", 1)
        other = action.stage + step if action.peer is None else action.peer
        cell = self._cell("received", what, other, action.stage, microbatch)
        posted = self._inbox(self._rank_of(other, microbatch), what).channel.posted
        group, parallel = self.group, self.group.parallel

        def receive() -> None:
            posted.append(cell)
            if parallel:
                group.changed()

        return receive

    # Forward ----------------------------------------------------------------------------------------------------------

    def _inputs(self, stage: int, microbatch: int) -> list[Callable[[], Any]]:
        """Where a stage's inputs come from: its neighbour first, then stages farther off."""
        lower = self.program.graph.inputs_of(stage)
        return [self._source("activations", stage, other, microbatch) for other in sorted(lower, reverse=True)]

    def _readers(self, stage: int, microbatch: int) -> list[int]:
        """The cells of those who read a stage's output."""
        return [self._target("activations", stage, other, microbatch) for other in self.program.graph.outputs_of(stage)]

    def _fellow_readers(self, stage: int) -> list[int]:
        """Other stages that read what this one reads."""
        graph = self.program.graph
        return [other for source in graph.inputs_of(stage) for other in graph.outputs_of(source) if other != stage]

    def _apply(self, stage: int, microbatch: int) -> Callable[[list[Any]], Any]:
        """Run the stage's module: on the microbatch's own arguments at the front, on what came in elsewhere."""
        part = self.stages[stage]
        module = part.module
        front = not self.program.graph.inputs_of(stage)

        def apply(inputs: list[Any]) -> Any:
            feed = self.feed
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
            if feed.seed is not None:
                draw_from(feed.seed, stage, microbatch)
            made = module(*feed.args[microbatch], **kwargs) if front else part.run(inputs, kwargs)
            return made if type(made) is Tensor else unwrap(made)

        return apply

    def _forward(self, stage: int, microbatch: int) -> Operation:
        cells, part, extras = self.cells, self.stages[stage], self._extras
        takes, apply = self._inputs(stage, microbatch), self._guarded(stage, microbatch)
        readers = self._readers(stage, microbatch)
        context = self._cell("context", stage, microbatch)
        deferrable = part.deferrable() if (stage, microbatch) in self._split else None
        last = not readers

        def forward() -> None:
            leaves = [take() for take in takes]
            if deferrable is None:
                deferral = None
                made = apply(leaves)
            else:
                deferral = Deferral()
                with deferrable.forward(deferral):
                    made = apply(leaves)
            if last:
                ends, grads = self._finish(made, microbatch)
            else:
                ends, grads = roots(made), None
            cells[context] = Context(leaves, ends, grads, extras(stage, microbatch), deferral)
            for reader in readers:
                cells[reader] = cut(made)

        return forward

    def _guarded(self, stage: int, microbatch: int) -> Callable[[list[Any]], Any]:
        """Run the stage's module on leaves, which torch lets nobody change in place; on stand-ins for them where the module does."""
        part, apply, others = self.stages[stage], self._apply(stage, microbatch), self._fellow_readers(stage)

        def guarded(leaves: list[Any]) -> Any:
            if part.changes_input is not False and leaves:
                given = changeable(leaves)
                made = apply(given)
                part.look_for_changes(leaves, given, others)
                return made
            try:
                return apply(leaves)
            except RuntimeError as error:
                if "leaf Variable that requires grad" in str(error):
                    part.changes_input = True
                    error.add_note(f"stage {stage} has changed its input in place for the first time, which the next step will allow")
                raise

        return guarded

    def _finish(self, made: Any, microbatch: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The loss of a microbatch, and where its backward starts; one that counts for nothing has no backward."""
        feed = self.feed
        if feed.outputs:
            feed.share.outputs[microbatch] = detached(made)
        if not feed.losses or not (self.program.training or self.loss.fits(made)):
            return [], []
        loss, scale = self.loss(made, feed.targets, microbatch), feed.scales[microbatch]
        feed.share.losses[microbatch] = loss.detach(), scale
        if not (loss.requires_grad and scale):
            return [], []
        return [loss], [torch.full_like(loss, scale)]

    def _extras(self, stage: int, microbatch: int) -> list[Tensor]:
        """What the forward has made on the side: weighted losses, to go backward from here, and metrics."""
        extras = self.extras
        if not (extras.losses or extras.metrics):
            return []
        share, scale = self.feed.share, self.feed.scales[microbatch]
        side = [loss * scale for loss in extras.losses]
        if side:
            share.side[stage, microbatch] = torch.stack([loss.detach() for loss in side]).sum()
        for name, value in extras.metrics.items():
            share.metrics.setdefault(name, {})[stage, microbatch] = value
        extras.losses, extras.metrics = [], {}
        return [loss for loss in side if loss.requires_grad]

    def _infer(self, stage: int, microbatch: int) -> Operation:
        """A forward that leaves nothing behind."""
        cells = self.cells
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch)
        readers, others = self._readers(stage, microbatch), self._fellow_readers(stage)

        def infer() -> None:
            inputs = [take() for take in takes]
            before = versions(inputs) if others else None
            made = apply(inputs)
            if others and versions(inputs) != before:
                raise ScheduleError(f"stage {stage} changes its input in place, but stage {others[0]} reads the same value: clone it")
            if not readers:
                self._finish(made, microbatch)
            self._extras(stage, microbatch)
            for reader in readers:
                cells[reader] = made

        return infer

    # Backward ---------------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int) -> Operation:
        cells, part, graph = self.cells, self.stages[stage], self.program.graph
        # The farthest reader's gradient first: the order in which autograd would come to them.
        takes = [self._source("gradients", stage, other, microbatch) for other in sorted(graph.outputs_of(stage), reverse=True)]
        writers = [self._target("gradients", stage, other, microbatch) for other in sorted(graph.inputs_of(stage), reverse=True)]
        context = self._cell("context", stage, microbatch)
        stash = self._cell("stash", stage, microbatch) if (stage, microbatch) in self._split else None
        deferrable = None if stash is None else part.deferrable()

        def backward() -> None:
            held: Context = cells[context]
            cells[context] = EMPTY
            grads = held.grads
            for number, take in enumerate(takes):
                grads = take() if number == 0 else add_grads(grads or [], take())
            ends, grads = _starts(held, grads or [])
            if ends:
                if deferrable is None or held.deferral is None:
                    _run_backward(tuple(ends), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
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


def _starts(held: Context, grads: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where a backward starts: what got a gradient, and the side losses."""
    if not held.side and all(grad is not None for grad in grads):
        return held.roots, grads
    pairs = [(end, grad) for end, grad in zip(held.roots, grads, strict=True) if grad is not None]
    pairs += [(loss, torch.ones_like(loss)) for loss in held.side]
    return [end for end, _ in pairs], [grad for _, grad in pairs]


def _nothing() -> None:
    """An action that has nothing to do here."""
