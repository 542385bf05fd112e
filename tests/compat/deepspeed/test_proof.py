"""Proofs of streams against a plain interpreter, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from compat.deepspeed.plainly import WentWrongError, instructions, run
from penstock.compat.deepspeed import prove, to_program
from penstock.compat.deepspeed import schedule as s
from penstock.compat.deepspeed.proof import build_program
from penstock.errors import PassError, VerifyError
from penstock.passes.deepspeed.instructions import Instruction, Stream, streams

ORDERS = ("1f1b", "eager-1f1b", "zb-h1")


def made(name: str, ranks: int, microbatches: int) -> tuple[list[Stream], list[int]]:
    schedule = ps.PassList.parse("merge-backward{apart=true}").apply(ps.schedule(name, ranks, microbatches))
    found = [[list(step) for step in stream] for stream in streams(schedule)]
    return found, [1 + max(each.buffer_id or 0 for step in stream for each in step) for stream in found]


def is_proved(found: Sequence[Stream], microbatches: int, buffers: Sequence[int]) -> bool:
    try:
        build_program(found, microbatches, buffers)
    except VerifyError:
        return False
    return True


def goes_right(found: list[Stream], microbatches: int, buffers: list[int]) -> bool:
    try:
        run(found, microbatches, buffers)
    except WentWrongError:
        return False
    return True


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_streams_of_our_orders_are_proved_and_go_right(name: str, ranks: int, microbatches: int) -> None:
    found, buffers = made(name, ranks, microbatches)
    assert is_proved(found, microbatches, buffers)
    assert goes_right(found, microbatches, buffers)


def disturbed(found: list[Stream], buffers: list[int], data: st.DataObject) -> None:
    """One or two small mistakes, of the kinds that people make."""
    for _ in range(data.draw(st.integers(1, 2))):
        stage, step, at = data.draw(st.sampled_from(list(instructions(found))))
        here = found[stage][step]
        match data.draw(st.sampled_from(("drop", "repeat", "buffer", "later", "swap"))):
            case "drop":
                del here[at]
            case "repeat":
                here.insert(at, here[at])
            case "buffer" if here[at].buffer_id is not None:
                here[at] = Instruction(here[at].name, data.draw(st.integers(0, buffers[stage])))
            case "later":
                each, later = here.pop(at), data.draw(st.integers(step, len(found[stage]) - 1))
                found[stage][later].insert(data.draw(st.integers(0, len(found[stage][later]))), each)
            case "swap" if len(here) > 1:
                other = data.draw(st.integers(0, len(here) - 1))
                here[at], here[other] = here[other], here[at]


@settings(max_examples=300)
@given(st.sampled_from(ORDERS), st.integers(1, 4), st.integers(1, 5), st.data())
def test_what_is_proved_goes_right(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    found, buffers = made(name, ranks, microbatches)
    disturbed(found, buffers, data)
    if is_proved(found, microbatches, buffers):
        run(found, microbatches, buffers)


@settings(max_examples=300)
@given(st.sampled_from(ORDERS), st.integers(1, 4), st.integers(1, 5), st.data())
def test_what_goes_right_is_proved(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    found, buffers = made(name, ranks, microbatches)
    disturbed(found, buffers, data)
    if goes_right(found, microbatches, buffers):
        build_program(found, microbatches, buffers)


# How mistakes are told ------------------------------------------------------------------------------------------------


class Changed(s.TrainSchedule):
    """DeepSpeed's training stream, with one thing done differently on one stage."""

    stage_to_change = 0

    def change(self, step: int, each: list[s.PipeInstruction]) -> list[s.PipeInstruction]:
        raise NotImplementedError

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        for step, each in enumerate(super().steps()):
            yield self.change(step, each) if self.stage_id == self.stage_to_change else each


def changed(stage: int, change: Callable[[int, list[s.PipeInstruction]], list[s.PipeInstruction]]) -> type[Changed]:
    return type("Mine", (Changed,), {"stage_to_change": stage, "change": lambda _self, step, each: change(step, each)})


def without(name: str) -> Callable[[int, list[s.PipeInstruction]], list[s.PipeInstruction]]:
    return lambda _step, each: [one for one in each if one.name != name]


def refused(factory: type[s.PipeSchedule], *, strict: bool = True, stages: int = 2) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        prove(factory, micro_batches=4, stages=stages, strict=strict)
    return caught.value


def test_a_buffer_that_is_used_before_it_is_filled() -> None:
    error = refused(changed(1, without("RecvActivation")))
    first = error.findings[0]
    assert (first.rule, first.rank, first.step, first.action) == ("buffer", 1, 1, "ForwardPass(buffer_id=0)")
    assert "it uses buffer 0 before RecvActivation has filled it" in str(error)
    assert "in the instructions of Mine, 2 stages, 4 microbatches" in str(error)


def test_a_buffer_that_is_filled_while_it_is_needed() -> None:
    class OneBuffer(s.TrainSchedule):
        def _buffer_idx(self, micro_batch_id: int) -> int:
            return 0

    text = str(refused(OneBuffer))
    assert "LoadMicroBatch(buffer_id=0)): it overwrites buffer 0, which is still needed: RecvGrad and BackwardPass" in text
    assert "use another buffer and count it in num_pipe_buffers()" in text


def test_a_buffer_that_the_stage_does_not_have() -> None:
    class Short(s.TrainSchedule):
        def _buffer_idx(self, micro_batch_id: int) -> int:
            return micro_batch_id

    assert "it names no buffer of the stage, which has 2" in str(refused(Short))


def test_neighbours_that_exchange_in_different_orders() -> None:
    """Both send first: each waits for the other's receive. On channels of their own the messages would pass each other."""
    both_send = type(
        "Mine",
        (Changed,),
        {"steps": lambda self: (sorted(step, key=lambda each: not each.name.startswith("Send")) for step in s.TrainSchedule.steps(self))},
    )
    error = refused(both_send)
    assert error.findings[0].rule == "deadlock"
    assert "rank 0 runs 0SEND_F1 (step 3), rank 1 runs 1SEND_B0 (step 3); neither it nor anything behind it completes" in str(error)
    assert "rank 0, step 3 (0SEND_F1) is SendActivation(buffer_id=1) in step 3 of the stream" in str(error)
    assert prove(both_send, micro_batches=4, stages=2, strict=False).semantics == "channels"


def test_a_cycle_of_waits_is_refused_without_strictness_too() -> None:
    """Stage 0 keeps its first output until the gradient of it is back."""

    class Greedy(s.PipeSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            if self.is_first_stage:
                yield [s.LoadMicroBatch(0), s.ForwardPass(0), s.RecvGrad(0), s.SendActivation(0), s.BackwardPass(0)]
            else:
                yield [s.RecvActivation(0), s.LoadMicroBatch(0), s.ForwardPass(0), s.BackwardPass(0), s.SendGrad(0)]

    with pytest.raises(VerifyError) as caught:
        prove(Greedy, micro_batches=1, stages=2, strict=False)
    assert [(each.rule, each.rank, each.action) for each in caught.value.findings] == [
        ("deadlock", 0, "0RECV_B0"),
        ("deadlock", 1, "1RECV_F0"),
    ]
    assert "it waits for 1SEND_B0, which is step 3 of rank 1, which has come as far as its step 0" in str(caught.value)
    assert "rank 0, step 1 (0RECV_B0) is RecvGrad(buffer_id=0) in step 0 of the stream" in str(caught.value)


def test_a_second_forward_before_the_backward_on_the_last_stage() -> None:
    class Gpipe(s.PipeSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            first, last = self.is_first_stage, self.is_last_stage
            for m in range(self.micro_batches):
                receive = [] if first else [s.RecvActivation(m)]
                load = [s.LoadMicroBatch(m)] if first or last else []
                yield [*receive, *load, s.ForwardPass(m), *([] if last else [s.SendActivation(m)])]
            for m in range(self.micro_batches):
                yield [*([] if last else [s.RecvGrad(m)]), s.BackwardPass(m), *([] if first else [s.SendGrad(m)])]

    error = refused(Gpipe)
    assert [finding.rule for finding in error.findings] == ["one-slot"] * 3
    assert "DeepSpeed's engine keeps one loss" in str(error)
    assert prove(Gpipe, micro_batches=4, stages=2, strict=False).microbatches == 4


def test_a_gradient_that_waits_while_another_message_comes() -> None:
    class Early(s.PipeSchedule):
        """Stage 0 of two receives both gradients before it uses the first."""

        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            if self.is_first_stage:
                yield [s.LoadMicroBatch(0), s.ForwardPass(0), s.SendActivation(0), s.LoadMicroBatch(1), s.ForwardPass(1)]
                yield [s.SendActivation(1), s.RecvGrad(0), s.RecvGrad(1), s.BackwardPass(0), s.BackwardPass(1)]
            else:
                for m in (0, 1):
                    yield [s.RecvActivation(m), s.LoadMicroBatch(m), s.ForwardPass(m), s.BackwardPass(m)]
                yield [s.SendGrad(0), s.SendGrad(1)]

    with pytest.raises(VerifyError, match="keeps one gradient, which the next receive overwrites"):
        prove(Early, micro_batches=2, stages=2)
    prove(Early, micro_batches=2, stages=2, strict=False)


def test_labels_of_another_microbatch() -> None:
    class Crossed(s.PipeSchedule):
        def num_pipe_buffers(self) -> int:
            return 2

        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            if self.is_first_stage:
                yield [each for m in (0, 1) for each in (s.LoadMicroBatch(m), s.ForwardPass(m), s.SendActivation(m))]
            else:
                yield [
                    s.RecvActivation(0),
                    s.RecvActivation(1),
                    s.LoadMicroBatch(1),
                    s.LoadMicroBatch(0),
                    s.ForwardPass(0),
                    s.ForwardPass(1),
                ]

    with pytest.raises(VerifyError, match="the loss of microbatch 0 with the labels of microbatch 1"):
        prove(Crossed, micro_batches=2, stages=2)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (changed(0, without("BackwardPass")), "the batch ends before it has run on what buffer 1 holds"),
        (changed(0, lambda _, each: [*each, s.SendGrad(0)]), "it cannot run: the first stage has no previous stage"),
        (changed(1, lambda _, each: [*each, s.RecvGrad(0)]), "it cannot run: the last stage has no next stage"),
        (changed(0, without("SendActivation")), "it waits forever: stage 0 sends 0 activations"),
        (changed(0, without("OptimizerStep")), "the stages run it 0, 1 times"),
        (changed(1, without("ReduceTiedGrads")), "the stages run it 1, 0 times"),
        (
            changed(0, lambda step, each: [s.ReduceGrads(), *each] if step == 3 else without("ReduceGrads")(step, each)),
            "it comes after Reduce",
        ),
        (changed(0, lambda _, each: [*each, each[-1]] if each and each[-1].name == "ForwardPass" else each), "it runs a second time"),
    ],
)
def test_other_mistakes(factory: type[s.PipeSchedule], said: str) -> None:
    text = str(refused(factory))
    assert said in text


def test_fewer_microbatches_than_asked_for() -> None:
    def short(micro_batches: int, stages: int, stage_id: int) -> s.PipeSchedule:
        return s.TrainSchedule(micro_batches - 1, stages, stage_id)

    with pytest.raises(VerifyError, match="complete"):
        prove(short, micro_batches=4, stages=2)


def test_instructions_that_nobody_knows_cannot_be_proved() -> None:
    with pytest.raises(PassError, match=r"stage 0: the meaning of CommitP2P\(\) is not known"):
        prove(s.DualPipeVSchedule, micro_batches=4, stages=2)


# What is proved -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stream_becomes_a_program_that_can_be_simulated(stages: int) -> None:
    program = to_program(s.TrainSchedule, micro_batches=6, stages=stages)
    assert program.schedule() == ps.schedule("1f1b", stages, 6)
    assert program.name == "TrainSchedule"
    timeline = ps.simulate(program, ps.Costs(f=1.0, i=1.0, w=1.0))
    assert timeline.makespan == (6 + stages - 1) * 3


def test_streams_of_forwards_alone() -> None:
    program = to_program(s.InferenceSchedule, micro_batches=5, stages=3)
    assert program.schedule() == ps.schedule("inference", 3, 5)
    assert prove(s.InferenceSchedule, micro_batches=5, stages=3).messages == 10
