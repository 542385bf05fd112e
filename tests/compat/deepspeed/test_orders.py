"""Our schedules as schedules of DeepSpeed's."""

from __future__ import annotations

import types
from typing import Any

import pytest

import penstock as ps
from compat.deepspeed.plainly import run
from penstock.compat.deepspeed import as_deepspeed, prove, to_program
from penstock.compat.deepspeed import schedule as ours
from penstock.compat.deepspeed.proof import to_plain
from penstock.errors import ScheduleError, UnknownNameError, VerifyError
from penstock.ir.placement import Placement

NAMES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "zb-auto")
SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 5, 9)]


def all_stages(factory: Any, stages: int, micro_batches: int) -> list[Any]:
    return [factory(micro_batches=micro_batches, stages=stages, stage_id=stage) for stage in range(stages)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_order_goes_right_in_an_engine_like_deepspeed_s(name: str, stages: int, micro_batches: int) -> None:
    made = all_stages(as_deepspeed(name), stages, micro_batches)
    run([to_plain(each) for each in made], micro_batches, [each.num_pipe_buffers() for each in made])
    assert prove(as_deepspeed(name), micro_batches=micro_batches, stages=stages).microbatches == micro_batches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_all_stages_but_the_last_keep_their_order(name: str, stages: int, micro_batches: int) -> None:
    merged = ps.PassList.parse("merge-backward{apart=true}").apply(ps.schedule(name, stages, micro_batches)).schedule()
    found = to_program(as_deepspeed(name), micro_batches=micro_batches, stages=stages).schedule()
    for rank in range(stages - 1):
        assert found[rank] == merged[rank]
    last = [str(action) for action in found[stages - 1]]
    assert last == [f"{stages - 1}{kind}{m}" for m in range(micro_batches) for kind in "FB"]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_1f1b_is_deepspeed_s_own_stream(stages: int, micro_batches: int) -> None:
    theirs = all_stages(ours.TrainSchedule, stages, micro_batches)
    for mine, own in zip(all_stages(as_deepspeed("1f1b"), stages, micro_batches), theirs, strict=True):
        assert repr(list(mine)) == repr(list(own))


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_a_gradient_comes_right_before_the_backward_that_uses_it(stages: int, micro_batches: int) -> None:
    """DeepSpeed's engine has one place for received gradients, which the next message overwrites."""
    for made in all_stages(as_deepspeed("eager-1f1b"), stages, micro_batches):
        for step in made:
            received = [each.buffer_id for each in step if each.name == "RecvGrad"]
            used = [each.buffer_id for each in step if each.name == "BackwardPass"]
            assert received == (used if made.stage_id < stages - 1 else [])


def most_at_once(made: Any) -> int:
    """The most microbatches that a stage holds at once, each from its fill to its last use."""
    flat = [each for step in made for each in step if "buffer_id" in each.kwargs]
    fill = "LoadMicroBatch" if made.stage_id == 0 else "RecvActivation"
    spans: list[list[int]] = []
    for at, each in enumerate(flat):
        if each.name == fill:
            spans.append([each.buffer_id, at, at])
        else:
            next(span for span in reversed(spans) if span[0] == each.buffer_id)[2] = at
    return max(sum(first <= at <= last for _, first, last in spans) for at in range(len(flat)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_buffers_are_as_many_as_microbatches_under_way(name: str, stages: int, micro_batches: int) -> None:
    for made in all_stages(as_deepspeed(name), stages, micro_batches):
        assert made.num_pipe_buffers() == max(most_at_once(made), min(2, micro_batches))
        if name == "gpipe" and not made.is_last_stage:
            assert made.num_pipe_buffers() == micro_batches


def test_forwards_alone_become_an_inference_schedule() -> None:
    for mine, own in zip(all_stages(as_deepspeed("inference"), 3, 4), all_stages(ours.InferenceSchedule, 3, 4), strict=True):
        assert repr(list(mine)) == repr(list(own))


def test_a_made_schedule_is_made_again_for_another_count() -> None:
    made = as_deepspeed(ps.schedule("gpipe", 2, 4))
    assert made.__name__ == "GpipeSchedule"
    assert issubclass(made, ours.PipeSchedule)
    assert len([each for step in made(6, 2, 0) for each in step if each.name == "ForwardPass"]) == 6


def test_a_program_and_an_order_of_ones_own() -> None:
    lowered = as_deepspeed(ps.lower(ps.schedule("zb-h1", 2, 4)))(4, 2, 0)
    assert repr(list(lowered)) == repr(list(as_deepspeed("zb-h1")(4, 2, 0)))
    rows = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]
    reverse = as_deepspeed(ps.Schedule.from_actions(rows, Placement.linear(2)))
    made = all_stages(reverse, 2, 2)
    run([to_plain(each) for each in made], 2, [each.num_pipe_buffers() for each in made])
    assert [each.buffer_id for step in made[0] for each in step if each.name == "BackwardPass"] == [1, 0]


def test_a_first_stage_that_takes_microbatches_in_another_order() -> None:
    """The data come in their own order; which microbatch is which follows from the loads."""
    rows = [["0F1", "0F0", "0B1", "0B0"], ["1F1", "1B1", "1F0", "1B0"]]
    made = all_stages(as_deepspeed(ps.Schedule.from_actions(rows, Placement.linear(2))), 2, 2)
    run([to_plain(each) for each in made], 2, [each.num_pipe_buffers() for each in made])


def derive_classes() -> dict[str, type]:
    """A class of the same name for each class of the schedule module, as another module would have them."""
    return {
        name: type(name, (each,), {})
        for name, each in vars(ours).items()
        if getattr(each, "__module__", "") == ours.__name__ and isinstance(each, type)
    }


def test_the_instructions_of_another_module() -> None:
    """DeepSpeed's engine takes its own classes only, by identity."""
    theirs = types.SimpleNamespace(**derive_classes())
    made = as_deepspeed("gpipe", module=theirs)(micro_batches=2, stages=2, stage_id=1)  # type: ignore[arg-type]
    assert isinstance(made, theirs.PipeSchedule)
    assert {type(each) for step in made for each in step} <= set(vars(theirs).values())


def test_deepspeed_s_own_module_is_taken_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.ModuleType("deepspeed.runtime.pipe.schedule")
    vars(theirs).update(derive_classes())
    monkeypatch.setitem(__import__("sys").modules, theirs.__name__, theirs)
    made = as_deepspeed("gpipe")(2, 2, 0)
    assert isinstance(made, theirs.PipeSchedule)
    assert type(next(iter(made))[0]) is theirs.LoadMicroBatch


@pytest.mark.parametrize(
    ("given", "options", "error", "said"),
    [
        ("zbv", {}, ScheduleError, "zbv places 2 stages on a rank, but DeepSpeed's instructions know one"),
        ("interleaved-1f1b", {}, ScheduleError, "places 2 stages on a rank"),
        (ps.schedule("zbv", 2, 4), {}, ScheduleError, "4 stages on 2 ranks"),
        ("gpip", {}, UnknownNameError, "did you mean 'gpipe'"),
        (3, {}, ScheduleError, "as_deepspeed takes a Schedule, a Program or the name of a schedule, got int"),
        (ps.schedule("gpipe", 2, 4), {"chunks": 2}, ScheduleError, "option 'chunks' goes with the name of a schedule"),
    ],
)
def test_what_deepspeed_cannot_run_is_refused_at_once(given: Any, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        as_deepspeed(given, **options)
    assert said in str(caught.value)


def test_sizes_that_do_not_fit() -> None:
    fixed = ps.Schedule.from_actions([["0F0", "0B0"], ["1F0", "1B0"]], Placement.linear(2))
    with pytest.raises(ScheduleError, match="has 2 ranks, but the engine has 3 stages: make it for 3 ranks"):
        list(as_deepspeed(fixed)(1, 3, 0))
    with pytest.raises(ScheduleError, match="for 1 microbatches, but the engine runs 2: set gradient_accumulation_steps to 1"):
        list(as_deepspeed(fixed)(2, 2, 0))
    with pytest.raises(ScheduleError, match="stage_id 2: there are 2 stages"):
        as_deepspeed(fixed)(1, 2, 2).num_pipe_buffers()


def test_stages_that_take_microbatches_in_different_orders_are_refused() -> None:
    """The labels would be those of another microbatch."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F1", "1F0", "1B1", "1B0"]]
    with pytest.raises(VerifyError, match="microbatch"):
        as_deepspeed(ps.Schedule.from_actions(rows, Placement.linear(2)))


def test_what_is_refused_at_once() -> None:
    for make, match in (
        (lambda: as_deepspeed("gpipe", foo=1), "no option 'foo'"),
        (lambda: as_deepspeed("interleaved-1f1b"), "2 stages on a rank"),
        (lambda: prove(ours.TrainSchedule, micro_batches=2, stages=0), "got stages=0"),
        (lambda: prove(ours.TrainSchedule(2, 2, 0), micro_batches=2, stages=2), "got a TrainSchedule"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ScheduleError, match=match):
            make()


def test_an_interleaved_schedule_of_one_chunk() -> None:
    made = as_deepspeed("interleaved-1f1b", chunks=1)
    assert prove(made, micro_batches=4, stages=2)
