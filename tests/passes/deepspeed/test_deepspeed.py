"""DeepSpeed's streams, against the formulas that define them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import penstock as ps
from penstock.errors import FileFormatError, PassError
from penstock.passes.deepspeed.instructions import Instruction, stream, streams
from penstock.passes.deepspeed.text import format_streams, parse_streams, schedule_of


def _train(micro_batches: int, stages: int, stage: int) -> Iterator[list[str]]:
    """The 1F1B instruction stream step by step, from its arithmetic alone."""
    buffers = max(2, min(stages - stage, micro_batches))
    steps = 2 * (micro_batches + stages - 1)

    def microbatch(step: int) -> tuple[bool, int | None]:
        forward = step % 2 == stage % 2
        number = (step - stage) // 2 if forward else (step + stage + 1 - 2 * stages) // 2
        return forward, number if 0 <= number < micro_batches else None

    before: int | None = None
    for step in range(steps):
        forward, now = microbatch(step)
        said: list[str] = []
        if forward:
            if before is not None and stage > 0:
                said.append(f"SendGrad(buffer_id={before % buffers})")
            if now is not None and stage > 0:
                said.append(f"RecvActivation(buffer_id={now % buffers})")
            if now is not None and stage in (0, stages - 1):
                said.append(f"LoadMicroBatch(buffer_id={now % buffers})")
            if now is not None:
                said.append(f"ForwardPass(buffer_id={now % buffers})")
        else:
            if now is not None and stage < stages - 1:
                said.append(f"RecvGrad(buffer_id={now % buffers})")
            if before is not None and stage < stages - 1:
                said.append(f"SendActivation(buffer_id={before % buffers})")
            if now is not None:
                said.append(f"BackwardPass(buffer_id={now % buffers})")
        if step == steps - 1:
            said += ["ReduceTiedGrads()", "ReduceGrads()", "OptimizerStep()"]
        before = now
        yield said


def _inference(micro_batches: int, stages: int, stage: int) -> Iterator[list[str]]:
    for step in range(micro_batches + stages - 1):
        now = step - stage
        receive, send = (step % 2, (step + 1) % 2) if stage % 2 == 0 else ((step + 1) % 2, step % 2)
        here = 0 <= now < micro_batches
        sends = [f"SendActivation(buffer_id={send})"] if stage < stages - 1 and 0 <= now - 1 < micro_batches else []
        receives = [f"RecvActivation(buffer_id={receive})"] if stage > 0 and here else []
        load = [f"LoadMicroBatch(buffer_id={receive})"] if here and stage in (0, stages - 1) else []
        talk = sends + receives if stage % 2 == 0 else receives + sends
        yield load + talk + ([f"ForwardPass(buffer_id={receive})"] if here else [])


def _said(lists: list[list[Instruction]]) -> list[list[str]]:
    return [[str(each) for each in step] for step in lists]


SIZES = [(m, stages) for m in range(1, 13) for stages in range(1, 9)]


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_train_stream(micro_batches: int, stages: int) -> None:
    ours = streams(ps.schedule("1f1b", stages, micro_batches))
    for stage in range(stages):
        assert _said(ours[stage]) == list(_train(micro_batches, stages, stage))


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_inference_stream(micro_batches: int, stages: int) -> None:
    ours = streams(ps.schedule("inference", stages, micro_batches))
    for stage in range(stages):
        assert _said(ours[stage]) == list(_inference(micro_batches, stages, stage))


@pytest.mark.parametrize("micro_batches", range(1, 13))
def test_data_parallel_stream(micro_batches: int) -> None:
    one = ["LoadMicroBatch(buffer_id=0)", "ForwardPass(buffer_id=0)", "BackwardPass(buffer_id=0)"]
    wanted = [list(one) for _ in range(micro_batches)]
    wanted[-1] += ["ReduceGrads()", "OptimizerStep()"]
    assert _said(stream(ps.schedule("data-parallel", 1, micro_batches), 0)) == wanted


def test_lowered_program_gives_the_stream_of_its_schedule() -> None:
    schedule = ps.schedule("1f1b", 3, 5)
    assert streams(ps.lower(schedule)) == streams(schedule)


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_send_meets_its_receive_in_the_same_step(name: str, ranks: int) -> None:
    """What makes each list safe between barriers, for orders DeepSpeed does not have too."""
    lists = streams(ps.schedule(name, ranks, 5))
    for step in range(len(lists[0])):
        for rank in range(ranks - 1):
            up, down = ({each.name for each in lists[r][step]} for r in (rank, rank + 1))
            assert ("SendActivation" in up) == ("RecvActivation" in down)
            assert ("RecvGrad" in up) == ("SendGrad" in down)


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_no_buffer_is_taken_twice(name: str, ranks: int, micro_batches: int) -> None:
    """Play each rank's stream: a buffer is filled before it is used and not filled again before its backward is through."""
    for rank, steps in enumerate(streams(ps.schedule(name, ranks, micro_batches))):
        state: dict[int | None, str] = {}
        forwards = backwards = 0
        for each in (each for step in steps for each in step):
            buffer = each.buffer_id
            if each.name == "RecvActivation" or (each.name == "LoadMicroBatch" and rank == 0):
                assert state.get(buffer, "free") == "free"
                state[buffer] = "filled"
            elif each.name == "ForwardPass":
                assert state[buffer] == "filled"
                state[buffer], forwards = "computed", forwards + 1
            elif each.name == "BackwardPass":
                assert state[buffer] == "computed"
                state[buffer], backwards = "free" if rank == 0 else "gradient", backwards + 1
            elif each.name == "SendGrad":
                assert state[buffer] == "gradient"
                state[buffer] = "free"
        assert forwards == backwards == micro_batches


def test_what_the_dialect_cannot_say_is_refused() -> None:
    with pytest.raises(PassError, match="one stage per rank in a line, not v, 2 ranks"):
        streams(ps.schedule("zbv", 2, 4))
    with pytest.raises(PassError, match=r"not 0I0; merge-backward\{apart=true\}"):
        streams(ps.schedule("zb-h1", 2, 4))
    with pytest.raises(PassError, match="without backwards does not make a stream of style train"):
        streams(ps.schedule("inference", 2, 4), style="train")
    with pytest.raises(PassError, match="no stream style 'training'"):
        streams(ps.schedule("1f1b", 2, 4), style="training")
    with pytest.raises(PassError, match="has one stage, not 2"):
        streams(ps.schedule("1f1b", 2, 4), style="data-parallel")


def test_split_backwards_can_be_merged_for_the_dialect() -> None:
    merged = ps.PassList.parse("merge-backward{apart=true}").apply(ps.schedule("zb-h1", 3, 4))
    passes = [[each for step in steps for each in step if each.name == "BackwardPass"] for steps in streams(merged)]
    assert [len(each) for each in passes] == [4, 4, 4]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "eager-1f1b", "inference"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (1, 4), (2, 3), (4, 7)])
def test_text_of_a_stream_reads_back_as_its_schedule(name: str, ranks: int, micro_batches: int) -> None:
    schedule = ps.schedule(name, ranks, micro_batches)
    made = streams(schedule)
    assert parse_streams(format_streams(made)) == made
    assert schedule_of(made) == schedule


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the stream is empty"),
        ("rank 1\n", "line 1 is 'rank 1', but 'rank 0' comes next"),
        ("rank 0\n  1: ForwardPass(buffer_id=0)\n", "'rank 1' or step 0 of rank 0 comes next"),
        ("rank 0\n  0: ForwardPass()\n", "line 2: 'ForwardPass()' is not an instruction"),
        ("rank 0\n  0: Sleep(buffer_id=0)\n", "'Sleep(buffer_id=0)' is not an instruction"),
        ("rank 0\n  0: ForwardPass(buffer_id=0)\n", "rank 0, step 0: ForwardPass(buffer_id=0) cannot run, its buffer was never filled"),
        ("rank 0\n  0: RecvActivation(buffer_id=0)\n", "no rank sends what it receives"),
    ],
)
def test_bad_streams_are_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        schedule_of(parse_streams(text, "a.ds"), "a.ds")
    assert said in str(caught.value)
    assert str(caught.value).startswith("a.ds")
