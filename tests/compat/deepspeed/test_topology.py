"""Ranks among stages, replicas and slices, and one rank's view of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.compat.deepspeed import topology as t
from penstock.errors import ScheduleError
from penstock.runtime import launch


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_coordinates_are_the_digits_of_a_rank(dims: list[int]) -> None:
    axes = list("abcd"[: len(dims)])
    made = t.ProcessTopology(axes, dims)
    for rank in range(made.world_size()):
        coord, left = made.get_coord(rank), rank
        for axis, dim in reversed(list(zip(axes, dims, strict=True))):
            left, digit = divmod(left, dim)
            assert getattr(coord, axis) == digit
        assert left == 0
        assert made.get_rank(**coord._asdict()) == rank
        assert made.mapping[coord] == rank
    assert [made.get_dim(axis) for axis in axes] == dims


@given(dims=st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_lists_along_an_axis_hold_every_rank_once(dims: list[int]) -> None:
    axes = list("abcd"[: len(dims)])
    made = t.ProcessTopology(axes, dims)
    for axis in axes:
        lists = made.get_axis_comm_lists(axis)
        assert sorted(rank for each in lists for rank in each) == list(range(made.world_size()))
        for each in lists:
            coords = [made.get_coord(rank) for rank in each]
            assert [getattr(coord, axis) for coord in coords] == list(range(made.get_dim(axis)))
            assert len({coord._replace(**{axis: 0}) for coord in coords}) == 1
        for at in range(made.get_dim(axis)):
            assert made.get_axis_list(axis, at) == made.filter_match(**{axis: at}) == sorted(each[at] for each in lists)


def test_what_deepspeed_documents() -> None:
    made = t.ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert made.get_rank(x=0, y=1) == 1
    assert (made.get_coord(1).x, made.get_coord(1).y) == (0, 1)
    assert (made.get_axis_list("x", 0), made.get_axis_list("y", 0)) == ([0, 1, 2], [0, 3])
    assert (made.get_axis_names(), made.get_dim("y"), made.get_dim("z"), made.get_axis_comm_lists("z")) == (["x", "y"], 3, 0, [])
    cube = t.ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert cube.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cube.filter_match(pipe=0, data=1) == [2, 3]
    square = t.ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert (square.get_rank_repr(3), square.get_rank_repr(3, omit_axes=["a"])) == ("a_01-b_01", "b_01")
    assert cube.get_rank_repr(3) == "model_01"
    assert t.PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4).dims == [2, 4, 3]
    assert t.PipeDataParallelTopology(num_pp=2, num_dp=3).axes == ["pipe", "data"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda made: made.get_rank(x=0), "takes a coordinate for each of x, y, got x"),
        (lambda made: made.get_rank(x=0, y=3), "outside of the topology"),
        (lambda made: made.get_coord(6), "rank 6 is not in the topology, which has ranks 0 to 5"),
        (lambda made: made.filter_match(yy=0), "no axis 'yy': did you mean 'y'"),
        (lambda made: t.ProcessTopology(["x", "x"], [1, 2]), "a name of its own"),
        (lambda made: t.ProcessTopology(["x"], [0]), "a size of 1 or more"),
    ],
)
def test_places_that_cannot_be(call: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        call(t.ProcessTopology(["x", "y"], [2, 3]))


def test_no_torch_is_loaded_for_topologies() -> None:
    code = "import sys, penstock.compat.deepspeed.topology as t\nt.PipeDataParallelTopology(2, 2)\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# Grids ----------------------------------------------------------------------------------------------------------------


def test_a_grid_on_threads() -> None:
    def view() -> dict[str, Any]:
        grid = t.PipelineParallelGrid(t.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
        with pytest.raises(ScheduleError, match="process groups exist only if ranks are processes"):
            grid.get_data_parallel_group()
        return {
            "place": (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()),
            "sizes": (grid.pipe_parallel_size, grid.data_parallel_size, grid.model_parallel_size, grid.world_size),
            "ends": (grid.is_first_stage, grid.is_last_stage),
            "lists": (grid.pp_group, grid.dp_group, grid.slice_group),
            "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
            "next": grid.p2p_groups[grid.get_global_rank()][1],
            "other": grid.stage_to_global(1 - grid.stage_id, data=0),
        }

    for rank, found in enumerate(launch(view, ranks=8)):
        pipe, data, model = rank // 4, rank // 2 % 2, rank % 2
        assert found == {
            "place": (pipe, data, model),
            "sizes": (2, 2, 2, 8),
            "ends": (pipe == 0, pipe == 1),
            "lists": ([rank % 4, rank % 4 + 4], [rank - 2 * data, rank - 2 * data + 2], [rank - model, rank - model + 1]),
            "model": (2 * pipe + model, 4),
            "next": (rank + 4) % 8,
            "other": (rank + 4) % 8 - 2 * data,
        }


@pytest.mark.parametrize(("ranks", "shape"), [(1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (6, (2, 3)), (8, (4, 2)), (12, (6, 2))])
def test_a_grid_without_a_topology(ranks: int, shape: tuple[int, int]) -> None:
    def view() -> tuple[int, int]:
        grid = t.PipelineParallelGrid()
        return grid.pipe_parallel_size, grid.data_parallel_size

    assert launch(view, ranks=ranks) == [shape] * ranks


def test_a_topology_for_other_ranks() -> None:
    with pytest.raises(ScheduleError, match="a topology of pipe 2 x data 2 has 4 ranks, but there are 1"):
        t.PipelineParallelGrid(t.PipeDataParallelTopology(2, 2))
