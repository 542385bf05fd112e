"""The forwards and backwards of one rank's stages, as operations on registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import WholeBackwardNeeded
from penstock.ir.kind import Kind
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import SideOutputs, unwrap_stage_output
from penstock.runtime.batch.step_input import NO_INPUT
from penstock.runtime.device.host_memory import HostMemory
from penstock.runtime.execution.cuda_graphs import Graphs, RecordedForward
from penstock.runtime.execution.links import RankEdges
from penstock.runtime.execution.moves import ActivationMoves, has_moves
from penstock.runtime.execution.overlap import Backward
from penstock.runtime.model.module_state import ForwardState
from penstock.runtime.model.random_streams import draw_from
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.transforms import OutputAndLoss, Recomputed
from penstock.runtime.sequence.prefix import Prefixes
from penstock.runtime.split_backward.deferrable import refuse_gradients_of, run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import WatchedInputs, add_grads, check_output, detach_tree, find_differentiable
from penstock.runtime.tensors.dtensor import gather_full
from penstock.runtime.transport.group import EMPTY, Operation

if TYPE_CHECKING:
    from penstock.runtime.model.running_statistics import RunningStatistics

Computed = tuple[Any, list[Tensor], list[Tensor | None] | None]
"""A forward's output, and the tensors and gradients that its backward starts from."""
Compute = Callable[[list[Any]], Computed]


class StageOperations:
    """Builds the compute operations of one rank's stages: F, B, I and W.

    The executor sets `step_input` and `side_outputs` before it runs a step and resets them after it; the operations read them when they
    run. Everything that does not change from step to step (registers, channels, stages) is bound when an operation is built. With slices,
    `microbatch` is the number of a slice among those of all microbatches (`Action.unit`).
    """

    def __init__(
        self,
        links: RankEdges,
        stages: dict[int, Stage],
        loss: Loss,
        statistics: RunningStatistics | None = None,
        prefixes: Prefixes | None = None,
        *,
        host: HostMemory | None = None,
    ) -> None:
        self.links, self.stages, self.loss = links, stages, loss
        self.prefixes = prefixes
        """The memory of earlier slices; None if sequences are not cut."""
        self.program = links.program
        self.registers = links.registers
        self.step_input = NO_INPUT
        self.side_outputs = SideOutputs()
        self.graphs: Graphs | None = None
        """Stages that are launched as CUDA graphs, if any; set before operations are built."""
        self.hooked_backward: Backward | None = None
        """The backward that an overlap hook is to run now."""
        actions = self.program[links.rank]
        self.statistics = statistics
        self.unordered = statistics.find_scattered(actions) if statistics is not None and self.program.training else set()
        """The stages whose running statistics are kept apart until the end of the step."""
        slices = self.program.slices
        self.split = {(part.stage, part.unit(slices)) for action in actions for part in action.parts if part.kind is Kind.I}
        """The stages and microbatches whose backward is split into I and W."""
        self.moves = ActivationMoves(self, host or HostMemory()) if has_moves(self.program) else None
        """Moves activations to host memory and back, if the program does so."""

    def reset(self) -> None:
        """Let go of everything that belongs to a step."""
        self.step_input, self.side_outputs = NO_INPUT, SideOutputs()
        if self.moves is not None:
            self.moves.reset()
        if self.prefixes is not None:
            self.prefixes.reset()
        if self.links.spread is not None:
            self.links.spread.reset()

    # Forward ----------------------------------------------------------------------------------------------------------

    def _apply(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[[list[Any]], Any]:
        """Run the stage's module: the first stage on the microbatch's own arguments, others on their inputs.

        Until it is known whether the module changes its inputs in place, it may do so; `WatchedInputs` finds out.
        """
        part, others = self.stages[stage], self.links.list_fellow_readers(stage)
        if stage in self.unordered and self.statistics is not None:
            call = self.statistics.wrap_forward(stage, microbatch, part.module if call is None else call)
        module, training = part.module if call is None else call, self.program.training
        borrowed = self.links.find_borrowed_inputs(stage, microbatch)
        front, single = not borrowed, len(borrowed) == 1

        def apply(leaves: list[Any]) -> Any:
            feed = self.step_input
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else None
            if feed.seed is not None:
                draw_from(feed.seed, part.stream, feed.number_of(microbatch))
            part.guarded_memory = {}
            if front:
                output = module(*feed.args[microbatch]) if kwargs is None else module(*feed.args[microbatch], **kwargs)
            else:
                free = part.changes_input[training] is not False
                watched = free or bool(others) or not (single and type(leaves[0]) is Tensor and leaves[0].requires_grad)
                watch = WatchedInputs(leaves, borrowed, free=free) if watched else None
                inputs = leaves if watch is None else watch.inputs
                try:
                    plain = single and kwargs is None and type(inputs[0]) is Tensor
                    output = module(inputs[0]) if plain else part.run(inputs, kwargs or {}, call)
                except RuntimeError as error:
                    part.note_error(error)
                    raise
                if watch is not None:
                    part.check_changes(watch, others, training)
                    part.guarded_memory = watch.list_guarded(others) if others or watch.reasons else {}
            if feed.guards:
                feed.check_unchanged(stage, microbatch, part.changed_copies)
                part.guarded_memory = part.guarded_memory | feed.list_guarded(microbatch)
            return output if type(output) is Tensor else unwrap_stage_output(output)

        return apply

    def forward(self, stage: int, microbatch: int, call: Callable[..., Any] | None = None) -> Callable[..., None]:
        """The forward, which prepares a backward only in training.

        The operation takes its inputs itself unless the caller passes those it has already taken.
        """
        values, part = self.registers.values, self.stages[stage]
        takes, apply = self.links.input_sources(stage, microbatch), self._apply(stage, microbatch, call)
        targets = self.links.output_targets(stage, microbatch)
        context = self.registers.number("context", stage, microbatch)
        deferrable = part.find_deferrable() if (stage, microbatch) in self.split else None
        never = all(stage != other for other, _ in self.split)
        mesh, graphs, training = self.links.packer is not None, self.graphs, self.program.training
        last = part.module if training and not targets and isinstance(part.module, Recomputed) else None
        prefixes = self.prefixes

        def compute(leaves: list[Any]) -> Computed:
            if last is not None:
                last.loss = self._compute_loss(microbatch)
            if prefixes is None:
                output = apply(leaves)
            else:
                slices = self.step_input.slices
                with prefixes.forward(stage, microbatch, share=1.0 if slices is None else slices.shares[microbatch], training=training):
                    output = apply(leaves)
            if targets:
                return output, find_differentiable(output), None
            ends, grads = self.finish(output, microbatch)
            return output, ends, grads

        def run(leaves: list[Any]) -> tuple[Computed, Deferral | RecordedForward | None]:
            if graphs is not None and (recorded := graphs.run_forward(stage, microbatch, leaves)) is not None:
                return recorded
            if never or part.whole is not None or (deferrable is None and part.tried):
                return compute(leaves), None
            beside = call is not None and self.hooked_backward is not None
            if deferrable is None:
                return self._observe_forward(part, leaves, compute, beside), None
            if not part.tried:
                return self._run_first_split_forward(part, microbatch, leaves, compute, beside)
            deferral = Deferral()
            deferral.beside = beside
            try:
                with deferrable.forward(deferral):
                    return compute(leaves), deferral
            except WholeBackwardNeeded as need:
                raise part.refuse_split(need, "earlier forwards did not do so") from need

        def forward(taken: list[Any] | None = None) -> None:
            leaves = [take() for take in takes] if taken is None else taken
            wanting = [find_differentiable(value) for value in leaves]  # the module may change this by requires_grad_() or detach_()
            if part.tied and training:
                with refuse_gradients_of(part.tied):
                    (output, ends, grads), deferral = run(leaves)
            else:
                (output, ends, grads), deferral = run(leaves)
            extras = self.side_outputs
            side = self._collect_side_outputs(stage, microbatch) if extras.losses or extras.metrics else ()
            if prefixes is not None:
                side = [*side, *prefixes.take_roots()]
            if training:
                values[context] = (wanting, ends, grads, side, deferral)
            for target in targets:
                values[target] = part.make_message(output, mesh)

        return forward if self.moves is None else self.moves.wrap_forward(stage, microbatch, forward)

    def _run_first_split_forward(
        self, part: Stage, microbatch: int, leaves: list[Any], compute: Compute, beside: bool
    ) -> tuple[Computed, Deferral | None]:
        """A stage's first forward whose backward is to be split.

        If the forward turns out to need a whole backward, its effects are undone and it runs again for one. Later forwards cannot do
        so, because other microbatches are already under way with split backwards.
        """
        before = None if beside else self._find_state(part, microbatch, leaves)
        deferral = Deferral()
        deferral.beside = beside
        try:
            with part.find_deferrable().forward(deferral):
                output = compute(leaves)
        except WholeBackwardNeeded as need:
            if before is None:
                raise part.refuse_split(need, "a forward that runs another stage's backward cannot be run again") from need
            if not before.restorable:
                raise part.refuse_split(need, "a forward that changes its parameters in place cannot be run again") from need
            part.whole = need.reason
        else:
            part.tried = True
            return output, deferral
        before.restore()
        return compute(leaves), None

    def _observe_forward(self, part: Stage, leaves: list[Any], compute: Compute, beside: bool) -> Computed:
        """A forward for a whole backward of a stage that splits others: it shows whether the stage can split."""
        with part.find_deferrable().observe(beside=beside) as observation:
            output = compute(leaves)
        part.whole, part.tried = observation.reason, True
        return output

    def _find_state(self, part: Stage, microbatch: int, leaves: list[Any]) -> ForwardState:
        """The state before a forward of a stage."""
        feed, graph = self.step_input, self.program.graph
        front, back = not graph.inputs_of(part.index), not graph.outputs_of(part.index)
        modules = [part.module, *([self.loss.fn] if back and isinstance(self.loss.fn, nn.Module) else [])]
        inputs = [
            leaves,
            feed.args[microbatch] if front else None,
            feed.kwargs[part.index][microbatch] if part.index in feed.kwargs else None,
            feed.targets[microbatch] if back and feed.targets is not None else None,
        ]
        return ForwardState.capture(modules, inputs, self.side_outputs)

    def _compute_loss(self, microbatch: int) -> Callable[[Any], Tensor] | None:
        """The loss of a microbatch as a function of the output, for a stage that recomputes both."""
        loss, targets = self.loss, self.step_input.targets
        return (lambda output: loss(output, targets, microbatch)) if self.step_input.losses else None

    def finish(self, result: Any, microbatch: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """Note the output and loss of a microbatch; the tensors and gradients that its backward starts from, if it counts at all."""
        feed = self.step_input
        output, loss = (result.output, result.loss) if isinstance(result, OutputAndLoss) else (result, None)
        if feed.outputs:
            check_output(output)
            if feed.slices is None:
                feed.share.outputs[microbatch] = gather_full(detach_tree(output))
            else:
                feed.slices.note_output(feed, microbatch, gather_full(detach_tree(output)))
        if not feed.losses or not (self.program.training or self.loss.can_score(output)):
            return [], []
        loss = self.loss(result, feed.targets, microbatch) if loss is None else loss
        scale = feed.scales[microbatch]
        value = loss.detach() if type(loss) is Tensor else gather_full(loss.detach())
        if value.untyped_storage().nbytes() > value.element_size():  # torch's mean of squares keeps the memory of all of them
            value = value.clone()
        if feed.slices is None:
            feed.share.losses[microbatch] = value, scale
        else:
            feed.slices.note_loss(feed, microbatch, value)
        if not (loss.requires_grad and scale):
            return [], []
        return [loss], [torch.full_like(loss, scale * feed.factor)]

    def _collect_side_outputs(self, stage: int, microbatch: int) -> list[Tensor]:
        """The losses that the forward added on the side, weighted, to start a backward from; metrics go into the step's result."""
        extras = self.side_outputs
        feed = self.step_input
        share, scale = feed.share, feed.scales[microbatch] if feed.slices is None else feed.slices.side_scale(feed, microbatch)
        side = [loss * scale for loss in extras.losses]
        if side:
            share.side[stage, microbatch] = torch.stack([gather_full(loss.detach()) for loss in side]).sum()
        for name, value in extras.metrics.items():
            share.metrics.setdefault(name, {})[stage, microbatch] = gather_full(value)
        extras.losses, extras.metrics = [], {}
        factor = feed.factor
        return [loss if factor == 1.0 else loss * factor for loss in side if loss.requires_grad]

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward(self, stage: int, microbatch: int) -> Callable[..., None]:
        """The backward. If an operation is passed, that one runs it: a forward whose overlap hook takes `hooked_backward`."""
        values, part = self.registers.values, self.stages[stage]
        takes = self.links.gradient_sources(stage, microbatch)
        first, more = (takes[0], takes[1:]) if takes else (None, [])
        targets, additions = self.links.gradient_targets(stage, microbatch), self.links.gradient_additions(stage, microbatch)
        context = self.registers.number("context", stage, microbatch)
        stash = self.registers.number("stash", stage, microbatch) if (stage, microbatch) in self.split else None
        deferrable = None if stash is None else part.find_deferrable()

        def backward(together: Operation | None = None) -> None:
            wanting, ends, grads, side, deferral = values[context]
            values[context] = EMPTY
            if first is not None:
                grads = first()
                for take in more:
                    grads = add_grads(grads, take())
            if side or (grads[0] is None if len(grads) == 1 else any(grad is None for grad in grads)):
                ends, grads = _starts(ends, grads, side)
            if together is not None:
                self.hooked_backward = Backward(part.module, ends, grads, deferral) if ends else None
                with nullcontext() if self.hooked_backward is None else self.hooked_backward.expect(deferrable):
                    together()
            elif ends:
                if type(deferral) is RecordedForward:
                    deferral.backward(ends, grads)
                elif deferrable is None or deferral is None:
                    run_backward(ends, grads)
                else:
                    deferrable.backward_input(deferral, ends, grads)
            if stash is not None:
                values[stash] = deferral
            for target, leaves in zip(targets, wanting, strict=False):
                values[target] = [leaf.grad for leaf in leaves]
            for add in additions:
                add()

        wrapped = backward if self.moves is None else self.moves.wrap_backward(stage, microbatch, backward)
        return wrapped if self.prefixes is None else self.prefixes.wrap_backward(stage, microbatch, wrapped)

    def weights(self, stage: int, microbatch: int) -> Operation:
        values, stash, part = self.registers.values, self.registers.number("stash", stage, microbatch), self.stages[stage]

        def weights() -> None:
            deferral: Deferral | RecordedForward | None = values[stash]
            values[stash] = EMPTY
            if isinstance(deferral, RecordedForward):
                deferral.backward_weights()
            elif deferral is not None:  # None after a whole backward
                part.backward_weights(deferral)

        return weights


def _starts(ends: list[Tensor], grads: list[Tensor | None], side: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that received a gradient, the side losses, and the roots of a slice, which are empty."""
    pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if grad is not None]
    pairs += [(loss, torch.ones_like(loss)) for loss in side]
    return [end for end, _ in pairs], [grad for _, grad in pairs]
