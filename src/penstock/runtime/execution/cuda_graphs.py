"""A stage's work as recorded once and launched as a whole: CUDA graphs, for stages whose shapes stand.

Each stage has as many places as microbatches are ever between its forward and its last backward. A place has memory of its
own, which stays where it is, and its forward, backward and backward for the weights as one launch each. What comes in is copied there, and
what goes out is copied away. A microbatch that looks different runs as without all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError, WholeBackwardNeeded
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime.batch.side_outputs import StageOutput, collect
from penstock.runtime.batch.step_input import EMPTY
from penstock.runtime.device import device
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.model.recompute import Recomputed
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import detach_as_leaves
from penstock.runtime.transport.group import Operation, nothing

if TYPE_CHECKING:
    from penstock.runtime.execution.executor import Executor
    from penstock.runtime.pipeline import Pipeline


def refuse_graphs(pipe: Pipeline) -> None:
    """Say why a pipeline's work cannot be recorded, if it cannot."""
    reasons = {
        "seed= draws a microbatch's random numbers from a stream of its own: give none": pipe.seed is not None,
        "ranks share parameters, whose gradients each sums in its own memory: build a model on each": pipe.shared.one_object,
        "mesh= and accumulate_dtype= take gradients out of the memory that they are recorded in: give neither": pipe.grid is not None
        or pipe.data.dtype is not None,
        "the running statistics of norm layers are put together from several copies of a stage: use a schedule with one": (
            pipe.statistics.gathers
        ),
        "recomputed stages run parts of their forward again in their backward: recompute none": any(
            isinstance(stage.module, Recomputed) for stage in pipe.stages.values()
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ScheduleError(f"graphs=True, but {reason}")


class Place:
    """Where one microbatch at a time of one stage is worked on, always in the same memory."""

    def __init__(self, stage: Stage, sample: Tensor, split: bool, grads: Gradients) -> None:
        self.stage = stage
        self.deferrable = stage.deferrable() if split else None
        self.given = sample.detach().clone(memory_format=torch.preserve_format).requires_grad_(sample.requires_grad)
        self.deferral: Deferral | None = None
        self.made: Any = None
        self.grad: Any = None
        self.back: Tensor | None = None
        with grads.aside(), preserve_random_state(), _kept_buffers(stage):
            device.warm(self._try)
        self.made = self.deferral = None  # nothing of the try is to be met again
        grads.put()
        recorder = device.Recorder()
        self.forward = recorder.record(self._forward)
        self.backward = recorder.record(self._backward)
        self.weights = recorder.record(self._weights) if split else nothing
        if self.made is not None:  # recorded: what autograd knew of it has served
            self.made, self.deferral = self.made.detach(), None

    def fits(self, value: Any) -> bool:
        """Whether the value can be worked on here."""
        mine = self.given
        if not isinstance(value, Tensor) or value.requires_grad != mine.requires_grad:
            return False
        return (value.shape, value.stride(), value.dtype, value.device) == (mine.shape, mine.stride(), mine.dtype, mine.device)

    def _try(self) -> None:
        """All of it once, to see that it can be recorded."""
        with collect() as extras:
            self._forward()
        if type(self.made) is not Tensor or not self.made.requires_grad or extras.losses or extras.metrics:
            what = (
                "side losses or metrics"
                if extras.losses or extras.metrics or isinstance(self.made, StageOutput)
                else "no single tensor to train"
            )
            raise ScheduleError(f"stage {self.stage.index} gives {what}: it cannot be recorded, so leave graphs=True out")
        self.grad = torch.ones_like(self.made)
        self._backward()
        self._weights()

    def _forward(self) -> None:
        if self.deferrable is None:
            self.made = self.stage.module(self.given)
        else:
            self.deferral = Deferral()
            with self.deferrable.forward(self.deferral):
                self.made = self.stage.module(self.given)

    def _backward(self) -> None:
        if self.deferrable is None or self.deferral is None:
            run_backward([self.made], [self.grad])
        else:
            self.deferrable.backward_input(self.deferral, [self.made], [self.grad])
        self.back, self.given.grad = self.given.grad, None

    def _weights(self) -> None:
        if self.deferral is not None:
            self.stage.backward_weights(self.deferral)


class Gradients:
    """The memory that a stage's gradients are summed in, which recorded work has by its address."""

    def __init__(self, module: nn.Module, known: dict[int, Tensor]) -> None:
        """`known` has those of all stages, by the parameter's id: stages may share one."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if id(parameter) not in known:
                known[id(parameter)] = torch.zeros_like(parameter)
        self.sums = [(parameter, known[id(parameter)]) for parameter in trained]

    def put(self) -> None:
        """Have the parameters' gradients there, with what they are now; none is zero."""
        for parameter, total in self.sums:
            if parameter.grad is total:
                continue
            if parameter.grad is None:
                total.zero_()
            else:
                total.copy_(parameter.grad)
            parameter.grad = total

    def aside(self) -> _Aside:
        """A context that leaves no trace in them."""
        return _Aside([parameter for parameter, _ in self.sums])


class _Aside:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.kept = [(parameter, parameter.grad) for parameter in parameters]

    def __enter__(self) -> None:
        for parameter, _ in self.kept:
            parameter.grad = None

    def __exit__(self, *exc: object) -> None:
        for parameter, grad in self.kept:
            parameter.grad = grad


@contextmanager
def _kept_buffers(stage: Stage) -> Iterator[None]:
    """Leave a stage's buffers as they were: what is tried before it is recorded counts for nothing."""
    kept = [(module, name, value, value.clone()) for module, name, value in _buffers(stage.module)]
    try:
        yield
        replaced = next((name for module, name, value, _ in kept if module._buffers.get(name) is not value), None)
        if replaced is not None:
            raise ScheduleError(
                f"stage {stage.index} puts another tensor in place of its buffer {replaced}, which recorded work cannot: change it in "
                "place, or leave graphs=True out"
            )
    finally:
        for module, name, value, before in kept:
            value.data.copy_(before)  # past autograd: another microbatch's backward may be about to read what is there again now
            module._buffers[name] = value


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [(each, name, value) for each in module.modules() for name, value in each._buffers.items() if value is not None]


def _look(module: nn.Module) -> list[object]:
    """What recorded work was recorded with: the memory of parameters and buffers, what is trained, and the modules' modes."""
    found: list[object] = []
    for each in module.modules():
        found.append(each.training)
        for parameter in each._parameters.values():
            found += [] if parameter is None else [id(parameter), _address(parameter), parameter.requires_grad]
        found += [_address(buffer) for buffer in each._buffers.values() if buffer is not None]
    return found


def _address(value: Tensor) -> int:
    """Where a tensor's memory is; one of a kind of its own may have none that it tells of."""
    return value.data_ptr() if type(value) in (Tensor, nn.Parameter) else id(value)


@dataclass
class _Running:
    """A microbatch between its forward and its last backward: its place, where its loss's backward starts, and whether it has one."""

    place: Place
    leaf: Tensor | None
    ends: Sequence[Tensor]
    grads: Sequence[Tensor]
    reached: bool = True


class Graphs:
    """The recorded stages of one rank's program."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._places: dict[tuple[int, int, bool], Place] = {}
        self._grads: dict[int, Gradients] = {}
        self._sums: dict[int, Tensor] = {}
        self._looks: dict[int, list[object]] = {}
        self._numbers = _numbers(executor.program[executor.rank])
        for index, stage in executor.stages.items():
            self._check(index, stage)

    def _check(self, index: int, stage: Stage) -> None:
        if len(self.executor.program.graph.inputs_of(index)) > 1:
            raise ScheduleError(f"stage {index} reads several stages: it cannot be recorded, so leave graphs=True out")
        statistics = self.executor.statistics
        if statistics is not None and index in self.executor.scattered and statistics.keeps_any(index):
            raise ScheduleError(
                f"stage {index} has norm layers with running statistics, but does not run its microbatches in their order, which recorded "
                "work cannot make up for: use another schedule, or leave graphs=True out"
            )
        hooked = next((n for n, p in stage.module.named_parameters() if p._post_accumulate_grad_hooks or p._backward_hooks), None)
        if hooked is not None:
            raise ScheduleError(
                f"{hooked} of stage {index} has hooks, which recorded work cannot run: remove them, or leave graphs=True out"
            )

    def begin(self) -> None:
        """A step begins: gradients may have been replaced or dropped. Where parameters were, or modes changed, work is recorded anew."""
        if self.executor.autocast:
            raise ScheduleError("graphs=True, but the step runs under autocast, which work is recorded without: use one of them")
        if any(_look(self.executor.stages[index].module) != look for index, look in self._looks.items()):
            self._grads, self._places, self._sums, self._looks = {}, {}, {}, {}
            return
        for sums in self._grads.values():
            sums.put()

    def place(self, stage: int, microbatch: int, value: Any) -> Place | None:
        """Where to work on a value; None where it does not look as the first one did."""
        part = self.executor.stages[stage]
        split = (stage, microbatch) in self.executor._split and part.whole is None
        key = stage, self._numbers[stage, microbatch], split
        found = self._places.get(key)
        if found is None:
            if not isinstance(value, Tensor):
                return None
            if stage not in self._grads:
                self._grads[stage], self._looks[stage] = Gradients(part.module, self._sums), _look(part.module)
            try:
                found = Place(part, value, split, self._grads[stage])
            except WholeBackwardNeeded as need:
                part.whole = need.reason
                return self.place(stage, microbatch, value)
            self._places[key] = found
        return found if found.fits(value) else None

    # Operations -------------------------------------------------------------------------------------------------------

    def operation(self, action: Action, plain: Callable[..., None]) -> Operation:
        """A compute action by recorded work; `plain` is what runs it otherwise."""
        stage, microbatch = action.stage, action.microbatch or 0
        if action.kind is Kind.F:
            return self._forward(stage, microbatch, plain)
        return self._weights(stage, microbatch, plain) if action.kind is Kind.W else self._backward(stage, microbatch, plain)

    def _forward(self, stage: int, microbatch: int, plain: Callable[..., None]) -> Operation:
        executor, cells = self.executor, self.executor.cells
        takes, readers = executor._inputs(stage, microbatch), executor._readers(stage, microbatch)
        context = executor._cell("context", stage, microbatch)

        def forward() -> None:
            taken = [take() for take in takes]
            given = taken or executor.feed.args[microbatch]
            known = len(given) == 1 and stage not in executor.feed.kwargs
            place = self.place(stage, microbatch, given[0]) if known else None
            if place is None:
                plain(taken)
                return
            with torch.no_grad():
                place.given.copy_(given[0])
            place.forward()
            if not readers:
                leaf = (place.made.detach().clone() if executor.feed.outputs else place.made.detach()).requires_grad_()
                cells[context] = _Running(place, leaf, *self._loss(stage, microbatch, leaf))
                return
            cells[context] = _Running(place, None, (), ())
            made = place.made.detach().clone().requires_grad_()
            for reader in readers:
                cells[reader] = detach_as_leaves(made)

        return forward

    def _loss(self, stage: int, microbatch: int, leaf: Tensor) -> Any:
        """The loss of an output, and where its backward starts; it does not reach the recorded stage's weights."""
        with self.executor.stages[stage].deferrable().observe() as observation:
            starts = self.executor._finish(leaf, microbatch)
        if observation.reason is not None:
            raise ScheduleError(
                f"graphs=True, but the loss function {observation.reason}, and stage {stage} is recorded apart from it: leave graphs out"
            )
        return starts

    def _backward(self, stage: int, microbatch: int, plain: Callable[..., None]) -> Operation:
        executor, cells, graph = self.executor, self.executor.cells, self.executor.program.graph
        take = next((executor._source("gradients", stage, other, microbatch) for other in graph.outputs_of(stage)), None)
        writers = [executor._target("gradients", stage, other, microbatch) for other in graph.inputs_of(stage)]
        context = executor._cell("context", stage, microbatch)
        stash = executor._cell("stash", stage, microbatch) if (stage, microbatch) in executor._split else None

        def backward() -> None:
            running = cells[context]
            if not isinstance(running, _Running):
                plain()
                return
            cells[context] = EMPTY
            grad = _loss_grad(running) if take is None else take()[0]
            running.reached = grad is not None
            if running.reached:
                running.place.grad.copy_(grad)
                running.place.backward()
            if stash is not None:
                cells[stash] = running
            back = running.place.back
            for writer in writers:
                cells[writer] = (
                    [back.clone() if running.reached and back is not None else None] if running.place.given.requires_grad else []
                )

        return backward

    def _weights(self, stage: int, microbatch: int, plain: Callable[..., None]) -> Operation:
        cells, stash = self.executor.cells, self.executor._cell("stash", stage, microbatch)

        def weights() -> None:
            running = cells[stash]
            if not isinstance(running, _Running):
                plain()
                return
            cells[stash] = EMPTY
            if running.reached:
                running.place.weights()

        return weights


def _loss_grad(running: _Running) -> Tensor | None:
    if running.ends:
        run_backward(running.ends, running.grads)
    return None if running.leaf is None else running.leaf.grad


def _numbers(actions: Iterable[Action]) -> dict[tuple[int, int], int]:
    """The place of each stage and microbatch: the first that is free from the forward on, until nothing of it is left to do."""
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
