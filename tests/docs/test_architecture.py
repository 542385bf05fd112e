"""`docs/architecture.md` is true: its files exist, its picture shows every room, and its walks are what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from docs.blocks import ROOT
from docs.walks import (
    PAGE,
    PROCESSES_ONLY,
    SLICES_ONLY,
    SOURCE,
    SPLIT_ONLY,
    STEP,
    THREADS_ONLY,
    check_step,
    section,
    trace,
    trace_step,
    walk,
)
from maker.rooms import PICTURE, ROOMS, picture
from penstock.runtime import launch
from penstock.schedules.registry import algorithms

OUTSIDE = ("web/", "tests/", "docs/")
MOST_FILES = 19
"""The most files in the walk of a step: a longer one can no longer be read in one sitting."""


def named_files(text: str = PAGE) -> list[str]:
    """Every path in prose, list items and tables."""
    return re.findall(r"`([\w./-]+\.(?:py|md|ts|tsx))`", text)


def named_folders() -> list[str]:
    """Every path that ends with a slash, except the one that all others are relative to."""
    return re.findall(r"`([\w-]+/(?:[\w./-]+/)?)`", PAGE.replace("`src/penstock/`", ""))


def test_every_named_file_and_folder_exists() -> None:
    assert [path for path in named_files() if not ((ROOT if path.startswith(OUTSIDE) else SOURCE) / path).is_file()] == []
    assert [path for path in named_folders() if not ((ROOT if path.startswith(OUTSIDE) else SOURCE) / path).is_dir()] == []


def list_entries() -> list[str]:
    """Every numbered item of a walk and every row of the table of changes: each has names beside the files that define them."""
    items = re.findall(r"^\d+\. .*$", PAGE, flags=re.MULTILINE)
    return items + re.findall(r"^\| .*$", section("Where do I change X?"), flags=re.MULTILINE)[1:]


def defines(path: Path, name: str) -> bool:
    """Whether a file defines a class, function, method, constant or type of this name."""
    kinds = r"class|def" if path.suffix == ".py" else r"class|function|interface|type|const"
    text = path.read_text(encoding="utf-8")
    return re.search(rf"^\s*(export )?({kinds}) {name}\b|^{name}\b[^\n]*=", text, flags=re.MULTILINE) is not None


@pytest.mark.parametrize("entry", list_entries(), ids=lambda entry: re.sub(r"\W+", " ", entry).strip()[:40])
def test_every_name_is_defined_in_a_file_beside_it(entry: str) -> None:
    files = [(ROOT if path.startswith(OUTSIDE) else SOURCE) / path for path in named_files(entry)]
    for name in set(re.findall(r"`(?:[A-Z]\w+\.)?([A-Za-z]\w+)`", entry)):
        assert any(defines(path, name) for path in files if path.suffix != ".md"), name


def test_the_page_names_files_of_every_room() -> None:
    named = {path.split("/")[0] for path in named_files() if "/" in path}
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= named


def test_the_picture_is_drawn_by_the_script_and_shows_every_room() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "run python docs/maker/rooms.py to draw it"
    drawn = {room.name: {name for row in room.inside for name in row} for room in ROOMS if room.name not in ("web", "errors.py")}
    assert drawn == {folder.name: set(rooms_in(folder)) for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    for room in drawn["runtime"]:
        assert f"\n| `{room}` |" in PAGE


def rooms_in(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir() if (path / "__init__.py").exists())


def test_higher_rooms_are_drawn_above_those_they_import() -> None:
    from test_layering import ALLOWED
    from test_layering import ROOMS as RUNTIME

    tops = {room.name: room.y for room in ROOMS}
    for room, lower in ALLOWED.items():
        assert all(tops[room] <= tops[other] for other in lower if room in tops)
    rows = {name: place for room in ROOMS if room.name == "runtime" for place, names in enumerate(room.inside) for name in names}
    assert all(rows[room] <= rows[other] for room, lower in RUNTIME.items() for other in lower - {"pipeline"})


# Tracing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_walk_of_a_step_on_virtual_ranks(schedule: str) -> None:
    check_step(launch(trace_step, ranks=2, args=(schedule,)), "threads", schedule)


@pytest.mark.parametrize("schedule", [name for name in algorithms() if name not in ("inference", "data-parallel")])
def test_no_schedule_takes_another_way(schedule: str) -> None:
    """Nor calls back into the pipeline; two copies of each stage add the files that sum their gradients and statistics."""
    table = ps.schedule(schedule, 2, 4)
    visited = set().union(*launch(trace_step, ranks=2, args=(schedule, (8, 8, 8) if table.slices > 1 else (8, 8))))
    if table.slices > 1:
        assert visited >= SLICES_ONLY
        visited -= SLICES_ONLY | {"runtime/torch_internals/tensors.py"}  # of operators on more than two dimensions
    if len(table.placement.copies) == 1:
        assert visited <= set(walk(STEP)) | THREADS_ONLY
        assert len(visited) <= MOST_FILES


def test_the_walk_of_a_step_can_be_read_in_one_sitting() -> None:
    assert 15 <= len(walk(STEP)) <= MOST_FILES
    assert (SPLIT_ONLY | PROCESSES_ONLY).issubset(walk(STEP))
    assert all(f"`{path}`" in section(STEP) for path in THREADS_ONLY)


def test_walk_of_a_plan() -> None:
    layers = [ps.Layer(f=1.0 + k / 4, i=1.0, w=1.0, activation=1.0, weight_stash=0.5, parameters=0.25) for k in range(8)]
    profile = ps.Profile(layers=layers, latency=0.05)

    def make_plan() -> ps.Plan:
        options = {"schedules": ["1f1b", "zb-h1", "searched"], "rounds": 20, "seconds": 60}
        return ps.plan(profile, ranks=2, microbatches=4, memory_limit=9.0, **options)

    make_plan()  # a module that is imported counts as entered
    plan, calls = trace(make_plan)
    visited = dict.fromkeys(called for called, _ in calls)
    assert plan.proof
    expected = walk("The walk of a plan")
    assert len(expected) > 10
    assert [path for path in visited if path in expected] == expected
