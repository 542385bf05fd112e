"""A rank's forwards and backwards as operations on prepared cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import WholeBackwardNeeded
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.side_outputs import SideOutputs, unwrap_stage_output
from penstock.runtime.batch.step_input import EMPTY, NO_INPUT
from penstock.runtime.execution.links import Wires
from penstock.runtime.execution.overlap import Backward
from penstock.runtime.model.module_state import ForwardState
from penstock.runtime.model.random_streams import draw_from
from penstock.runtime.model.recompute import OutputAndLoss, Recomputed
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward, without_gradients_of
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import WatchedInputs, add_grads, check_output, detach_tree, find_differentiable
from penstock.runtime.tensors.dtensor import gather_full
from penstock.runtime.transport.group import Group, Operation

if TYPE_CHECKING:
    from penstock.runtime.model.running_statistics import RunningStatistics
    from penstock.runtime.tensors.dtensor_messages import DTensorPacker


Computed = tuple[Any, list[Tensor], list[Tensor | None] | None]
"""What a forward gives: its output, and where its backward starts and from which gradients."""
Compute = Callable[[list[Any]], Computed]


class Computing(Wires):
    """What the stages of one rank compute for one program, from cells and into cells."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: dict[int, Stage],
        *,
        loss: Loss,
        group: Group,
        deadline: float,
        number: int,
        pieces: DTensorPacker | None,
        statistics: RunningStatistics | None = None,
    ) -> None:
        super().__init__(program, rank, group, deadline, number, pieces=pieces)
        self.stages, self.loss = stages, loss
        self.feed = NO_INPUT
        self.extras = SideOutputs()
        self.beside: Backward | None = None
        """The backward that a hook is to run now."""
        self.actions = program[rank]
        self.statistics = statistics
        self.scattered = statistics.scattered(self.actions) if statistics is not None and program.training else set()
        """The stages whose running statistics are kept apart until the step's end."""
        self._split = {(part.stage, part.microbatch) for action in self.actions for part in action.parts if part.kind is Kind.I}

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

    def _borrowed(self, stage: int, microbatch: int) -> list[bool]:
        """For each input of a stage, whether it lies in memory of the stage that made it."""
        lower = sorted(self.program.graph.inputs_of(stage), reverse=True)
        return [self.group.shares_memory or self._rank_of(other, microbatch) == self.rank for other in lower]

    def _apply(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[[list[Any]], Any]:
        """Run the stage's module: on the microbatch's own arguments at the front, on what came in elsewhere.

        Until it is known whether the module changes its inputs in place, it is free to, see `WatchedInputs`.
        """
        part, others = self.stages[stage], self._fellow_readers(stage)
        if stage in self.scattered and self.statistics is not None:
            call = self.statistics.around(stage, microbatch, part.module if call is None else call)
        module, training = part.module if call is None else call, self.program.training
        front = not self.program.graph.inputs_of(stage)
        borrowed = self._borrowed(stage, microbatch)
        single = len(borrowed) == 1

        def apply(leaves: list[Any]) -> Any:
            feed = self.feed
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else None
            if feed.seed is not None:
                draw_from(feed.seed, part.stream, feed.first + microbatch)
            part.guarded_memory = {}
            if front:
                made = module(*feed.args[microbatch]) if kwargs is None else module(*feed.args[microbatch], **kwargs)
            else:
                free = part.changes_input[training] is not False
                watched = free or bool(others) or not (single and type(leaves[0]) is Tensor and leaves[0].requires_grad)
                watch = WatchedInputs(leaves, borrowed, free=free) if watched else None
                inputs = leaves if watch is None else watch.inputs
                try:
                    plain = single and kwargs is None and type(inputs[0]) is Tensor
                    made = module(inputs[0]) if plain else part.run(inputs, kwargs or {}, call)
                except RuntimeError as error:
                    part.note_error(error)
                    raise
                if watch is not None:
                    part.check_changes(watch, others, training)
                    part.guarded_memory = watch.guarded(others) if others or watch.reasons else {}
            if feed.guards:
                feed.check_unchanged(stage, microbatch, part.changed_copies)
                part.guarded_memory = part.guarded_memory | feed.guarded(microbatch)
            return made if type(made) is Tensor else unwrap_stage_output(made)

        return apply

    def _forward(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[..., None]:
        """The forward, of what it takes itself or is given."""
        cells, part = self.cells, self.stages[stage]
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch, call)
        readers = self._readers(stage, microbatch)
        context = self._cell("context", stage, microbatch)
        deferrable = part.deferrable() if (stage, microbatch) in self._split else None
        never = all(stage != other for other, _ in self._split)
        last = part.module if not readers and isinstance(part.module, Recomputed) else None
        mesh = self.pieces is not None

        def compute(leaves: list[Any]) -> Computed:
            if last is not None:
                last.loss = self._loss_of(microbatch)
            made = apply(leaves)
            return made, *((find_differentiable(made), None) if readers else self._finish(made, microbatch))

        def forward(taken: list[Any] | None = None) -> None:
            leaves = [take() for take in takes] if taken is None else taken
            wanting = [
                find_differentiable(value) for value in leaves
            ]  # before the module may say otherwise, with requires_grad_() or detach_()
            if part.tied:
                with without_gradients_of(part.tied):
                    run(leaves, wanting)
            else:
                run(leaves, wanting)

        def run(leaves: list[Any], wanting: list[list[Tensor]]) -> None:
            if last is not None:
                last.loss = self._loss_of(microbatch)
            deferral = None
            if never or part.whole is not None or (deferrable is None and part.tried):
                made = apply(leaves)
                ends, grads = (find_differentiable(made), None) if readers else self._finish(made, microbatch)
            elif deferrable is not None and part.tried:
                deferral = Deferral()
                deferral.beside = call is not None and self.beside is not None
                try:
                    with deferrable.forward(deferral):
                        made = apply(leaves)
                        ends, grads = (find_differentiable(made), None) if readers else self._finish(made, microbatch)
                except WholeBackwardNeeded as need:
                    raise part.refuse_split(need, "earlier forwards did not do so") from need
            else:
                first = self._observed_forward if deferrable is None else self._first_split_forward
                (made, ends, grads), deferral = first(part, microbatch, leaves, compute, call is not None and self.beside is not None)
            extras = self.extras
            side = self._extras(stage, microbatch) if extras.losses or extras.metrics else ()
            cells[context] = (wanting, ends, grads, side, deferral)
            for reader in readers:
                cells[reader] = part.make_message(made, mesh)

        return forward

    def _first_split_forward(
        self, part: Stage, microbatch: int, leaves: list[Any], compute: Compute, beside: bool
    ) -> tuple[Computed, Deferral | None]:
        """A stage's first forward whose backward is to be split.

        If the forward shows that this cannot be, it is run again for a whole backward, from the state before it. A later one could not:
        other microbatches are on their way with theirs split.
        """
        before = None if beside else self._state(part, microbatch, leaves)
        deferral = Deferral()
        deferral.beside = beside
        try:
            with part.deferrable().forward(deferral):
                made = compute(leaves)
        except WholeBackwardNeeded as need:
            if before is None:
                raise part.refuse_split(need, "a forward that runs another stage's backward cannot be run again") from need
            if not before.restorable:
                raise part.refuse_split(need, "a forward that changes its parameters in place cannot be run again") from need
            part.whole = need.reason
        else:
            part.tried = True
            return made, deferral
        before.restore()
        return compute(leaves), None

    def _observed_forward(
        self, part: Stage, microbatch: int, leaves: list[Any], compute: Compute, beside: bool
    ) -> tuple[Computed, Deferral | None]:
        """A forward for a whole backward, of a stage that is to split others: it shows whether that can be."""
        with part.deferrable().observe(beside=beside) as observation:
            made = compute(leaves)
        part.whole, part.tried = observation.reason, True
        return made, None

    def _state(self, part: Stage, microbatch: int, leaves: list[Any]) -> ForwardState:
        """The state before a forward of a stage."""
        feed, graph = self.feed, self.program.graph
        front, back = not graph.inputs_of(part.index), not graph.outputs_of(part.index)
        modules = [part.module, *([self.loss.fn] if back and isinstance(self.loss.fn, nn.Module) else [])]
        inputs = [
            leaves,
            feed.args[microbatch] if front else None,
            feed.kwargs[part.index][microbatch] if part.index in feed.kwargs else None,
            feed.targets[microbatch] if back and feed.targets is not None else None,
        ]
        return ForwardState.capture(modules, inputs, self.extras)

    def _loss_of(self, microbatch: int) -> Callable[[Any], Tensor] | None:
        """The loss of a microbatch as a function of the output, to be recomputed with it."""
        loss, targets = self.loss, self.feed.targets
        return (lambda made: loss(made, targets, microbatch)) if self.feed.losses else None

    def _finish(self, made: Any, microbatch: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The loss of a microbatch, and where its backward starts; one that counts for nothing has no backward."""
        feed = self.feed
        output, loss = (made.output, made.loss) if isinstance(made, OutputAndLoss) else (made, None)
        if feed.outputs:
            check_output(output)
            feed.share.outputs[microbatch] = gather_full(detach_tree(output))
        if not feed.losses or not (self.program.training or self.loss.can_score(output)):
            return [], []
        loss = self.loss(made, feed.targets, microbatch) if loss is None else loss
        scale = feed.scales[microbatch]
        kept = gather_full(loss.detach())
        if kept.untyped_storage().nbytes() > kept.element_size():  # torch's mean of squares keeps room for all of them
            kept = kept.clone()
        feed.share.losses[microbatch] = kept, scale
        if not (loss.requires_grad and scale):
            return [], []
        return [loss], [torch.full_like(loss, scale * feed.factor)]

    def _extras(self, stage: int, microbatch: int) -> list[Tensor]:
        """What the forward has made on the side: weighted losses, to go backward from here, and metrics."""
        extras = self.extras
        share, scale = self.feed.share, self.feed.scales[microbatch]
        side = [loss * scale for loss in extras.losses]
        if side:
            share.side[stage, microbatch] = torch.stack([gather_full(loss.detach()) for loss in side]).sum()
        for name, value in extras.metrics.items():
            share.metrics.setdefault(name, {})[stage, microbatch] = gather_full(value)
        extras.losses, extras.metrics = [], {}
        factor = self.feed.factor
        return [loss if factor == 1.0 else loss * factor for loss in side if loss.requires_grad]

    def _infer(self, stage: int, microbatch: int) -> Operation:
        """A forward that leaves nothing behind."""
        cells, part, mesh = self.cells, self.stages[stage], self.pieces is not None
        takes, apply = self._inputs(stage, microbatch), self._apply(stage, microbatch)
        readers = self._readers(stage, microbatch)

        def infer() -> None:
            made = apply([take() for take in takes])
            if not readers:
                self._finish(made, microbatch)
            if self.extras.losses or self.extras.metrics:
                self._extras(stage, microbatch)
            for reader in readers:
                cells[reader] = part.make_message(made, mesh)

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
            wanting, ends, grads, side, deferral = cells[context]
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
                if deferrable is None or deferral is None:
                    run_backward(ends, grads)
                else:
                    deferrable.backward_input(deferral, ends, grads)
            if stash is not None:
                cells[stash] = deferral
            for writer, leaves in zip(writers, wanting, strict=False):
                cells[writer] = [leaf.grad for leaf in leaves]

        return backward

    def _weights(self, stage: int, microbatch: int) -> Operation:
        cells, cell, part = self.cells, self._cell("stash", stage, microbatch), self.stages[stage]

        def weights() -> None:
            deferral: Deferral | None = cells[cell]
            cells[cell] = EMPTY
            if deferral is not None:  # else the backward was run whole
                part.backward_weights(deferral)

        return weights


def _starts(ends: list[Tensor], grads: list[Tensor | None], side: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward starts: what got a gradient, and the side losses."""
    pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
    pairs += [(loss, torch.ones_like(loss)) for loss in side]
    return [end for end, _ in pairs], [grad for _, grad in pairs]
