"""DeepSpeed's names, and the streams behind them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest

from compat.deepspeed import rederived
from penstock.compat.deepspeed import schedule
from penstock.errors import ScheduleError

# What `deepspeed.runtime.pipe.schedule` has, and what each class comes from.
CLASSES = {
    "PipeSchedule": "ABC",
    "InferenceSchedule": "PipeSchedule",
    "TrainSchedule": "PipeSchedule",
    "DataParallelSchedule": "PipeSchedule",
    "DualPipeVSchedule": "PipeSchedule",
    "PipeInstruction": "object",
    "OptimizerStep": "PipeInstruction",
    "ReduceGrads": "PipeInstruction",
    "ReduceTiedGrads": "PipeInstruction",
    "CommitP2P": "PipeInstruction",
    "BufferOpInstruction": "PipeInstruction",
    "LoadMicroBatch": "BufferOpInstruction",
    "ForwardPass": "BufferOpInstruction",
    "BackwardPass": "BufferOpInstruction",
    "SendActivation": "BufferOpInstruction",
    "RecvActivation": "BufferOpInstruction",
    "SendGrad": "BufferOpInstruction",
    "RecvGrad": "BufferOpInstruction",
}


def said(made: schedule.PipeSchedule) -> list[list[str]]:
    return [[repr(each) for each in step] for step in made]


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 9))
def test_train_streams_of_every_size(stages: int) -> None:
    for micro_batches in range(1, 25):
        for stage in range(stages):
            made = schedule.TrainSchedule(micro_batches, stages, stage)
            assert said(made) == rederived.train(micro_batches, stages, stage)
            assert made.num_pipe_buffers() == rederived.train_buffers(micro_batches, stages, stage)


@pytest.mark.parametrize("stages", range(1, 9))
def test_inference_streams_of_every_size(stages: int) -> None:
    for micro_batches in range(1, 25):
        for stage in range(stages):
            made = schedule.InferenceSchedule(micro_batches, stages, stage)
            assert said(made) == rederived.inference(micro_batches, stages, stage)
            assert made.num_pipe_buffers() == 2


@pytest.mark.parametrize("micro_batches", range(1, 25))
def test_data_parallel_streams(micro_batches: int) -> None:
    for stages, stage in ((1, 0), (3, 1)):
        made = schedule.DataParallelSchedule(micro_batches, stages, stage)
        assert said(made) == rederived.data_parallel(micro_batches)
        assert made.num_pipe_buffers() == 1


def test_a_step_says_its_microbatch() -> None:
    """The helper that subclasses of DeepSpeed's class call, against the stream."""
    for stages in range(1, 6):
        for stage in range(stages):
            made = schedule.TrainSchedule(7, stages, stage)
            for step, instructions in enumerate(made):
                microbatch, forward = made._step_to_micro_batch(step)
                name = "ForwardPass" if forward else "BackwardPass"
                wanted = [f"{name}(buffer_id={made._buffer_idx(microbatch)})"] if 0 <= microbatch < 7 else []
                assert [repr(each) for each in instructions if each.name in ("ForwardPass", "BackwardPass")] == wanted


# The protocol ---------------------------------------------------------------------------------------------------------


def test_every_class_is_there_under_its_name_and_base() -> None:
    for name, base in CLASSES.items():
        made = getattr(schedule, name)
        assert inspect.isclass(made)
        assert made.__bases__[0].__name__ == base, name


def test_the_functions_of_the_module() -> None:
    assert schedule.call_to_str("f") == "f()"
    assert schedule.call_to_str("f", 1, "a", b=[2]) == "f(1, 'a', b=[2])"
    assert [schedule._is_even(x) for x in range(-1, 3)] == [False, True, False, True]
    assert [schedule._is_odd(x) for x in range(-1, 3)] == [True, False, True, False]


def test_the_questions_that_a_schedule_answers() -> None:
    made = schedule.TrainSchedule(micro_batches=8, stages=3, stage_id=1)
    assert (made.micro_batches, made.stages, made.stage_id, made.prev_stage, made.next_stage) == (8, 3, 1, 0, 2)
    assert (made.num_micro_batches, made.num_stages, made.stage) == (8, 3, 1)
    assert (made.is_first_stage, made.is_last_stage) == (False, False)
    assert [made._valid_micro_batch(m) for m in (-1, 0, 7, 8)] == [False, True, True, False]
    assert [made._valid_stage(s) for s in (-1, 0, 2, 3)] == [False, True, True, False]
    assert [made._buffer_idx(m) for m in range(4)] == [0, 1, 0, 1]
    with pytest.raises(AssertionError):
        made._buffer_idx(8)


def test_a_schedule_can_be_iterated_again_and_by_hand() -> None:
    made = schedule.TrainSchedule(4, 2, 0)
    assert said(made) == said(made)
    walk = iter(made)
    assert walk is made
    assert [repr(each) for each in next(walk)] == ["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)"]
    iter(made)
    assert [repr(each) for each in next(made)] == ["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)"]


def test_steps_are_abstract_and_buffers_are_one_a_microbatch() -> None:
    with pytest.raises(TypeError, match="abstract"):
        schedule.PipeSchedule(2, 2, 0)  # type: ignore[abstract]

    class Mine(schedule.PipeSchedule):
        def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
            yield [schedule.LoadMicroBatch(self._buffer_idx(1))]

    assert Mine(5, 2, 0).num_pipe_buffers() == 5
    assert said(Mine(5, 2, 0)) == [["LoadMicroBatch(buffer_id=1)"]]


def test_a_subclass_may_have_more_buffers() -> None:
    class Roomy(schedule.TrainSchedule):
        def num_pipe_buffers(self) -> int:
            return 5

    made = [each.buffer_id for step in Roomy(7, 2, 1) for each in step if isinstance(each, schedule.ForwardPass)]
    assert made == [0, 1, 2, 3, 4, 0, 1]


def test_instructions_keep_their_arguments() -> None:
    made = schedule.PipeInstruction(a=1, b="x")
    assert (made.name, made.kwargs, made.a, made.b) == ("PipeInstruction", {"a": 1, "b": "x"}, 1, "x")  # type: ignore[attr-defined]
    assert repr(schedule.LoadMicroBatch(buffer_id=0)) == str(schedule.LoadMicroBatch(0)) == "LoadMicroBatch(buffer_id=0)"
    assert repr(schedule.SendGrad(3, phase=1)) == "SendGrad(buffer_id=3, phase=1)"
    assert repr(schedule.OptimizerStep()) == "OptimizerStep()"
    with pytest.raises(TypeError):
        schedule.ForwardPass()  # type: ignore[call-arg]


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ScheduleError, match="stage_id 3: there are 3 stages, 0 to 2"):
        list(schedule.TrainSchedule(4, 3, 3))
    with pytest.raises(ScheduleError, match="microbatches must be from 1"):
        list(schedule.InferenceSchedule(0, 3, 0))


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys, penstock.compat.deepspeed as d, penstock.compat.deepspeed.schedule as s\n"
        "list(s.TrainSchedule(4, 2, 0)); d.prove(d.as_deepspeed('gpipe'), micro_batches=3, stages=2)\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


class Same(schedule.TrainSchedule):
    """Overrides the hook by which DeepSpeed's own schedule says what a step does, and changes nothing."""

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        return super()._step_to_micro_batch(step_id)


class NoBackward(schedule.TrainSchedule):
    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        micro_batch, forward = super()._step_to_micro_batch(step_id)
        return (micro_batch if forward else -1), forward


def test_a_subclass_that_says_what_each_step_does() -> None:
    for stages in range(1, 6):
        for micro_batches in range(1, 8):
            for stage in range(stages):
                mine = repr(list(Same(micro_batches, stages, stage)))
                assert mine == repr(list(schedule.TrainSchedule(micro_batches, stages, stage)))
    names = [each.name for step in NoBackward(2, 2, 0) for each in step]
    assert names.count("ForwardPass") == 2
    assert not {"BackwardPass", "RecvGrad"} & set(names)


# Hooks ----------------------------------------------------------------------------------------------------------------


IDS = ("_even_step_forward_id", "_odd_step_forward_id", "_even_step_backward_id", "_odd_step_backward_id")


def names(made: schedule.PipeSchedule) -> list[str]:
    return [each.name for step in made for each in step]


@pytest.mark.parametrize("hook", IDS)
def test_a_subclass_that_says_a_microbatch_of_its_own(hook: str) -> None:
    """Each hook is asked on the stages of its parity, and what it says is what runs."""
    direction = "ForwardPass" if "forward" in hook else "BackwardPass"
    stage = int(hook.startswith("_odd")) if direction == "ForwardPass" else int(hook.startswith("_even"))
    lost = type("Lost", (schedule.TrainSchedule,), {hook: lambda self, step: -1})
    assert names(lost(3, 2, stage)).count(direction) == 0
    assert names(lost(3, 2, 1 - stage)) == names(schedule.TrainSchedule(3, 2, 1 - stage))
    doubled = type("Doubled", (schedule.TrainSchedule,), {hook: lambda self, step: 1})
    found = [repr(each) for step in doubled(3, 2, stage) for each in step if each.name == direction]
    assert found == [f"{direction}(buffer_id=1)"] * 4


def test_the_hooks_of_a_step_work_for_every_step_and_stage() -> None:
    """A forward of microbatch m is in step 2m + s, its backward in step 2m + 2p - 1 - s."""
    for stage in range(4):
        made = schedule.TrainSchedule(5, 4, stage)
        parity = "_odd" if stage % 2 else "_even"
        other = "_even" if stage % 2 else "_odd"
        assert [getattr(made, f"{parity}_step_forward_id")(2 * m + stage) for m in range(5)] == list(range(5))
        assert [getattr(made, f"{other}_step_backward_id")(2 * m + 7 - stage) for m in range(5)] == list(range(5))


class Alone(schedule.TrainSchedule):
    """A stage without neighbours."""

    def _valid_stage(self, stage_id: int) -> bool:
        return False


class AloneForward(schedule.InferenceSchedule):
    def _valid_stage(self, stage_id: int) -> bool:
        return False


@pytest.mark.parametrize("kind", [Alone, AloneForward])
def test_a_subclass_that_says_which_neighbours_there_are(kind: type[schedule.PipeSchedule]) -> None:
    for stage in range(3):
        assert not [name for name in names(kind(4, 3, stage)) if name.startswith(("Send", "Recv"))]
        assert names(kind(4, 3, stage)).count("ForwardPass") == 4


class FirstTwo(schedule.TrainSchedule):
    """Runs the first two microbatches alone."""

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < 2


class FirstTwoForward(schedule.InferenceSchedule):
    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < 2


@pytest.mark.parametrize(("kind", "like"), [(FirstTwo, schedule.TrainSchedule), (FirstTwoForward, schedule.InferenceSchedule)])
def test_a_subclass_that_says_which_microbatches_there_are(kind: type[schedule.PipeSchedule], like: type[schedule.PipeSchedule]) -> None:
    for stage in range(3):
        assert names(kind(5, 3, stage)) == names(like(2, 3, stage))


def test_a_hook_of_one_object() -> None:
    made = schedule.TrainSchedule(4, 2, 0)
    made._valid_stage = lambda stage_id: False  # type: ignore[method-assign]
    assert not [name for name in names(made) if name.startswith(("Send", "Recv"))]
