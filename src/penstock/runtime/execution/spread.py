"""S, T, BROADCAST and COMBINE: a rank's share of a vocabulary that is spread over the ranks, as operations on registers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.parallel.spread_vocabulary import SpreadVocabulary
from penstock.runtime.parallel.vocabulary import SpreadEmbedding, SpreadHead
from penstock.runtime.tensors.boundary import GuardedMessage
from penstock.runtime.transport.group import EMPTY, Operation

if TYPE_CHECKING:
    from penstock.runtime.execution.operations import StageOperations


class SpreadOperations:
    """Builds the operations of a spread vocabulary, and is the source of the values that its collectives give to stages.

    The embedding stands in the place of a stage before stage 0, and the head of one behind the last. Their BROADCASTs read the registers
    that these stages have filled as they would for a neighbour on the same rank.
    """

    def __init__(self, vocabulary: SpreadVocabulary, stages: int, *, training: bool) -> None:
        self.vocabulary, self.embedding, self.head = vocabulary, vocabulary.embedding, vocabulary.head
        self._stages, self._training = stages, training
        self._forms: dict[int, Tensor] = {}
        """For each microbatch whose last forward has run, the output in that form, cut off from its graph."""

    def feeds(self, stage: int) -> bool:
        """Whether the stage's input comes from the spread embedding."""
        return self.embedding is not None and stage == 0

    def reads(self, stage: int) -> bool:
        """Whether the stage's output goes to the spread head."""
        return self.head is not None and stage == self._stages - 1

    def reset(self) -> None:
        """Let go of everything that belongs to a step."""
        self._forms.clear()
        self.vocabulary.end_step()

    def finish_evaluation(self, step_input: StepInput) -> None:
        """Note the losses at the end of a step without gradients, in which no T waits for them."""
        if self.head is not None and not self._training and self.vocabulary.targets is not None:
            for microbatch in range(len(step_input.args)):
                self._note_loss(self.head, microbatch, step_input)

    def _note_loss(self, head: SpreadHead, microbatch: int, step_input: StepInput) -> None:
        """Take a microbatch's losses; the rank of the last stage notes their mean. Waits for the COMBINE."""
        losses = head.take_losses(microbatch)
        if head.lane.rank == head.owner:
            loss = losses.sum() / _count(head, self._get_targets(microbatch))
            step_input.share.losses[microbatch] = loss, step_input.scales[microbatch]

    def _get_targets(self, microbatch: int) -> Tensor:
        assert self.vocabulary.targets is not None
        return self.vocabulary.targets[microbatch]

    # Values for stages ------------------------------------------------------------------------------------------------

    def take_embeddings(self, microbatch: int) -> Any:
        """The input of stage 0. Waits for the COMBINE."""
        assert self.embedding is not None
        embeddings = self.embedding.take_output(microbatch).requires_grad_(self._training and not self.embedding.frozen)
        return self.vocabulary.first_input.add_embeddings(self.vocabulary.args[microbatch], embeddings)

    def take_output_gradients(self, microbatch: int) -> list[Tensor]:
        """The gradient of the last stage's output, if it has one. Waits for the COMBINE."""
        assert self.head is not None
        gradient, output = self.head.take_input_gradient(microbatch), self._forms.pop(microbatch)
        return [gradient.view(output.shape).to(output.dtype)] if output.requires_grad else []

    # Operations -------------------------------------------------------------------------------------------------------

    def operation(self, action: Action, compute: StageOperations) -> Operation:
        """The operation of an S, T, BROADCAST or COMBINE."""
        microbatch = action.unit(compute.program.slices)
        if action.stage == 0 and self.embedding is not None:
            return self._build_for_embedding(self.embedding, action.kind, microbatch, compute)
        assert self.head is not None
        return self._build_for_head(self.head, action.kind, microbatch, compute)

    def _build_for_embedding(self, layer: SpreadEmbedding, kind: Kind, microbatch: int, compute: StageOperations) -> Operation:
        match kind:
            case Kind.S:
                return lambda: layer.run_share(microbatch, self.vocabulary.tokens[microbatch], gradients=self._training)
            case Kind.COMBINE:
                return partial(layer.join_combine, microbatch)
            case Kind.T:
                return partial(layer.add_weight_gradients, microbatch)
        values = compute.registers.values
        register = compute.links.gradient_targets(0, microbatch)[0] if layer.lane.rank == layer.owner else None

        def broadcast() -> None:
            tokens = self.vocabulary.tokens[microbatch]
            gradient: Tensor | None = None
            if register is not None:
                gradients, values[register] = values[register], EMPTY
                gradient = gradients[0] if gradients else None
            if layer.frozen:
                gradient = layer.weight.new_empty(0)
            if gradient is None:  # on another rank; or zero, because stage 0 does not use its input
                fill = torch.empty if register is None else torch.zeros
                gradient = fill(*tokens.shape, layer.weight.shape[1], dtype=layer.weight.dtype, device=layer.weight.device)
            layer.join_broadcast(microbatch, gradient)

        return broadcast

    def _build_for_head(self, layer: SpreadHead, kind: Kind, microbatch: int, compute: StageOperations) -> Operation:
        is_owner = layer.lane.rank == layer.owner
        match kind:
            case Kind.S:

                def run_share() -> None:
                    feed = compute.step_input
                    logits: Tensor | None
                    if self.vocabulary.targets is None:
                        logits = layer.compute_logits(microbatch)
                    else:
                        targets = self._get_targets(microbatch)
                        weights = feed.scales[microbatch] * feed.factor / _count(layer, targets).clamp(min=1)
                        logits = layer.run_share(microbatch, targets, weights, gradients=self._training, outputs=feed.outputs)
                    if feed.outputs and logits is not None:
                        feed.share.logits[microbatch] = logits

                return run_share
            case Kind.COMBINE:
                return lambda: layer.join_nothing() if self.vocabulary.targets is None else layer.join_combine(microbatch)
            case Kind.T:

                def add_weight_gradients() -> None:
                    self._note_loss(layer, microbatch, compute.step_input)
                    layer.add_weight_gradients(microbatch)

                return add_weight_gradients
        values, last = compute.registers.values, self._stages - 1
        register = compute.links.output_targets(last, microbatch)[0] if is_owner else None

        def take_hidden() -> Any:
            assert register is not None
            message, values[register] = values[register], EMPTY
            return message.value if isinstance(message, GuardedMessage) else message

        def broadcast_alone() -> None:
            """Without targets, whose shape is that of the hidden tensor but for the last dimension, which other ranks know too."""
            hidden, size = None if register is None else take_hidden(), layer.weight.shape[1]
            if register is not None and (not isinstance(hidden, Tensor) or hidden.shape[-1:] != (size,)):
                raise ScheduleError(f"the last stage returned {_describe(hidden)}: the head takes a tensor whose last dimension is {size}")
            layer.join_broadcast_of_any_shape(microbatch, None if hidden is None else hidden.to(layer.weight.dtype))

        def broadcast() -> None:
            if self.vocabulary.targets is None:
                broadcast_alone()
                return
            targets, weight = self._get_targets(microbatch), layer.weight
            shape = (*targets.shape, weight.shape[1])
            if register is None:
                layer.join_broadcast(microbatch, torch.empty(shape, dtype=weight.dtype, device=weight.device))
                return
            hidden = take_hidden()
            if not isinstance(hidden, Tensor) or hidden.shape != shape:
                raise ScheduleError(
                    f"the last stage returned {_describe(hidden)}: for its targets the head takes a tensor of {list(shape)}"
                )
            if self._training:
                self._forms[microbatch] = hidden
            layer.join_broadcast(microbatch, hidden.to(weight.dtype))

        return broadcast


def _count(layer: SpreadHead, targets: Tensor) -> Tensor:
    """How many targets count, in the type of the losses."""
    return (targets != layer.ignore_index).sum().to(layer.dtype)


def _describe(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
