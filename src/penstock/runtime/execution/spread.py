"""S, T, BROADCAST and COMBINE: a rank's share of a vocabulary that is spread over the ranks, as operations on registers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
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

    def __init__(self, vocabulary: SpreadVocabulary, stages: int) -> None:
        self.embedding, self.head = vocabulary.embedding, vocabulary.head
        self._stages = stages
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

    # Values for stages ------------------------------------------------------------------------------------------------

    def take_embeddings(self, microbatch: int) -> Tensor:
        """The input of stage 0. Waits for the COMBINE."""
        assert self.embedding is not None
        return self.embedding.take_output(microbatch).requires_grad_()

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
                return lambda: layer.run_share(microbatch, compute.step_input.args[microbatch][0])
            case Kind.COMBINE:
                return partial(layer.join_combine, microbatch)
            case Kind.T:
                return partial(layer.add_weight_gradients, microbatch)
        values = compute.registers.values
        register = compute.links.gradient_targets(0, microbatch)[0] if layer.lane.rank == layer.owner else None

        def broadcast() -> None:
            tokens: Tensor = compute.step_input.args[microbatch][0]
            gradient: Tensor | None = None
            if register is not None:
                (gradient,), values[register] = values[register], EMPTY
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
                    targets = _get_targets(compute, microbatch)
                    scale = feed.scales[microbatch] * feed.factor
                    layer.run_share(microbatch, targets, scale / _count(layer, targets).clamp(min=1))

                return run_share
            case Kind.COMBINE:
                return partial(layer.join_combine, microbatch)
            case Kind.T:

                def add_weight_gradients() -> None:
                    feed, losses = compute.step_input, layer.take_losses(microbatch)
                    if is_owner:
                        loss = losses.sum() / _count(layer, _get_targets(compute, microbatch))
                        feed.share.losses[microbatch] = loss, feed.scales[microbatch]
                    layer.add_weight_gradients(microbatch)

                return add_weight_gradients
        values, last = compute.registers.values, self._stages - 1
        register = compute.links.output_targets(last, microbatch)[0] if is_owner else None

        def broadcast() -> None:
            targets, weight = _get_targets(compute, microbatch), layer.weight
            shape = (*targets.shape, weight.shape[1])
            if register is None:
                layer.join_broadcast(microbatch, torch.empty(shape, dtype=weight.dtype, device=weight.device))
                return
            message, values[register] = values[register], EMPTY
            hidden = message.value if isinstance(message, GuardedMessage) else message
            if not isinstance(hidden, Tensor) or hidden.shape != shape:
                raise ScheduleError(
                    f"the last stage returned {_describe(hidden)}: for its targets the head takes a tensor of {list(shape)}"
                )
            self._forms[microbatch] = hidden
            layer.join_broadcast(microbatch, hidden.to(weight.dtype))

        return broadcast


def _get_targets(compute: StageOperations, microbatch: int) -> Tensor:
    targets = compute.step_input.targets
    assert targets is not None
    tensor: Tensor = targets[microbatch]
    return tensor


def _count(layer: SpreadHead, targets: Tensor) -> Tensor:
    """How many targets count, in the type of the losses."""
    return (targets != layer.ignore_index).sum().to(layer.dtype)


def _describe(value: Any) -> str:
    return f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
