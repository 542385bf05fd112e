"""CUDA graphs: a stage's work is recorded once and then launched as a whole, as long as shapes stay the same.

Each stage has as many workspaces as it ever has microbatches between their forward and their last backward. A workspace has memory of
its own at fixed addresses, and its forward, backward and weight backward are one launch each. Inputs are copied into it and outputs are
copied out. A microbatch of another shape runs without graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError, WholeBackwardNeeded
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.batch.result import StageOutput, collect
from penstock.runtime.device.graphs import GraphCapture, warm_up
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.transforms import Recomputed
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.torch_internals.modules import own_buffers, own_parameters
from penstock.runtime.torch_internals.tensors import gradient_hooks, post_accumulate_hooks
from penstock.runtime.transport.group import do_nothing

if TYPE_CHECKING:
    from penstock.runtime.execution.operations import Computed, StageOperations


def refuse_graphs(
    stages: Mapping[int, Stage], *, seeded: bool, shares_parameters: bool, sums_elsewhere: bool, gathers_statistics: bool, slices: int = 1
) -> None:
    """Raise if a pipeline's work cannot be recorded, with the reason."""
    reasons = {
        "seed= draws each microbatch's random numbers from a stream of its own: leave it out": seeded,
        "ranks share parameters, whose gradients each rank sums in its own memory: build a model on each": shares_parameters,
        "mesh= and accumulate_dtype= take gradients out of the memory that they are recorded in: leave both out": sums_elsewhere,
        "the running statistics of norm layers are combined from several copies of a stage: use a schedule with one": gathers_statistics,
        "slices of a sequence read the memory of earlier ones, which is another one for each microbatch: use a schedule without": slices
        > 1,
        "recomputed stages run parts of their forward again in their backward: turn recompute off": any(
            isinstance(stage.module, Recomputed) for stage in stages.values()
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ScheduleError(f"graphs=True, but {reason}")


class Workspace:
    """The memory in which one microbatch of one stage at a time is computed, and the recorded work on it."""

    def __init__(self, stage: Stage, sample: Tensor, split: bool, sums: GradientSums) -> None:
        self.stage = stage
        self.deferrable = stage.find_deferrable() if split else None
        self.input = sample.detach().clone(memory_format=torch.preserve_format).requires_grad_(sample.requires_grad)
        self.deferral: Deferral | None = None
        self.output: Any = None
        self.output_grad: Any = None
        self.input_grad: Tensor | None = None
        with sums.set_aside(), preserve_random_state(), _keep_buffers(stage):
            warm_up(self._try)
        self.output = self.deferral = None  # nothing of the trial may be used again
        sums.attach()
        graphs = GraphCapture()
        self.forward = graphs.capture(self._forward)
        self.backward = graphs.capture(self._backward)
        self.weights = graphs.capture(self._run_weights) if split else do_nothing
        if self.output is not None:  # recorded: autograd's graph is no longer needed
            self.output, self.deferral = self.output.detach(), None

    def fits(self, value: Any) -> bool:
        """Whether the value can be copied into the input."""
        own = self.input
        if not isinstance(value, Tensor) or value.requires_grad != own.requires_grad:
            return False
        return (value.shape, value.stride(), value.dtype, value.device) == (own.shape, own.stride(), own.dtype, own.device)

    def _try(self) -> None:
        """Run everything once, to see that it can be recorded."""
        with collect() as extras:
            self._forward()
        on_the_side = extras.losses or extras.metrics
        if type(self.output) is not Tensor or not self.output.requires_grad or on_the_side:
            problem = "side losses or metrics" if on_the_side or isinstance(self.output, StageOutput) else "no single tensor to train"
            raise ScheduleError(f"stage {self.stage.index} returns {problem}, so it cannot be recorded: leave graphs=True out")
        self.output_grad = torch.ones_like(self.output)
        self._backward()
        self._run_weights()

    def _forward(self) -> None:
        if self.deferrable is None:
            self.output = self.stage.module(self.input)
        else:
            self.deferral = Deferral()
            with self.deferrable.forward(self.deferral):
                self.output = self.stage.module(self.input)

    def _backward(self) -> None:
        if self.deferrable is None or self.deferral is None:
            run_backward([self.output], [self.output_grad])
        else:
            self.deferrable.backward_input(self.deferral, [self.output], [self.output_grad])
        self.input_grad, self.input.grad = self.input.grad, None

    def _run_weights(self) -> None:
        if self.deferral is not None:
            self.stage.backward_weights(self.deferral)


class GradientSums:
    """The memory in which a stage's gradients are summed: recorded work knows it by its address."""

    def __init__(self, module: nn.Module, known: dict[int, Tensor]) -> None:
        """`known` has the sums of all stages by the parameter's id, because stages may share a parameter."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if id(parameter) not in known:
                known[id(parameter)] = torch.zeros_like(parameter)
        self.sums = [(parameter, known[id(parameter)]) for parameter in trained]

    def attach(self) -> None:
        """Make the sums the parameters' `grad`, with its present values; None becomes zero."""
        for parameter, total in self.sums:
            if parameter.grad is total:
                continue
            if parameter.grad is None:
                total.zero_()
            else:
                total.copy_(parameter.grad)
            parameter.grad = total

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Leave the parameters' gradients as they are: what runs inside adds to none of them."""
        saved = [(parameter, parameter.grad) for parameter, _ in self.sums]
        for parameter, _ in saved:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in saved:
                parameter.grad = grad


@contextmanager
def _keep_buffers(stage: Stage) -> Iterator[None]:
    """Leave a stage's buffers as they were: the trial before the recording must have no effect."""
    buffers = [(part, name, value) for part in stage.module.modules() for name, value in own_buffers(part).items()]
    saved = [(part, name, value, value.clone()) for part, name, value in buffers if value is not None]
    try:
        yield
        replaced = next((name for module, name, value, _ in saved if own_buffers(module).get(name) is not value), None)
        if replaced is not None:
            raise ScheduleError(
                f"stage {stage.index} replaces its buffer {replaced} by another tensor, which recorded work cannot do: change it in place, "
                "or leave graphs=True out"
            )
    finally:
        for module, name, value, before in saved:
            value.data.copy_(before)  # past autograd: another microbatch's backward may still read the restored values
            own_buffers(module)[name] = value


def _take_fingerprint(module: nn.Module) -> list[object]:
    """Everything that recorded work depends on: the memory of parameters and buffers, what is trained, and the modules' modes."""
    facts: list[object] = []
    for part in module.modules():
        facts.append(part.training)
        for parameter in own_parameters(part).values():
            facts += [] if parameter is None else [id(parameter), _find_address(parameter), parameter.requires_grad]
        facts += [_find_address(buffer) for buffer in own_buffers(part).values() if buffer is not None]
    return facts


def _find_address(value: Tensor) -> int:
    """The address of a tensor's memory; a tensor subclass may not have one, so its id stands in."""
    return value.data_ptr() if type(value) in (Tensor, nn.Parameter) else id(value)


class RecordedForward:
    """A microbatch between its forward and its last backward; it takes the place of a `Deferral`."""

    __slots__ = ("has_gradient", "input", "output", "workspace")

    def __init__(self, workspace: Workspace, input_leaf: Tensor | None, output: Tensor | None) -> None:
        self.workspace = workspace
        self.input, self.output = input_leaf, output
        """The message from the stage before, which gets the gradient; and the last stage's output, whose loss is outside the graph."""
        self.has_gradient = False

    def backward(self, ends: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Launch the recorded backward, from the gradient of the stage's output or from its loss."""
        if self.output is not None:
            run_backward(ends, grads)
        grad = grads[0] if self.output is None else self.output.grad
        if grad is None:
            return
        workspace, self.has_gradient = self.workspace, True
        workspace.output_grad.copy_(grad)
        workspace.backward()
        if self.input is not None and workspace.input_grad is not None:
            self.input.grad = workspace.input_grad.clone()

    def backward_weights(self) -> None:
        """Launch the recorded weight gradients."""
        if self.has_gradient:
            self.workspace.weights()


class Graphs:
    """The recorded stages of one rank's program.

    The executor calls `begin_step` once per step, and the operations try `run_forward` before they run a stage themselves.
    """

    def __init__(self, compute: StageOperations, actions: Sequence[Action]) -> None:
        self._compute = compute
        self._workspaces: dict[tuple[int, int, bool], Workspace] = {}
        self._sums: dict[int, GradientSums] = {}
        self._totals: dict[int, Tensor] = {}
        self._fingerprints: dict[int, list[object]] = {}
        self._numbers = _number_workspaces(actions)
        for stage in compute.stages.values():
            self._check(stage)

    def _check(self, stage: Stage) -> None:
        index, statistics = stage.index, self._compute.statistics
        if len(self._compute.program.graph.inputs_of(index)) > 1:
            raise ScheduleError(f"stage {index} reads several stages, so it cannot be recorded: leave graphs=True out")
        if statistics is not None and index in self._compute.unordered and statistics.keeps_any(index):
            raise ScheduleError(
                f"stage {index} has norm layers with running statistics but does not run its microbatches in order, which recorded work "
                "cannot make up for: use another schedule, or leave graphs=True out"
            )
        hooked = next((n for n, p in stage.module.named_parameters() if post_accumulate_hooks(p) or gradient_hooks(p)), None)
        if hooked is not None:
            raise ScheduleError(
                f"{hooked} of stage {index} has hooks, which recorded work cannot run: remove them, or leave graphs=True out"
            )

    def begin_step(self, autocast: bool) -> None:
        """Attach the gradient sums, which may have been replaced or dropped; forget all recordings if a stage has changed."""
        if autocast:
            raise ScheduleError("graphs=True, but the step runs under autocast, and work is recorded without it: use one of them")
        if any(_take_fingerprint(self._compute.stages[index].module) != facts for index, facts in self._fingerprints.items()):
            self._sums, self._workspaces, self._totals, self._fingerprints = {}, {}, {}, {}
            return
        for sums in self._sums.values():
            sums.attach()

    def find_workspace(self, stage: int, microbatch: int, value: Any) -> Workspace | None:
        """Where to compute on a value; None if it does not look like the one that was recorded."""
        part = self._compute.stages[stage]
        split = (stage, microbatch) in self._compute.split and part.whole is None
        key = stage, self._numbers[stage, microbatch], split
        workspace = self._workspaces.get(key)
        if workspace is None:
            if not isinstance(value, Tensor):
                return None
            if stage not in self._sums:
                self._sums[stage], self._fingerprints[stage] = GradientSums(part.module, self._totals), _take_fingerprint(part.module)
            try:
                workspace = Workspace(part, value, split, self._sums[stage])
            except WholeBackwardNeeded as need:
                part.whole = need.reason
                return self.find_workspace(stage, microbatch, value)
            self._workspaces[key] = workspace
        return workspace if workspace.fits(value) else None

    def run_forward(self, stage: int, microbatch: int, leaves: list[Any]) -> tuple[Computed, RecordedForward] | None:
        """Launch a recorded forward; None if the inputs do not look like those that were recorded."""
        feed, inputs = self._compute.step_input, leaves or self._compute.step_input.args[microbatch]
        single = len(inputs) == 1 and stage not in feed.kwargs
        workspace = self.find_workspace(stage, microbatch, inputs[0]) if single else None
        if workspace is None:
            return None
        self._compute.stages[stage].guarded_memory = {}
        with torch.no_grad():
            workspace.input.copy_(inputs[0])
        workspace.forward()
        input_leaf = leaves[0] if leaves and leaves[0].requires_grad else None
        if self._compute.program.graph.outputs_of(stage):
            output = workspace.output.detach().clone().requires_grad_()
            return (output, [output], None), RecordedForward(workspace, input_leaf, None)
        output = workspace.output.detach()
        leaf = (output.clone() if feed.outputs else output).requires_grad_()
        # The backward of the loss ends at the output, before the recorded stage's weights.
        with self._compute.stages[stage].find_deferrable().observe() as observation:
            ends, grads = self._compute.finish(leaf, microbatch)
        if observation.reason is not None:
            raise ScheduleError(
                f"graphs=True, but the loss function {observation.reason}, and stage {stage} is recorded apart from it: leave graphs out"
            )
        return (leaf, ends, grads), RecordedForward(workspace, input_leaf, leaf)


def _number_workspaces(actions: Iterable[Action]) -> dict[tuple[int, int], int]:
    """The workspace of each stage and microbatch: the first that is free at its forward, taken until its last backward."""
    parts = [part for action in actions for part in action.parts]
    last = {(p.stage, p.microbatch or 0): k for k, p in enumerate(parts) if p.kind in (Kind.B, Kind.I, Kind.W)}
    taken: dict[int, dict[int, int]] = {}
    numbers: dict[tuple[int, int], int] = {}
    for at, part in enumerate(parts):
        if part.kind is Kind.F:
            busy = taken.setdefault(part.stage, {})
            number = next(n for n in range(len(busy) + 1) if busy.get(n, -1) < at)
            busy[number] = last.get((part.stage, part.microbatch or 0), at)
            numbers[part.stage, part.microbatch or 0] = number
    return numbers
