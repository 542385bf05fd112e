"""A rank's program as a list of operations on prepared cells.

Everything that can be known before a step is settled here once: which cell an input comes from, which channel a message goes
to, which stage and microbatch an operation is for. A step walks the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime import device
from penstock.runtime.activity import clock
from penstock.runtime.cells import EMPTY, NOTHING, Feed
from penstock.runtime.deferred import Deferral
from penstock.runtime.extras import Extras, collect, unwrap
from penstock.runtime.graphs import Graphs
from penstock.runtime.group import Group, Operation, nothing
from penstock.runtime.loss import Loss
from penstock.runtime.overlap import Backward, Overlap, TwoStreams, hook_of, pair
from penstock.runtime.randomness import draw_from
from penstock.runtime.recording import run_backward
from penstock.runtime.result import Share
from penstock.runtime.stage import Stage
from penstock.runtime.values import add_grads, changeable, cut, detached, roots, take_grads, versions
from penstock.runtime.wires import Wires


class Executor(Wires):
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
        number: int = 0,
        graphs: bool = False,
    ) -> None:
        super().__init__(program, rank, group, deadline, number)
        self.stages, self.loss, self.overlap = stages, loss, overlap
        self.feed = NOTHING
        self.extras = Extras()
        self.beside: Backward | None = None
        """The backward that a hook is to run now."""
        self._failed_part: Action | None = None
        self._split = {(part.stage, part.microbatch) for action in program[rank] for part in action.parts if part.kind is Kind.I}
        self.actions = program[rank]
        self.graphs = Graphs(self) if graphs and program.training else None
        self.operations: list[Operation] = [self._alone(action) for action in self.actions]
        self.begun, self.ended = [0] * len(self.actions), [0] * len(self.actions)
        """When each action of the last run began, once it had what it needs, and ended."""
        self.recording = False
        """Whether a device is asked when it has run each action."""
        self.watch: device.Watch | None = None
        """Tells when that was in the last run."""
        self._blank = [EMPTY] * len(self._places)
        self.cells[:] = self._blank

    # Running ----------------------------------------------------------------------------------------------------------

    def run(self, feed: Feed, observe: Callable[[int], None] | None = None) -> Share:
        """Walk the list once."""
        self.feed, self._failed_part = feed, None
        feed.share.microbatches = self.program.microbatches
        activity, begun, ended = self.activity, self.begun, self.ended
        activity.start(self.actions)
        watch = self._set_watch()
        if self.graphs is not None:
            self.graphs.begin()
        try:
            for outbox in self.outboxes.values():
                outbox.begin()
            for inbox in self.inboxes.values():
                inbox.begin()
            # A device's backward on this thread: handing it to another and waiting takes longer than a small layer.
            with collect() as self.extras, torch.autograd.set_multithreading_enabled(False):
                for at, operation in enumerate(self._profiled() if _is_profiled() else self.operations):
                    activity.at = at
                    activity.began = clock()
                    if watch is not None:
                        watch.begin(at)
                    operation()
                    begun[at], ended[at] = activity.began, clock()
                    if watch is not None:
                        watch.end(at)
                    if observe is not None:
                        observe(at)
        except Exception:
            if self._failed_part is None:
                self._failed_part = self.actions[activity.at]
            raise
        finally:
            self.clear()
        activity.stop()
        return feed.share

    def _set_watch(self) -> device.Watch | None:
        """A new one for each step: the last step's may still be asked."""
        self.watch = self.activity.watch = device.watch(len(self.actions)) if self.recording else None
        if self.watch is not None:
            self.watch.start()
        return self.watch

    def _profiled(self) -> list[Operation]:
        """The operations under their actions' text, as `torch.profiler` shows it."""

        def named(action: Action, operation: Operation) -> Operation:
            name = f"penstock::{action}"  # torch reads a bare 2F0 as a name of C++, two letters long, and shows F0

            def ranged() -> None:
                with torch.profiler.record_function(name):
                    operation()

            return ranged

        return list(map(named, self.actions, self.operations))

    @property
    def failed_at(self) -> Action | None:
        """The action that raised, where the last run failed on this rank."""
        return self._failed_part

    def clear(self) -> None:
        """Let go of everything a step held."""
        self.cells[:] = self._blank
        self.feed, self.extras = NOTHING, Extras()
        for inbox in self.inboxes.values():
            inbox.clear()

    def held(self) -> dict[str, int]:
        """How many forward contexts, weight stashes and received messages are held now."""
        counts = {"contexts": 0, "stashes": 0, "received": 0}
        names = {"context": "contexts", "stash": "stashes", "received": "received"}
        for key, cell in self._places.items():
            if key[0] in names and self.cells[cell] is not EMPTY:
                counts[names[key[0]]] += 1
        counts["received"] += sum(inbox.pending() for inbox in self.inboxes.values())
        return counts

    # Operations -------------------------------------------------------------------------------------------------------

    def _alone(self, action: Action) -> Operation:
        """An action by itself, which two streams may have to be told of."""
        operation, overlap = self._operation(action), self.overlap
        if isinstance(overlap, TwoStreams) and action.kind in (Kind.B, Kind.I, Kind.W):
            return partial(overlap.alone, action, operation)
        return operation

    def _operation(self, action: Action) -> Operation:
        if action.sub_actions:
            return self._together(action)
        plain = self._plain(action)
        if self.graphs is not None and action.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            return self.graphs.operation(action, plain)
        return plain

    def _plain(self, action: Action) -> Callable[..., None]:
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
                return nothing  # sharding and reduction are data parallelism's, and there is none here

    def _together(self, action: Action) -> Operation:
        """Parts that run together: by the model's own hook or the overlap executor if there is one, else one after the other."""
        hooked = self._hooked(action)
        if hooked is not None:
            return hooked
        parts = [self._named(part, self._operation(part)) for part in action.sub_actions]
        overlap, activity = self.overlap, self.activity

        def overlapped(run: Overlap) -> None:
            began = activity.began
            run(action, parts)
            activity.began = began

        def all_parts() -> None:
            taken = 0
            for part in parts:
                activity.began = clock()
                part()
                taken += clock() - activity.began
                if activity.watch is not None:
                    activity.watch.fresh = False
            activity.began = clock() - taken  # a part that waits does so after what those before it have done

        return all_parts if overlap is None else lambda: overlapped(overlap)

    def _hooked(self, action: Action) -> Operation | None:
        """A forward and a backward by the hook of the forward's module, if it has one."""
        places = pair(action) if self.program.training and self.graphs is None else None
        forward, backward = (None, None) if places is None else (action.sub_actions[place] for place in places)
        hook = None if forward is None else hook_of(self.stages[forward.stage].module)
        if forward is None or backward is None or hook is None:
            return None
        module = self.stages[forward.stage].module

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs) if self.beside is None else hook(args, kwargs, self.beside)

        takes = self._inputs(forward.stage, forward.microbatch or 0)
        ahead = self._forward(forward.stage, forward.microbatch or 0, call)
        back = self._backward(backward.stage, backward.microbatch or 0)

        def together() -> None:
            taken = [take() for take in takes]  # before the backward is prepared: others may run while this waits
            back(self._named(forward, partial(ahead, taken)))

        return self._named(backward, together)

    def _named(self, part: Action, operation: Operation) -> Operation:
        """The operation, which says of a failure that it was in this part."""

        def named() -> None:
            try:
                operation()
            except Exception:
                self._failed_part = self._failed_part or part
                raise

        return named

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

    def _apply(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[[list[Any]], Any]:
        """Run the stage's module: on the microbatch's own arguments at the front, on what came in elsewhere.

        In training, what comes in are leaves, which torch lets nobody change in place: a module that does gets stand-ins.
        """
        part, others = self.stages[stage], self._fellow_readers(stage)
        module, training = part.module if call is None else call, self.program.training
        front = not self.program.graph.inputs_of(stage)
        single = len(self.program.graph.inputs_of(stage)) == 1

        def apply(leaves: list[Any]) -> Any:
            feed = self.feed
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else None
            if feed.seed is not None:
                draw_from(feed.seed, part.stream, microbatch)
            if front:
                made = module(*feed.args[microbatch]) if kwargs is None else module(*feed.args[microbatch], **kwargs)
                return made if type(made) is Tensor else unwrap(made)
            watched = training and part.changes_input is not False
            inputs = changeable(leaves) if watched else leaves
            try:
                plain = single and kwargs is None and type(inputs[0]) is Tensor
                made = module(inputs[0]) if plain else part.run(inputs, kwargs or {}, call)
            except RuntimeError as error:
                part.look_at_error(error)
                raise
            if watched:
                part.look_for_changes(leaves, inputs, others)
            return made if type(made) is Tensor else unwrap(made)

        return apply

    def _forward(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[..., None]:
        """The forward, of what it takes itself or is given."""
        cells, part = self.cells, self.stages[stage]
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch, call)
        readers = self._readers(stage, microbatch)
        context = self._cell("context", stage, microbatch)
        deferrable = part.deferrable() if (stage, microbatch) in self._split else None

        def forward(taken: list[Any] | None = None) -> None:
            leaves = [take() for take in takes] if taken is None else taken
            deferral = None
            if deferrable is None:
                made = apply(leaves)
            else:
                deferral = Deferral()
                with deferrable.forward(deferral):
                    made = apply(leaves)
            ends, grads = (roots(made), None) if readers else self._finish(made, microbatch)
            extras = self.extras
            side = self._extras(stage, microbatch) if extras.losses or extras.metrics else ()
            cells[context] = (leaves, ends, grads, side, deferral)
            for reader in readers:
                cells[reader] = cut(made)

        return forward

    def _finish(self, made: Any, microbatch: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The loss of a microbatch, and where its backward starts; one that counts for nothing has no backward."""
        feed = self.feed
        if feed.outputs:
            feed.share.outputs[microbatch] = detached(made)
        if not feed.losses or not (self.program.training or self.loss.fits(made)):
            return [], []
        loss, scale = self.loss(made, feed.targets, microbatch), feed.scales[microbatch]
        kept = loss.detach()
        if kept.untyped_storage().nbytes() > kept.element_size():  # torch's mean of squares keeps room for all of them
            kept = kept.clone()
        feed.share.losses[microbatch] = kept, scale
        if not (loss.requires_grad and scale):
            return [], []
        return [loss], [torch.full_like(loss, scale)]

    def _extras(self, stage: int, microbatch: int) -> list[Tensor]:
        """What the forward has made on the side: weighted losses, to go backward from here, and metrics."""
        extras = self.extras
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
            if self.extras.losses or self.extras.metrics:
                self._extras(stage, microbatch)
            for reader in readers:
                cells[reader] = made

        return infer

    # Backward ---------------------------------------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int) -> Callable[..., None]:
        """The backward; given an operation, that one runs it, by a hook which is told of it."""
        cells, part, graph = self.cells, self.stages[stage], self.program.graph
        # The farthest reader's gradient first: the order in which autograd would come to them.
        takes = [self._source("gradients", stage, other, microbatch) for other in sorted(graph.outputs_of(stage), reverse=True)]
        first, more = (takes[0], takes[1:]) if takes else (None, [])
        writers = [self._target("gradients", stage, other, microbatch) for other in sorted(graph.inputs_of(stage), reverse=True)]
        context = self._cell("context", stage, microbatch)
        stash = self._cell("stash", stage, microbatch) if (stage, microbatch) in self._split else None
        deferrable = None if stash is None else part.deferrable()

        def backward(together: Operation | None = None) -> None:
            leaves, ends, grads, side, deferral = cells[context]
            cells[context] = EMPTY
            if first is not None:
                grads = first()
                for take in more:
                    grads = add_grads(grads, take())
            if side or (grads[0] is None if len(grads) == 1 else any(grad is None for grad in grads)):
                ends, grads = _starts(ends, grads, side)
            if together is not None:
                self.beside = Backward(part.module, ends, grads, deferral) if ends else None
                with nullcontext() if self.beside is None else self.beside.expected(deferrable):
                    together()
            elif ends:
                if deferrable is None:
                    run_backward(ends, grads)
                else:
                    deferrable.backward_input(deferral, ends, grads)
            if stash is not None:
                cells[stash] = deferral
            for writer, value in zip(writers, leaves, strict=False):
                cells[writer] = take_grads(value)

        return backward

    def _weights(self, stage: int, microbatch: int) -> Operation:
        cells, cell, part = self.cells, self._cell("stash", stage, microbatch), self.stages[stage]

        def weights() -> None:
            deferral: Deferral = cells[cell]
            cells[cell] = EMPTY
            part.backward_weights(deferral)

        return weights


def _starts(ends: list[Tensor], grads: list[Tensor | None], side: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward starts: what got a gradient, and the side losses."""
    pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
    pairs += [(loss, torch.ones_like(loss)) for loss in side]
    return [end for end, _ in pairs], [grad for _, grad in pairs]


def _is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
