"""Bad arguments are refused with what was given and what is allowed."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import PlacementError, ScheduleError, UnknownNameError
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.schedules.registry import algorithms

NAMES = sorted(algorithms())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", None, True])
def test_counts(name: str, wrong: object) -> None:
    with pytest.raises(ScheduleError, match=f"ranks must be .*{wrong!r}"):
        ps.schedule(name, ranks=wrong, microbatches=4)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=f"microbatches must be .*{wrong!r}"):
        ps.schedule(name, ranks=2, microbatches=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_chunks(name: str) -> None:
    layout = algorithms()[name].layout
    for wrong in (0, -2) if not layout.fixed else (0, layout.chunks + 1):
        with pytest.raises(ScheduleError, match=f"chunks.*{wrong}"):
            ps.schedule(name, ranks=2, microbatches=4, chunks=wrong)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_option(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"{name} has no option 'colour'; its options: "):
        ps.schedule(name, ranks=2, microbatches=4, colour="red")


@pytest.mark.parametrize(("wrong", "meant"), [("1F1", "1f1b"), ("zb-w", "zbv"), ("dualpip", "dualpipe"), ("interleaved", "interleaved-zb")])
def test_unknown_name_offers_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"no schedule '{wrong}': did you mean .*'{meant}'.*known: 1f1b, "):
        ps.schedule(wrong, ranks=2, microbatches=4)


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_dualpipe_takes_even_ranks(ranks: int) -> None:
    with pytest.raises(ScheduleError, match=f"even number of ranks, got {ranks}: take {ranks + 1}, or dualpipe-v"):
        ps.schedule("dualpipe", ranks=ranks, microbatches=8)


def test_data_parallel_takes_one_rank() -> None:
    with pytest.raises(ScheduleError, match="got ranks=2: take ranks=1"):
        ps.schedule("data-parallel", ranks=2, microbatches=8)
    assert [str(a) for a in ps.schedule("data-parallel", ranks=1, microbatches=2)[0]] == ["0F0", "0B0", "0F1", "0B1"]


def test_counts_that_do_not_fit_an_action() -> None:
    with pytest.raises(ScheduleError, match=f"from 1 to {MAX_MICROBATCHES}"):
        ps.schedule("1f1b", ranks=2, microbatches=MAX_MICROBATCHES + 1)
    with pytest.raises(ScheduleError, match=f"rounded up to what the algorithm takes, must be from 1 to {MAX_MICROBATCHES}"):
        ps.schedule("interleaved-1f1b", ranks=3, microbatches=MAX_MICROBATCHES)
    with pytest.raises(PlacementError, match="stages"):
        ps.schedule("zbv", ranks=40_000, microbatches=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ZBVZeroBubble", "zbv"),
        ("ScheduleDualPipeV", "dualpipe-v"),
        ("LoopedBFS", "looped-bfs"),
        ("zb_h1", "zb-h1"),
        ("DUALPIPE", "dualpipe"),
    ],
)
def test_names_of_pytorch_and_in_any_case(name: str, meant: str) -> None:
    assert ps.schedule(name, ranks=4, microbatches=8) == ps.schedule(meant, ranks=4, microbatches=8)
    assert ps.schedule(name, ranks=4, microbatches=8).name == meant
    assert name in algorithms()
    assert algorithms().get(name) is algorithms()[meant]
    assert meant in ps.available()
    assert name not in ps.available()


def test_every_name_of_pytorch_has_the_placement_of_its_class() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    v_shaped = {"ZBVZeroBubble", "DualPipeV"}
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"):
        kind = schedules.get_schedule_class(name)
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        placement = ps.schedule(kind.__name__, ranks=2, microbatches=4).placement.kind
        assert placement == ("linear" if single else "v" if name in v_shaped else "looped")


def test_a_placement_that_is_no_layout() -> None:
    def generate(shape: ps.Shape, rank: int) -> list[int]:
        """Do nothing."""
        return []

    with pytest.raises(ScheduleError, match=r"schedule 'mine' has no placement 'liner': did you mean 'linear'"):
        ps.register("mine", placement="liner")(generate)
    assert "mine" not in algorithms()


def test_the_order_of_forwards_in_groups() -> None:
    assert ps.Shape(2, 2, 4).forwards(2) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert ps.Shape(2, 2, 2).forwards() == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("interleaved-1f1b{chunks=4}", {"chunks": 2}, "chunks is given twice: in 'interleaved-1f1b{chunks=4}' and as an argument"),
        ("interleaved-1f1b{group_size=4}", {"group_size": 4}, "group_size is given twice"),
        ("interleaved-1f1b{ranks=4}", {}, "ranks is not an option of a schedule"),
        ("interleaved-1f1b{chunks}", {}, r"'chunks' is not NAME=VALUE: write interleaved-1f1b\{OPTION=VALUE,...\}"),
        ("zbv{chunk=2}", {}, "zbv has no option 'chunk'"),
    ],
)
def test_options_in_a_name(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        ps.schedule(name, 2, 8, **options)
