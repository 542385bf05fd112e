"""The terminal's timeline: read back and compared with the spans."""

from __future__ import annotations

import re

import numpy as np
import pytest

import penstock as ps
from draw.samples import SAMPLES
from penstock.draw.palette import TONES, paint, plain_text, shade
from penstock.draw.terminal import ASCII_BARS, BARS, IDLE, MOST_RANKS, sparkline, timeline_lines
from penstock.ir.kind import Kind

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def blocks(timeline, **options) -> list[list[str]]:
    """The parts of the picture: rows, memory, legend, figures."""
    return [block.splitlines() for block in "\n".join(plain_text(timeline_lines(timeline, **options))).split("\n\n")]


def rows_of(timeline, width) -> list[str]:
    return [line.split(None, 2)[2] for line in blocks(timeline, width=width)[0][2:]]


@pytest.mark.parametrize("width", [60, 100, 333])
@pytest.mark.parametrize("name", SAMPLES)
def test_lines_fit_the_width(name, width):
    lines = list(plain_text(timeline_lines(SAMPLES[name], width=width)))
    assert max(map(len, lines)) <= width


def test_a_narrow_terminal_still_gets_a_picture():
    assert len(rows_of(SAMPLES["1f1b"], 1)[0]) == 20


@pytest.mark.parametrize("name", SAMPLES)
def test_one_row_and_one_bar_per_rank(name):
    timeline = SAMPLES[name]
    rows, memory, legend, _ = blocks(timeline, width=90)
    names = [f"rank {rank}" for rank in range(timeline.ranks)]
    assert [line.rsplit(maxsplit=1)[0][: len(wanted)] for line, wanted in zip(rows[2:], names, strict=True)] == names
    assert [" ".join(line.split()[:2]) for line in memory[1:]] == names
    assert legend[0].startswith(f"{IDLE} idle")


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "fsdp", "inference", "one rank"])
def test_wide_rows_name_every_action_in_order(name):
    timeline = SAMPLES[name]
    for rank, row in enumerate(rows_of(timeline, 700)):
        wanted = ["&".join(f"{part.kind.name}{part.microbatch}" for part in span.action.parts) for span in timeline.spans(rank)]
        wanted += ["S"] if timeline.optimizer[rank] else []
        assert re.findall(r"[FBIW]\d+(?:&[FBIW]\d+)*|S", row) == wanted
        assert not set(row) - set("FBIW&S0123456789. ")


@pytest.mark.parametrize("name", ["zbv", "interleaved", "zb-h1", "fsdp"])
def test_letters_show_what_runs_longest_in_a_cell(name):
    """Compare each cell with the moments in it, counted one by one."""
    timeline = SAMPLES[name]
    for rank, row in enumerate(rows_of(timeline, 60)):
        edges = np.linspace(0.0, timeline.makespan, len(row) + 1)
        spans = [(span.action.kind.name, span.start, span.end) for span in timeline.spans(rank)]
        step = timeline.optimizer[rank]
        spans += [("S", timeline.finished[rank] - step, timeline.finished[rank])] if step else []
        for letter, low, high in zip(row, edges[:-1], edges[1:], strict=True):
            inside = dict.fromkeys(["F", "B", "I", "W", "S"], 0.0)
            for kind, start, end in spans:
                inside[kind] += max(0.0, min(end, high) - max(start, low))
            inside[IDLE] = high - low - sum(inside.values())
            assert inside[letter] >= max(inside.values()) - 1e-9


def test_colours_follow_kind_and_chunk():
    timeline = SAMPLES["zbv"]
    text = "\n".join(paint(timeline_lines(timeline, width=700), "truecolor"))
    found = {f"#{bytes(map(int, colour)).hex()}" for colour in re.findall(r"48;2;(\d+);(\d+);(\d+)m", text)}
    wanted = {shade(TONES[kind], chunk, 2).fill for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1)}
    assert found == wanted | {TONES[kind].fill for kind in (Kind.F, Kind.I, Kind.W)}  # the legend's are not shade


@pytest.mark.parametrize("colours", ["truecolor", "256", "standard"])
@pytest.mark.parametrize("name", SAMPLES)
def test_colour_does_not_change_the_text(name, colours):
    lines = list(paint(timeline_lines(SAMPLES[name], width=80), colours))
    assert [ESCAPE.sub("", line).rstrip() for line in lines] == list(plain_text(timeline_lines(SAMPLES[name], width=80)))


def test_with_many_ranks_only_some_are_shown():
    timeline = ps.simulate(ps.schedule("gpipe", ranks=MOST_RANKS + 1, microbatches=2))
    rows, memory, notes, _ = blocks(timeline, width=100)
    assert len(rows) - 2 == len(memory) - 1 == (MOST_RANKS + 2) // 2
    assert notes[0] == f"1 in 2 of the {MOST_RANKS + 1} ranks is shown"


def test_sparkline_equals_one_computed_by_hand():
    held = np.array([0.0, 0.1, 1.0, 1.1, 4.0, 8.0])
    assert sparkline(held, 8.0) == " ▁▁▂▄█"
    assert sparkline(held, 8.0, ASCII_BARS) == " __.-#"
    assert sparkline(np.zeros(3), 0.0) == "   "
    assert len(BARS) == len(ASCII_BARS)


def test_ascii_on_request():
    text = "\n".join(plain_text(timeline_lines(SAMPLES["fsdp"], width=80, bars=ASCII_BARS)))
    assert text.isascii()


def test_peaks_are_next_to_their_rank():
    timeline = SAMPLES["1f1b"]
    memory = blocks(timeline, width=80)[1]
    assert [float(line.split()[-1]) for line in memory[1:]] == timeline.peak_memory == [4, 3, 2, 1]
