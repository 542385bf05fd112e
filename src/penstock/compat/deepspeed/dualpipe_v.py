"""DualPipeV in DeepSpeed's instructions: two stages per rank, full backwards, and messages that wait for a commit.

The order of the forwards and backwards is that of our `dualpipe-v`. A stream also says where each message is queued and which
instructions make a step; this module adds both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from penstock.compat.deepspeed.instructions import (
    BackwardPass,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.schedules.registry import schedule

Step = list[PipeInstruction]


class DualPipeVSchedule(PipeSchedule):
    """The V: rank r holds stages r (phase 0) and 2p-1-r (phase 1) of 2p; one buffer per phase and microbatch.

    Sends and receives only queue; `CommitP2P` starts them together and waits. `forward_only` leaves out the backwards.
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
        got = [each for part in parts if receive or part.kind is not Kind.F for each in self._receive(part)]
        done = [each for part in parts for each in self._compute(part)]
        return [*got, CommitP2P(), *done, *([each for part in parts for each in self._send(part)] if send else [])]

    def _weight(self) -> Step:
        """Where weight gradients would run apart; here only what was queued moves on."""
        return [] if self.forward_only else [CommitP2P()]

    def _compute(self, part: Action) -> Step:
        if part.kind is not Kind.F:
            return [] if self.forward_only else [BackwardPass(self._buffer(part), phase=self._phase(part))]
        load: Step = [LoadMicroBatch(self._buffer(part))] if part.stage == 0 else []
        return [*load, ForwardPass(self._buffer(part), phase=self._phase(part))]

    def _receive(self, part: Action) -> Step:
        """What the part needs of another rank: nothing at the ends of the model and at the turn of the V."""
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
