"""Runs one rank's program.

Everything that can be known before a step is settled once, when the executor is built: which register an input comes from, which
channel a message goes to, which stage and microbatch an operation is for. A step then walks a flat list of operations.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare, collect
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.device.autocast import AUTOCAST_KINDS
from penstock.runtime.device.host_memory import HostMemory
from penstock.runtime.device.timing import ActionTimer, clock, create_timer
from penstock.runtime.execution.cuda_graphs import Graphs
from penstock.runtime.execution.links import RankEdges
from penstock.runtime.execution.operations import StageOperations
from penstock.runtime.execution.overlap import Overlap, OverlapHooks, TwoStreams
from penstock.runtime.execution.spread import SpreadOperations
from penstock.runtime.model.running_statistics import RunningStatistics
from penstock.runtime.model.stage import Stage
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.spread_vocabulary import SpreadVocabulary
from penstock.runtime.sequence.prefix import Prefixes
from penstock.runtime.split_backward.deferrable import keep_wrappers
from penstock.runtime.torch_internals.autograd import is_profiling
from penstock.runtime.transport.group import Group, Operation, do_nothing

logger = logging.getLogger(__name__)


class Executor:
    """One rank's operations for one program, and the loop that runs them.

    Its collaborators are public, because CUDA graphs, overlap hooks and the recorder use them too: `links` connect stages to stages
    through registers and channels, and `compute` builds forwards and backwards.
    """

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
        blocking: Collection[Kind] = (),
        host: HostMemory | None = None,
        vocabulary: SpreadVocabulary | None = None,
    ) -> None:
        self.program, self.rank, self.group, self.data, self.overlap = program, rank, group, data, overlap
        self.actions = program[rank]
        self.activity = group.activity(rank)
        spread = None if vocabulary is None else SpreadOperations(vocabulary, program.stages, training=program.training)
        options: dict[str, Any] = {"packer": data.packer, "blocking": blocking, "spread": spread}
        self.links = RankEdges(program, rank, group, deadline=deadline, number=number, **options)
        prefixes = Prefixes(program.slices) if program.slices > 1 else None
        self.compute = StageOperations(self.links, stages, loss, statistics, prefixes, host=host)
        if self.compute.moves is not None and graphs:
            raise ScheduleError(
                "the program moves activations to host memory, but graphs=True keeps them at fixed addresses: leave one out"
            )
        self.failed_at: Action | None = None
        """The action that raised, if the last run failed on this rank."""
        self.reduces = [action.stage for action in self.actions if action.kind is Kind.REDUCE_GRAD] or list(stages)
        """The stages in the order in which their gradients are complete."""
        self.autocast: list[str] = []
        """The kinds of device on which autocast is on in this step."""
        self.graphs = self.compute.graphs = Graphs(self.compute, self.actions) if graphs and program.training else None
        self.hooks = OverlapHooks(self.compute, data, self.graphs is not None)
        self.replace_operations(self.actions, [self._build_alone(action) for action in self.actions])
        self.recording = False
        """Whether to note when each action has run."""
        self.watch: ActionTimer | None = None
        """The device's notes of the last recorded run."""

    # Running ----------------------------------------------------------------------------------------------------------

    def replace_operations(self, actions: Sequence[Action], operations: Sequence[Operation]) -> None:
        """Run these operations from now on, which may call the program's own; reports name them by `actions`."""
        self.actions, self.operations = tuple(actions), list(operations)
        self._busy = [(at, operation) for at, operation in enumerate(operations) if operation is not do_nothing]
        self.begun, self.ended = [0] * len(self.operations), [0] * len(self.operations)
        """When each action of the last recorded run began, after waiting for its inputs, and ended."""

    def run(self, step_input: StepInput) -> ResultShare:
        """Run all operations once."""
        self.compute.step_input, self.failed_at = step_input, None
        step_input.share.microbatches = self.program.microbatches
        self.autocast = [kind for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind)]
        activity = self.activity
        activity.actions, activity.at, activity.running = self.actions, 0, True
        # A new watch for each step, because the last step's may still be read.
        self.watch = activity.watch = create_timer(len(self.actions)) if self.recording else None
        if self.graphs is not None:
            self.graphs.begin_step(bool(self.autocast))
        if self.links.spread is not None:
            self.links.spread.vocabulary.record_times(self.recording)
        try:
            self.links.begin_step()
            # The backward of a device runs on this thread: handing it to another one takes longer than a small layer.
            with (
                collect() as self.compute.side_outputs,
                torch.autograd.set_multithreading_enabled(False),
                keep_wrappers(bool(self.compute.split)),
            ):
                if self.recording or is_profiling():
                    self._run_timed()
                else:
                    for at, operation in self._busy:
                        activity.at, activity.began = at, clock()
                        operation()
                if self.links.spread is not None:
                    self.links.spread.finish_evaluation(step_input)
        except Exception:
            if self.failed_at is None:
                self.failed_at = self.actions[activity.at]
            raise
        finally:
            self.compute.reset()
            self.links.end_step()
        activity.running = False
        if logger.isEnabledFor(logging.DEBUG) and (table := self.links.describe_new_messages()):
            logger.debug("%s sends messages of new forms:\n%s", self.group.describe_rank(self.rank), table)
        return step_input.share

    def _run_timed(self) -> None:
        """Run all operations, and note when each begins and ends."""
        activity, begun, ended = self.activity, self.begun, self.ended
        if (watch := self.watch) is not None:
            watch.start()
        for at, operation in enumerate(self._label_operations() if is_profiling() else self.operations):
            activity.at, activity.began = at, clock()
            if watch is not None:
                watch.begin(at)
            operation()
            begun[at], ended[at] = activity.began, clock()
            if watch is not None:
                watch.end(at)

    def _label_operations(self) -> list[Operation]:
        """The operations under their actions' text, as `torch.profiler` shows it."""

        def run_labelled(action: Action, operation: Operation) -> None:
            with torch.profiler.record_function(f"penstock::{action}"):  # torch reads a bare 2F0 as a mangled C++ name and shows F0
                operation()

        return [partial(run_labelled, *pair) for pair in zip(self.actions, self.operations, strict=True)]

    # Building operations ----------------------------------------------------------------------------------------------

    def _build_alone(self, action: Action) -> Operation:
        """The operation of an action of the program; two streams run a backward where its forward ran."""
        operation, overlap = self._build(action), self.overlap
        if isinstance(overlap, TwoStreams) and action.kind in (Kind.B, Kind.I, Kind.W):
            return partial(overlap.run_alone, action, operation)
        return operation

    def _build(self, action: Action) -> Operation:
        stage, microbatch, compute = action.stage, action.unit(self.program.slices), self.compute
        if action.sub_actions:
            return self._build_overlapped(action)
        match action.kind:
            case Kind.F:
                return self.data.wrap(Kind.F, stage, compute.forward(stage, microbatch))
            case Kind.B | Kind.I | Kind.W:
                build = compute.weights if action.kind is Kind.W else compute.backward
                return self.data.wrap(action.kind, stage, self._leave_autocast(build(stage, microbatch)))
            case Kind.SEND_F | Kind.SEND_B | Kind.WAIT_SEND_F | Kind.WAIT_SEND_B:
                return self.links.wait_send(action) if action.kind.is_send_wait else self.links.send(action)
            case Kind.RECV_F | Kind.RECV_B:
                return self.links.receive(action)
            case _:
                return self._build_other(action)

    def _build_other(self, action: Action) -> Operation:
        """An action of a spread vocabulary, a copy of an activation, or an action of a whole stage."""
        if action.kind.is_spread:
            assert self.links.spread is not None
            operation = self._leave_autocast(self.links.spread.operation(action, self.compute))
            return self.data.wrap_outside(operation) if action.kind is Kind.T else operation
        moves = self.compute.moves if action.kind.is_copy else None
        return self.data.operation(action.kind, action.stage) if moves is None else moves.operation(action)

    def _leave_autocast(self, operation: Operation) -> Operation:
        """A backward runs in the types that its forward chose, so autocast is turned off for it."""

        def run_outside() -> None:
            if self.autocast:
                with ExitStack() as stack:
                    for kind in self.autocast:
                        stack.enter_context(torch.autocast(kind, enabled=False))
                    operation()
            else:
                operation()

        return run_outside

    def _build_overlapped(self, action: Action) -> Operation:
        """Actions that run together: by the module's own hook, else by the overlap function, else one after the other."""
        parts = [self._note_failure(part, self._build(part)) for part in action.sub_actions]
        overlap, activity = self.overlap, self.activity

        def run_overlapped(run: Overlap) -> None:
            began = activity.began
            run(action, parts)
            activity.began = began

        def run_in_turn() -> None:
            taken = 0
            for part in parts:
                activity.began = clock()
                part()
                taken += clock() - activity.began
                if activity.watch is not None:
                    activity.watch.fresh = False
            activity.began = clock() - taken  # a later part waits after the earlier ones have run: count their work, not the wait

        unhooked = run_in_turn if overlap is None else partial(run_overlapped, overlap)
        hooked = self.hooks.build(action, self._note_failure)
        if hooked is None:
            return unhooked
        return lambda: unhooked() if self.autocast else hooked()  # a backward leaves autocast, a hook cannot

    def _note_failure(self, part: Action, operation: Operation) -> Operation:
        """The operation; if it raises, the failure is said to be in this part of an overlapped action."""

        def run() -> None:
            try:
                operation()
            except Exception:
                self.failed_at = self.failed_at or part
                raise

        return run
