"""The lists and pictures of torch's schedule visualizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from compat.torch.both import BOTH, OURS, TORCH, made

NAMES = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV", "ZBVZeroBubble"]


def stripped(rows: list[list[Any]]) -> list[list[Any]]:
    """Remove the idle slots at the end."""
    return [row[: 1 + max((k for k, action in enumerate(row) if action is not None), default=-1)] for row in rows]


@pytest.mark.parametrize("options", [{}, {"with_comms": True}, {"with_comms": True, "defer_pp_recv": True}, {"add_spacing": True}])
@pytest.mark.parametrize("name", NAMES)
def test_schedule_ops(name: str, options: dict[str, bool]) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (3, 6)):
        theirs, mine = (package._schedule_visualizer.get_schedule_ops(name, ranks, microbatches, **options) for package in BOTH)
        if name == "ZBVZeroBubble" and options.get("add_spacing"):  # torch puts actions on the wrong ranks once one rank has ended
            assert stripped(mine) != stripped(theirs)
            assert [[a for a in row if a is not None] for row in mine] == [
                [a for a in row if a is not None] for row in OURS._schedule_visualizer.get_schedule_ops(name, ranks, microbatches)
            ]
        else:
            assert stripped(mine) == stripped(theirs)


@pytest.mark.parametrize(("name", "ours"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
def test_one_stage_per_rank(name: str, ours: str) -> None:
    """Torch fails on both views."""
    get = OURS._schedule_visualizer.get_schedule_ops
    spaced = get(name, 4, 6, add_spacing=True)
    timeline = ps.simulate(ps.schedule(ours, 4, 6))
    for rank in range(4):
        at, starts = 0.0, []
        for action in spaced[rank]:
            starts += [] if action is None else [at]
            at += 2 if action is not None and str(action)[1] == "B" else 1
        assert starts == [span.start for span in timeline.spans(rank)]
    sends = sum(str(action).startswith("0SEND_F") for action in get(name, 4, 6, with_comms=True)[0])
    assert sends == 6
    for options in ({"add_spacing": True}, {"with_comms": True}):
        with pytest.raises((RuntimeError, TypeError)):
            TORCH._schedule_visualizer.get_schedule_ops(name, 4, 6, **options)


def test_a_class_instead_of_a_name() -> None:
    for package in BOTH:
        get, schedules = package._schedule_visualizer.get_schedule_ops, package.schedules
        assert get(schedules.ScheduleInterleaved1F1B, 2, 4, 3) == [
            made(package, "ScheduleInterleaved1F1B", 2, 3, 4).pipeline_order[rank] for rank in range(2)
        ]
        with pytest.raises(ValueError, match="Cannot add spacing and view comms"):
            get("1F1B", 2, 4, add_spacing=True, with_comms=True)
        for wrong in (("GPipe", 2), ("LoopedBFS", 1)):
            with pytest.raises(AssertionError):
                get(wrong[0], 2, 4, wrong[1])
    with pytest.raises(ValueError, match="Invalid schedule"):
        OURS._schedule_visualizer.get_schedule_ops(OURS.schedules._PipelineSchedule, 2, 4)


def test_deadlocks_are_refused() -> None:
    action = OURS.schedules._Action.from_str
    with pytest.raises(RuntimeError, match="possible deadlock"):
        OURS._schedule_visualizer.add_schedule_op_spacing([[action("0B0"), action("0F0")], [action("1F0"), action("1B0")]])
    assert OURS._schedule_visualizer.add_schedule_op_spacing([[None], []]) == [[], []]


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    module = OURS._schedule_visualizer
    for name, options in (("DualPipeV", {"with_comms": True}), ("1F1B", {"add_spacing": True}), ("ZBVZeroBubble", {})):
        file = tmp_path / f"{name}.png"
        module.visualize_schedule(module.get_schedule_ops(name, 2, 4, **options), str(file))
        assert file.read_bytes().startswith(b"\x89PNG")
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf().axes[0]))
    rows = module.get_schedule_ops("GPipe", 2, 3, add_spacing=True)
    module.visualize_schedule(rows)
    (axes,) = shown
    actions = [action for row in rows for action in row if action is not None]
    assert [text.get_text() for text in axes.texts] == [str(action) for action in actions]
    assert len(axes.patches) == len(actions)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"Forward", "Full Backward"}
    assert not plt.get_fignums()
