"""A rank's program as a list of operations on prepared cells.

Everything that can be known before a step is settled here once: which cell an input comes from, which channel a message goes
to, which stage and microbatch an operation is for. A step walks the list.

The table of what a rank sends, for the debug log: written in steps in which anything of it is new.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any

import torch

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.batch.side_outputs import SideOutputs, collect
from penstock.runtime.batch.step_input import EMPTY, NO_INPUT, StepInput
from penstock.runtime.device import device
from penstock.runtime.execution.cuda_graphs import Graphs
from penstock.runtime.execution.operations import Computing
from penstock.runtime.execution.overlap import HOOK, Overlap, TwoStreams, hook_of, pair
from penstock.runtime.model.recompute import Recomputed
from penstock.runtime.model.running_statistics import RunningStatistics
from penstock.runtime.model.stage import Stage
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.split_backward.deferrable import keep_wrappers
from penstock.runtime.transport.activity import clock
from penstock.runtime.transport.group import Group, Operation, Outbox, Route

logger = logging.getLogger(__name__)

AUTOCAST = ("cpu", "cuda")
"""Devices on which operators may choose their types by themselves."""


class Executor(Computing):
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
        data: DataParallel,
        statistics: RunningStatistics | None = None,
        overlap: Overlap | None = None,
        number: int = 0,
        graphs: bool = False,
    ) -> None:
        given: dict[str, Any] = {"loss": loss, "group": group, "deadline": deadline, "number": number}
        super().__init__(program, rank, stages, **given, pieces=data.packer, statistics=statistics)
        self.overlap, self.data = overlap, data
        self._failed_part: Action | None = None
        self._passed_over: set[int] = set()
        """The stages whose hook it was said of."""
        self.reduces = [action.stage for action in self.actions if action.kind is Kind.REDUCE_GRAD] or list(stages)
        """The stages in the order in which their gradients are complete."""
        self.autocast: list[str] = []
        """The devices on which this step's operators choose their types."""
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

    def run(self, feed: StepInput, observe: Callable[[int], None] | None = None) -> ResultShare:
        """Walk the list once."""
        self.feed, self._failed_part = feed, None
        feed.share.microbatches = self.program.microbatches
        self.autocast = [kind for kind in AUTOCAST if torch.is_autocast_enabled(kind)]
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
            with collect() as self.extras, torch.autograd.set_multithreading_enabled(False), keep_wrappers(bool(self._split)):
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
        if logger.isEnabledFor(logging.DEBUG) and (said := new_sizes(self.sends, self.outboxes)):
            logger.debug("%s sends what is new:\n%s", self.group.called(self.rank), said)
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
        self.feed, self.extras = NO_INPUT, SideOutputs()
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
                forward = self._forward(stage, microbatch) if self.program.training else self._infer(stage, microbatch)
                return self.data.around(Kind.F, stage, forward)
            case Kind.B | Kind.I:
                return self.data.around(action.kind, stage, self._out_of_autocast(self._backward(stage, microbatch)))
            case Kind.W:
                return self.data.around(Kind.W, stage, self._out_of_autocast(self._weights(stage, microbatch)))
            case Kind.SEND_F | Kind.SEND_B:
                return self._send(action)
            case Kind.RECV_F | Kind.RECV_B:
                return self._receive(action)
            case _:
                return self.data.operation(action.kind, stage)

    def _out_of_autocast(self, operation: Operation) -> Operation:
        """A backward runs in the types that its forward chose, whatever context the step is in."""

        def outside() -> None:
            if self.autocast:
                with ExitStack() as stack:
                    for kind in self.autocast:
                        stack.enter_context(torch.autocast(kind, enabled=False))
                    operation()
            else:
                operation()

        return outside

    def _together(self, action: Action) -> Operation:
        """Parts that run together: by the model's own hook or the overlap executor if there is one, else one after the other."""
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

        apart = all_parts if overlap is None else partial(overlapped, overlap)
        hooked = self._hooked(action)
        return (
            apart if hooked is None else lambda: apart() if self.autocast else hooked()
        )  # a backward goes out of autocast, a hook stays in

    def _hooked(self, action: Action) -> Operation | None:
        """A forward and a backward by the hook of the forward's module, if it has one."""
        places = pair(action) if self.program.training else None
        if places is None:
            return None
        forward, backward = (action.sub_actions[place] for place in places)
        module = self.stages[forward.stage].module
        hook = hook_of(module.module if isinstance(module, Recomputed) else module)
        if hook is None or self._passes_over(action, forward.stage):
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs) if self.beside is None else hook(args, kwargs, self.beside)

        takes = self._inputs(forward.stage, forward.microbatch or 0)
        ahead = self._forward(forward.stage, forward.microbatch or 0, call)
        back = self._backward(backward.stage, backward.microbatch or 0)

        def together() -> None:
            taken = [take() for take in takes]  # before the backward is prepared: others may run while this waits
            back(self._named(forward, partial(ahead, taken)))

        return self._named(backward, together)

    def _passes_over(self, action: Action, stage: int) -> bool:
        """Whether the hook of a stage's module cannot be used; says so once for each stage."""
        reasons = {
            "work is recorded with graphs=True, a forward and a backward apart": self.graphs is not None,
            "the stage is recomputed": isinstance(self.stages[stage].module, Recomputed),
            "stages are in shards, or sum their gradients in another precision": any(
                self.data.surrounds(part.stage) for part in action.sub_actions
            ),
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None and stage not in self._passed_over:
            self._passed_over.add(stage)
            logger.warning("%s of stage %d is passed over, and a backward runs beside its forward as without it: %s", HOOK, stage, why)
        return why is not None

    def _named(self, part: Action, operation: Operation) -> Operation:
        """The operation, which says of a failure that it was in this part."""

        def named() -> None:
            try:
                operation()
            except Exception:
                self._failed_part = self._failed_part or part
                raise

        return named


def _is_profiled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def new_sizes(sends: Mapping[Route, Sequence[Action]], outboxes: Mapping[Route, Outbox]) -> str:
    """A line for each run of messages of one stage that look the same; empty where all look as they did."""
    rows = [row for route, outbox in outboxes.items() for row in _rows(route, sends[route], outbox)]
    if not rows:
        return ""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows)


def _rows(route: Route, sends: Sequence[Action], outbox: Outbox) -> Iterator[tuple[str, ...]]:
    told = [(sends[number], form) for number, form in outbox.learned()]
    for (_, said, size), run in groupby(told, key=lambda one: (one[0].stage, str(one[1]), one[1].size)):
        actions = [action for action, _ in run]
        last = f" to {actions[-1]}" if len(actions) > 1 else ""
        yield f"{actions[0]}{last}", f"{route[2]} to rank {route[1]}", said, f"{size} bytes", f"{len(actions)} times"
