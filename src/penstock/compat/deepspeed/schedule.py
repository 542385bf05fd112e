"""The names of `deepspeed.runtime.pipe.schedule`: the instructions of a stage, and the schedules that yield them.

The streams of `TrainSchedule` are those of our `1f1b`, of `InferenceSchedule` those of `inference`, of `DataParallelSchedule` those
of `data-parallel`, and of `DualPipeVSchedule` those of `dualpipe-v` with full backwards. The first two call their hooks in every step,
so a subclass changes the stream by overriding one of them. Needs no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.schedules.registry import schedule


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text.

    >>> call_to_str("send", 1, to="a")
    "send(1, to='a')"
    """
    arguments = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(arguments)})"


class PipeInstruction:
    """The base class: `name` is the name of the class, `kwargs` are its keyword arguments, which are attributes too.

    Prints as a call.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the parameters and clear their gradients; after both reductions."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients over the replicas of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of parameters that several stages share."""


class CommitP2P(PipeInstruction):
    """Start the messages queued since the last commit and wait for them; only DualPipeV queues messages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one of the stage's buffers."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next microbatch of the data: its input on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute the outputs from the inputs; on the last stage the loss too."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the inputs, and add to those of the parameters."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage, which receives them by `RecvActivation`."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous stage, which receives them by `RecvGrad`."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage for a batch: one list per step.

    Subclasses implement `steps`. A barrier of all stages between two steps does not deadlock. Each iteration starts at the first step.
    """

    it: Iterator[Sequence[Any]] | None = None

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Sequence[Any]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """The number of buffers that the stage needs: one per microbatch unless a subclass overrides it."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The stage that the instructions are for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of microbatches per batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a microbatch: round-robin."""
        assert self._valid_micro_batch(micro_batch_id), f"microbatch {micro_batch_id} of {self.micro_batches}"
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.it = None
        return self

    def __next__(self) -> Sequence[Any]:
        if self.it is None:
            self.it = iter(self.steps())
        return next(self.it)


class InferenceSchedule(PipeSchedule):
    """Forwards only, through two buffers in turn.

    Hooks: `_valid_micro_batch` says whether a step has work, `_valid_stage` whether a neighbour exists.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `inference`: microbatch m runs in step m + stage, and its output leaves in the step after."""
        check_sizes(self)
        for step in range(self.micro_batches + self.stages - 1):
            now, before = step - self.stage_id, step - self.stage_id - 1
            runs = self._valid_micro_batch(now)
            exchange: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(before):
                exchange.append(SendActivation(before % 2))
            if self._valid_stage(self.prev_stage) and runs:
                exchange.append(RecvActivation(now % 2))
            if _is_odd(self.stage_id):  # so that neighbours do not both begin with a send
                exchange.reverse()
            loads = runs and (self.is_first_stage or self.is_last_stage)
            yield [*([LoadMicroBatch(now % 2)] if loads else []), *exchange, *([ForwardPass(now % 2)] if runs else [])]

    def num_pipe_buffers(self) -> int:
        """Two: one is filled while the other is used."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward: a stage goes forward in the steps of its own parity, backward in the others.

    Hooks: `_step_to_micro_batch` says what a step runs, by default through the four `_*_step_*_id`; `_valid_micro_batch` and
    `_valid_stage` say whether there is such a microbatch and such a neighbour; `_buffer_idx` gives a microbatch its buffer.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `1f1b`. Each step exchanges the output of the step before it, and the input of its own."""
        check_sizes(self)
        before, count = -1, 2 * (self.micro_batches + self.stages - 1)
        for step in range(count):
            now, forward = self._step_to_micro_batch(step)
            closing = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == count - 1 else []
            yield [*self._exchange(before, now, forward), *self._compute(now, forward), *closing]
            before = now

    def num_pipe_buffers(self) -> int:
        """The number of microbatches in flight at once, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _exchange(self, before: int, now: int, forward: bool) -> Iterator[PipeInstruction]:
        """The messages of a step: a forward step exchanges with the previous stage, a backward step with the next one."""
        if not self._valid_stage(self.prev_stage if forward else self.next_stage):
            return
        if not forward and self._valid_micro_batch(now):
            yield RecvGrad(self._buffer_idx(now))
        if self._valid_micro_batch(before):
            yield (SendGrad if forward else SendActivation)(self._buffer_idx(before))
        if forward and self._valid_micro_batch(now):
            yield RecvActivation(self._buffer_idx(now))

    def _compute(self, now: int, forward: bool) -> Iterator[PipeInstruction]:
        if not self._valid_micro_batch(now):
            return
        if forward and (self.is_first_stage or self.is_last_stage):
            yield LoadMicroBatch(self._buffer_idx(now))
        yield (ForwardPass if forward else BackwardPass)(self._buffer_idx(now))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The microbatch of a step, which is none of the batch in an idle one, and whether it goes forward."""
        if _is_even(step_id + self.stage_id):
            return (self._even_step_forward_id if _is_even(step_id) else self._odd_step_forward_id)(step_id), True
        return (self._even_step_backward_id if _is_even(step_id) else self._odd_step_backward_id)(step_id), False

    def _even_step_forward_id(self, step_id: int) -> int:
        """The microbatch that an even stage takes forward in an even step."""
        return step_id // 2 - self.stage_id // 2

    def _odd_step_forward_id(self, step_id: int) -> int:
        """The microbatch that an odd stage takes forward in an odd step."""
        return (step_id - 1) // 2 - self.stage_id // 2

    def _even_step_backward_id(self, step_id: int) -> int:
        """The microbatch that an odd stage takes backward in an even step."""
        return step_id // 2 + (self.stage_id + 1) // 2 - self.stages

    def _odd_step_backward_id(self, step_id: int) -> int:
        """The microbatch that an even stage takes backward in an odd step."""
        return (step_id + 1) // 2 + self.stage_id // 2 - self.stages


class DataParallelSchedule(PipeSchedule):
    """No pipeline: each microbatch forward and backward in one buffer. Every stage is taken for the whole model."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The one stream of `data-parallel`."""
        check_sizes(self)
        for step in range(self.micro_batches):
            closing = [ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *closing]

    def num_pipe_buffers(self) -> int:
        """One: nothing overlaps."""
        return 1


Step = list[PipeInstruction]


class DualPipeVSchedule(PipeSchedule):
    """The V: rank r holds stages r (phase 0) and 2p-1-r (phase 1) of 2p; one buffer per phase and microbatch.

    The order of the forwards and (full) backwards is that of our `dualpipe-v`; a stream also says where each message is queued and
    which instructions make a step. Sends and receives only queue; `CommitP2P` starts them together and waits. `forward_only` leaves
    out the backwards.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, forward_only: bool = False) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if micro_batches < 2 * stages:
            raise ValueError(f"DualPipeV needs at least 2 * {stages} micro-batches, got {micro_batches}")
        self.forward_only = forward_only

    def num_pipe_buffers(self) -> int:
        """Phase 0 has the first half of them."""
        return 2 * self.micro_batches

    def steps(self) -> Iterator[Step]:
        """Each of our phases as counted there; see `schedules/dualpipe_v.py`."""
        row = iter(schedule("dualpipe-v", self.stages, self.micro_batches)[self.stage_id])
        inner, outer = self.stages - self.stage_id - 1, self.stage_id + 1
        for action in islice(row, 2 * inner):  # nF0
            yield self._run(action)
        yield self._receive(Action(self.stage_id, Kind.F, 2 * inner))  # phase 0's inputs come a step early from here to the pairs
        held: Step = []
        for left in reversed(range(outer)):  # nF0 F1
            step, held = self._fill(next(row), next(row), hold=inner == 0 and left == 0)
            yield step
        for _ in range(inner):  # nI1 W1 F1
            backward, _weight, forward = islice(row, 3)
            yield self._run(backward) + self._receive(forward) + self._weight() + self._run(forward, receive=False)
        yield from self._main(row, inner, held)
        for _ in range(inner + outer):  # nB1 F1&B0, nB1 B0
            yield self._run(next(row)) + self._run(next(row))
        for weight, backward in zip(*[islice(row, 2 * inner)] * 2, strict=True):  # nW I0
            assert weight.kind is Kind.W
            yield self._weight() + self._run(backward)
        for _ in row:  # nW
            yield self._weight()
        yield [CommitP2P(), *([] if self.forward_only else [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()])]

    def _fill(self, zero: Action, one: Action, hold: bool) -> tuple[Step, Step]:
        """A forward of each phase, the receive for the next of phase 0 between them; at the turn the last send is held back."""
        ahead = Action(zero.stage, Kind.F, (zero.microbatch or 0) + 1)
        step = self._run(zero, receive=False, send=False) + self._receive(ahead) + self._run(one, send=not hold) + self._send(zero)
        return step, self._send(one) if hold else []

    def _main(self, row: Iterator[Action], inner: int, held: Step) -> Iterator[Step]:
        """Pairs of a forward and a backward; the very first forward has its input already."""
        pairs = self.micro_batches - 2 * self.stages + self.stage_id + 1
        for number in range(pairs):  # nF0&B1 F1&B0
            if number == 0 and inner == 0:  # the turn of the V, where the first pair is not fused
                forward, backward = islice(row, 2)
                step = self._run(forward, receive=False, send=False) + held + self._run(backward, send=False)
                step += self._send(forward) + self._send(backward)
            else:
                step = self._run(next(row), receive=number > 0)
            yield step + self._run(next(row))

    # One action -------------------------------------------------------------------------------------------------------

    def _run(self, action: Action, *, receive: bool = True, send: bool = True) -> Step:
        """Receive, commit, compute, queue the sends; of a pair each for both parts. `receive` is about a forward's input alone."""
        parts = action.parts
        received = [instruction for part in parts if receive or part.kind is not Kind.F for instruction in self._receive(part)]
        done = [instruction for part in parts for instruction in self._compute(part)]
        return [*received, CommitP2P(), *done, *([instruction for part in parts for instruction in self._send(part)] if send else [])]

    def _weight(self) -> Step:
        """Where weight gradients would run apart; here only what was queued moves on."""
        return [] if self.forward_only else [CommitP2P()]

    def _compute(self, part: Action) -> Step:
        if part.kind is not Kind.F:
            return [] if self.forward_only else [BackwardPass(self._buffer(part), phase=self._phase(part))]
        load: Step = [LoadMicroBatch(self._buffer(part))] if part.stage == 0 else []
        return [*load, ForwardPass(self._buffer(part), phase=self._phase(part))]

    def _receive(self, part: Action) -> Step:
        """The receives of a part: none at the ends of the model and at the turn of the V."""
        forward = part.kind is Kind.F
        if part.stage % self.stages == (0 if forward else self.stages - 1) or (self.forward_only and not forward):
            return []
        return [(RecvActivation if forward else RecvGrad)(self._buffer(part), phase=self._phase(part))]

    def _send(self, part: Action) -> Step:
        forward = part.kind is Kind.F
        if part.stage % self.stages == (self.stages - 1 if forward else 0) or (self.forward_only and not forward):
            return []
        return [(SendActivation if forward else SendGrad)(self._buffer(part), phase=self._phase(part))]

    def _phase(self, part: Action) -> int:
        return part.stage // self.stages

    def _buffer(self, part: Action) -> int:
        return self._phase(part) * self.micro_batches + (part.microbatch or 0)


def check_sizes(schedule: Any) -> None:
    if schedule.micro_batches < 1:
        raise ScheduleError(f"microbatches must be from 1, got {schedule.micro_batches}")
    if not 0 <= schedule.stage_id < schedule.stages:
        raise ScheduleError(f"stage_id {schedule.stage_id}: there are {schedule.stages} stages, 0 to {schedule.stages - 1}")


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _is_odd(x: int) -> bool:
    return x % 2 != 0
