"""Costs: scalars, one value per stage or one per stage and microbatch; refused by name; the same through every file."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, FileFormatError
from penstock.ir.costs import CONTENTION, Costs, parse_size

amounts = st.floats(0, 1e12)
SPREAD = ("s", "t", "broadcast", "combine", "logits")
PER_ACTION = ("f", "i", "w", "b", "activation", "weight_stash", "kept", "kept_gradients", "output", *SPREAD)
PER_STAGE = ("parameters", "shard", "unshard", "reduce", "optimizer")
ONE_NUMBER = ("overlap", "host_latency", "host_bandwidth")
LINKS = ("latency", "bandwidth")
PER_RANK = ("rank_s", "rank_t", "rank_logits")
rates = st.one_of(st.none(), st.floats(1e-9, 1e12))
an_action = st.one_of(amounts, st.lists(st.one_of(amounts, st.lists(amounts, max_size=4)), max_size=4))
any_costs = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(PER_ACTION, an_action),
        **{name: st.one_of(amounts, st.lists(amounts, max_size=4)) for name in PER_STAGE},
        **{name: st.floats(1e-9, 1e12) for name in ONE_NUMBER},
        **{name: st.one_of(amounts, st.lists(st.one_of(amounts, st.tuples(amounts, amounts)), max_size=4)) for name in PER_RANK},
        "latency": st.one_of(amounts, st.lists(st.lists(amounts, min_size=3, max_size=3), min_size=3, max_size=3)),
        "bandwidth": st.one_of(rates, st.lists(st.lists(rates, min_size=3, max_size=3), min_size=3, max_size=3)),
        "contention": st.sampled_from(CONTENTION[:-1]),
        "host_link_shared": st.integers(1, 8),
    },
).map(lambda given: Costs(**given))


def test_every_field_is_of_one_form() -> None:
    assert {field.name for field in fields(Costs)} == {
        *PER_ACTION,
        *PER_STAGE,
        *ONE_NUMBER,
        *LINKS,
        *PER_RANK,
        "lanes",
        "contention",
        "host_link_shared",
    }


@given(amounts, st.integers(1, 9))
def test_a_scalar_is_every_stages_value(value: float, stages: int) -> None:
    costs = Costs(f=value)
    assert costs.per_stage("f", stages) == (value,) * stages
    assert costs.of_stage("f", stages) == value


@given(st.lists(amounts, min_size=1, max_size=6))
def test_a_sequence_is_one_value_a_stage(values: list[float]) -> None:
    costs = Costs(activation=values)  # type: ignore[arg-type]
    assert costs.per_stage("activation", len(values)) == tuple(values)
    assert [costs.of_stage("activation", k) for k in range(len(values))] == values
    assert hash(costs) == hash(Costs(activation=tuple(values)))
    with pytest.raises(CostsError, match=f"activation has {len(values)} values for {len(values) + 1} stages"):
        costs.per_stage("activation", len(values) + 1)
    with pytest.raises(CostsError, match=f"stage {len(values)} is asked for"):
        costs.of_stage("activation", len(values))


def test_a_stage_that_a_rank_runs_for_several_copies_counts_once() -> None:
    placement = ps.Placement.custom([0, 3, 4], [2, 3, 4], [1, 3, 5])
    assert Costs(parameters=[1.0, 10.0, 100.0]).per_rank("parameters", placement).tolist() == [1.0, 1.0, 1.0, 10.0, 100.0, 100.0]


WRONG = [-1, -0.5, math.nan, math.inf, -math.inf, "1", True, {}, b"1", np.float64("nan"), np.bool_(True)]


@pytest.mark.parametrize("name", [*PER_ACTION, *PER_STAGE, *ONE_NUMBER, *LINKS])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(CostsError, match=rf"^{name}(\[0\])? "):
        Costs(**{name: value})  # type: ignore[arg-type]
    if name not in ONE_NUMBER + LINKS:
        with pytest.raises(CostsError, match=rf"^{name}\[1\](\[0\])? "):
            Costs(**{name: [1.0, value]})  # type: ignore[arg-type]
    if name in PER_ACTION:
        with pytest.raises(CostsError, match=rf"^{name}\[0\]\[1\] "):
            Costs(**{name: [[1.0, value], 1.0]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, [1.0]) for name in ONE_NUMBER] + [(name, [[1.0]]) for name in PER_STAGE] + [(name, [[[1.0]]]) for name in PER_ACTION],
)
def test_a_sequence_too_deep_is_refused_by_name(name: str, value: list[Any]) -> None:
    with pytest.raises(CostsError, match=rf"^{name}"):
        Costs(**{name: value})


@pytest.mark.parametrize("value", ["ring", "", None, 1, "Pair"])
def test_contention_is_one_of_five(value: object) -> None:
    with pytest.raises(CostsError, match="contention must be one of independent, pair, duplex, rank, links, got"):
        Costs(contention=value)  # type: ignore[arg-type]


def test_a_link_that_carries_nothing_is_refused() -> None:
    with pytest.raises(CostsError, match="bandwidth must be more than 0"):
        Costs(bandwidth=0)
    assert Costs().bandwidth is None


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_the_table_of_a_field(data: st.DataObject, stages: int, microbatches: int) -> None:
    """One row per stage and one column per microbatch, in every form."""
    a_row = st.one_of(amounts, st.lists(amounts, min_size=microbatches, max_size=microbatches))
    rows = data.draw(st.lists(a_row, min_size=stages, max_size=stages))
    wanted = [row if isinstance(row, list) else [row] * microbatches for row in rows]
    costs = Costs(i=rows, w=2)  # type: ignore[arg-type]
    assert costs.table("i", stages, microbatches).tolist() == wanted
    assert [[costs.of_stage("i", s, m) for m in range(microbatches)] for s in range(stages)] == wanted
    assert costs.table("w", stages, microbatches).tolist() == [[2] * microbatches] * stages
    assert costs.table("b", stages, microbatches).tolist() == [[value + 2 for value in row] for row in wanted]
    given_b = Costs(b=rows)  # type: ignore[arg-type]
    assert given_b.table("b", stages, microbatches).tolist() == wanted
    costs.check(stages, microbatches, 1)


def test_lengths_are_checked_by_name() -> None:
    for name in PER_ACTION + PER_STAGE:
        Costs(**{name: [1.0, 2.0]}).check(2, 3, 1)  # type: ignore[arg-type]
        with pytest.raises(CostsError, match=rf"^{name} has 2 values for 3 stages"):
            Costs(**{name: [1.0, 2.0]}).check(3, 3, 1)  # type: ignore[arg-type]
    for name in PER_ACTION:
        costs = Costs(**{name: [1.0, [1.0, 2.0]]})  # type: ignore[arg-type]
        costs.check(2, 2, 1)
        with pytest.raises(CostsError, match=rf"^{name}\[1\] has 2 values for 3 microbatches"):
            costs.check(2, 3, 1)
        with pytest.raises(CostsError, match=rf"^{name}\[1\] has 2 values, one per microbatch, but microbatch 2"):
            costs.of_stage(name, 1, 2)


def test_numbers_of_numpy_are_numbers() -> None:
    costs = Costs(f=np.float32(0.5), latency=np.int64(3), w=[np.float64(1), np.int32(2)])  # type: ignore[arg-type]
    assert costs == Costs(f=0.5, latency=3, w=(1.0, 2.0))
    assert type(costs.f) is float


def test_arrays_of_numpy_are_sequences() -> None:
    costs = Costs(f=np.array([1, 2]), i=np.arange(6.0).reshape(2, 3), b=np.array(4), parameters=np.ones(2, dtype=np.float32))  # type: ignore[arg-type]
    assert costs == Costs(f=(1.0, 2.0), i=((0.0, 1.0, 2.0), (3.0, 4.0, 5.0)), b=4.0, parameters=(1.0, 1.0))
    assert Costs.from_json(costs.to_json()) == costs
    for field in fields(Costs):
        if field.name not in {"contention", "lanes"}:
            assert getattr(Costs(**{field.name: np.float64(2)}), field.name) == 2.0
    with pytest.raises(CostsError, match=r"host_latency is one number"):
        Costs(host_latency=np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(CostsError, match=r"f\[1\] must be a finite number of at least 0, got -1"):
        Costs(f=np.array([1, -1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "costs", "unused"),
    [
        ("1f1b", {"b": 40}, []),
        ("1f1b", {"i": 4, "w": 2}, []),
        ("1f1b", {"i": 4, "b": 40}, ["i"]),
        ("zbv", {"b": 40}, ["b"]),
        ("zbv", {"i": 4, "w": [1.0] * 8}, []),
        ("dualpipe-v", {"b": 40, "w": 3}, []),
        ("inference", {"f": 3, "w": 3}, ["w"]),
    ],
)
def test_times_that_no_action_takes(name: str, costs: dict[str, Any], unused: list[str]) -> None:
    table = ps.schedule(name, ranks=4, microbatches=8)
    assert Costs(**costs).list_unused(table) == unused
    assert Costs(**costs).list_unused(ps.lower(table)) == unused
    others = {name: value for name, value in costs.items() if name not in unused}
    np.testing.assert_array_equal(ps.simulate(table, Costs(**costs)).end, ps.simulate(table, Costs(**others)).end)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".toml", ".JSON"])
@given(costs=any_costs)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_is_loaded(suffix: str, tmp_path: Path, costs: Costs) -> None:
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs
    path = tmp_path / f"costs{suffix}"
    costs.save(path)
    assert Costs.load(path) == costs


def test_only_what_is_not_the_default_is_written() -> None:
    assert Costs().to_json() == {}
    assert Costs(f=1.0, latency=0.5, w=[1, [2, 3]]).to_json() == {"latency": 0.5, "w": [1.0, [2.0, 3.0]]}  # type: ignore[list-item]


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text('# milliseconds\nf = 18.5\nw = [9, 9.5]  # the last stage has the loss\nlatency = 6e-1\ncontention = "pair"\n')
    assert Costs.load(path) == Costs(f=18.5, w=(9.0, 9.5), latency=0.6, contention="pair")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("costs.toml", "latencey = 1", "no field 'latencey': did you mean 'latency'"),
        ("costs.json", '{"F": 1}', "no field 'F': did you mean 'f'"),
        ("costs.json", '{"weight-stash": 1}', "did you mean 'weight_stash'"),
        ("costs.toml", "f = -1", "f must be a finite number of at least 0, got -1"),
        ("costs.toml", "f = nan", "f must be a finite number"),
        ("costs.json", '{"f": NaN}', "f must be a finite number"),
        ("costs.json", '{"i": [1, Infinity]}', "i[1] must be a finite number"),
        ("costs.json", '{"i": 1' + "0" * 400 + "}", "i must be a finite number"),
        ("costs.json", '{"f": null}', "f must be a number"),
        ("costs.json", '{"latency": null}', "latency must be a number"),
        ("costs.json", '{"f": "1"}', "f must be a number, got '1'"),
        ("costs.toml", "f = true", "f must be a number, got True"),
        ("costs.toml", 'contention = "ring"', "contention must be one of"),
        ("costs.toml", "bandwidth = 0", "bandwidth must be more than 0"),
        ("costs.toml", "[f]\nx = 1", "f must be a number"),
        ("costs.json", "[]", "costs: the data must be an object, got a list"),
        ("costs.json", "{", "line 1"),
        ("costs.json", "", "it is empty"),
        ("costs.toml", "f = = 1", "line 1"),
        ("costs.csv", "f,1", "the suffix '.csv' is not one of .json, .toml"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(name: str, content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(FileFormatError) as caught:
        Costs.load(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for name in ("costs.json", "costs.toml"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
        with pytest.raises(FileFormatError, match=name):
            Costs.load(tmp_path / name)
    with pytest.raises(FileFormatError, match=r"the suffix '\.yaml'"):
        Costs().save(tmp_path / "costs.yaml")


def test_whole_numbers_become_floats() -> None:
    costs = Costs(f=2, w=[1, 2])  # type: ignore[arg-type]
    assert (costs.f, costs.w) == (2.0, (1.0, 2.0))
    assert costs.b is None


@given(st.integers(0, 10**6), st.sampled_from("KMGTP"), st.booleans(), st.sampled_from(["", " ", "  "]))
def test_sizes_count_in_thousands_or_in_1024s(number: int, prefix: str, binary: bool, space: str) -> None:
    power = 1 + "KMGTP".index(prefix)
    assert parse_size(f"{number}{space}{prefix}{'i' if binary else ''}B") == float(number * (1024 if binary else 1000) ** power)
    assert parse_size(f" {number}{space}B ") == parse_size(number) == parse_size(str(number)) == number


def test_fractions_of_a_unit() -> None:
    assert parse_size("1.5KiB") == 1536
    assert parse_size("0.5 KB") == 500
    assert parse_size(2.5) == 2.5


@pytest.mark.parametrize("text", ["", "GiB", "40 G", "40Gib", "-1GiB", "1e3", "1,5GiB", "40GiB x", "nan", "inf", "1..5KB"])
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(CostsError) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, None, True])
def test_a_size_that_is_no_amount_is_refused(value: object) -> None:
    with pytest.raises(CostsError, match=r"^a size must be"):
        parse_size(value)  # type: ignore[arg-type]


SLICED = Costs(f=[[1, 3, 1, 3]], i=[[2, 5, 2, 5]], w=0, activation=[[4, 2, 4, 2]], parameters=1)
"""Two microbatches of two slices: the first slice is longer, and the second one takes longer."""


def test_unequal_slices_are_timed_and_held_each_by_itself():
    schedule = ps.schedule("seq1f1b", ranks=1, microbatches=2, slices=2)
    timeline = ps.simulate(schedule, SLICED)
    assert timeline.makespan == 2 * (1 + 3 + 2 + 5)
    starts = {str(span.action): span.start for span in timeline.spans(0)}
    assert (starts["0F0.1"], starts["0B0.1"]) == (1, 4)
    whole = ps.simulate(schedule, replace(SLICED, activation=6))
    assert timeline.peak_memory[0] < whole.peak_memory[0]


def test_a_memory_limit_counts_each_slice_by_its_size():
    program = ps.lower(ps.schedule("gpipe", ranks=1, microbatches=2, slices=2))
    ps.verify(program, memory_limit=13, costs=SLICED)  # both microbatches, and the parameters
    with pytest.raises(ps.VerifyError, match="13"):
        ps.verify(program, memory_limit=12.9, costs=SLICED)


def test_as_many_values_as_slices_are_needed():
    schedule = ps.schedule("seq1f1b", ranks=1, microbatches=2, slices=2)
    with pytest.raises(CostsError, match=r"f\[0\] has 2 values for 4 microbatches, or slices of them"):
        ps.simulate(schedule, Costs(f=[[1, 3]]))


# Ranks that have more of a spread vocabulary than others ----------------------------------------------------------------


def test_multiples_are_per_rank_and_end() -> None:
    costs = Costs(s=[1.0, 0.0, [2.0, 3.0]], rank_s=[1.0, 2.0, (0.5, 4.0)], logits=2.0)
    assert costs.of_shares("s", (3, 2), np.array([0, 1, 2, 2]), np.array([2, 2, 2, 0]), np.array([1, 0, 1, 1])).tolist() == [3, 4, 12, 0.5]
    assert costs.share_table("logits", 3, 2).tolist() == [[2, 2], [2, 2]]
    assert costs.permuted([1, 0]).rank_s == costs.rank_s
    assert costs.differing == ["s"]


@pytest.mark.parametrize(
    ("multiples", "reason"),
    [
        ([1.0, -1.0], r"rank_s\[1\] must be a finite number of at least 0, got -1"),
        ([(1.0, 2.0, 3.0)], r"rank_s\[0\] has 3 values: give one number, or one for the embedding and one for the head"),
        ([[[1.0, 2.0]]], r"rank_s\[0\]\[0\] must be a number"),
    ],
)
def test_wrong_multiples_are_refused(multiples: Any, reason: str) -> None:
    with pytest.raises(CostsError, match=reason):
        Costs(rank_s=multiples)


def test_multiples_for_other_ranks_are_refused() -> None:
    schedule = ps.spread_vocabulary(ps.schedule("1f1b", 2, 2))
    with pytest.raises(CostsError, match=r"rank_t has 3 values for 2 ranks: give one number or one per rank"):
        ps.simulate(schedule, Costs(rank_t=[1.0, 2.0, 3.0]))


# Links between pairs of ranks -----------------------------------------------------------------------------------------

LANES = [[(0, 0), (4, 4), (2, 7)], [(4, 4), (0, 0), (2, 7)], [(7, 2), (7, 2), (0, 0)]]


def test_a_table_of_links_gives_the_time_of_each_pair() -> None:
    costs = Costs(latency=[[9, 1, 2], [3, 9, 4], [5, 6, 9]], bandwidth=[[None, 2, None], [4, None, 8], [1, 0.5, None]])  # type: ignore[arg-type]
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            rate = costs.bandwidth[source][target]  # type: ignore[index]
            wanted = costs.latency[source][target] + (0.0 if rate is None else 4.0 / rate)  # type: ignore[index]
            assert costs.travel(4.0, source, target) == wanted
    assert costs.latency[0][0] == 0.0  # type: ignore[index]
    sizes, source, target = np.array([1.0, 2.0]), np.array([0, 2]), np.array([1, 1])
    assert costs.travel(sizes, source, target).tolist() == [1.5, 10.0]
    assert Costs(latency=2, bandwidth=4).travel(sizes, source, target).tolist() == [2.25, 2.5]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"latency": [[0, 1], [1]]}, r"latency has 2 rows, but row 1 has 1 value:"),
        ({"latency": [0, 1]}, r"latency must be a table with one row per sending rank"),
        ({"latency": []}, r"latency must be a table"),
        ({"latency": [[0, -1], [1, 0]]}, r"latency\[0\]\[1\] must be a finite number of at least 0, got -1"),
        ({"bandwidth": [[None, 1], [0, None]]}, r"bandwidth\[1\]\[0\] must be more than 0, got 0: a link without bandwidth"),
        ({"bandwidth": [[None, "1"], [1, None]]}, r"bandwidth\[0\]\[1\] must be a number"),
        ({"lanes": LANES}, r"contention='independent' with lanes: 'links' and lanes= go together"),
        ({"contention": "links"}, r"contention='links' with no lanes"),
        ({"contention": "links", "lanes": [[0, 1], [1, 0]]}, r"lanes\[0\]\[1\] must be an out lane and an in lane"),
        ({"contention": "links", "lanes": [[[0, 0], [0, -1]], [[0, 0], [0, 0]]]}, r"lanes\[0\]\[1\] must be an out lane"),
    ],
)
def test_a_wrong_table_of_links_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CostsError, match=reason):
        Costs(**fields)


def test_a_table_for_other_ranks_is_refused() -> None:
    costs = Costs(latency=[[0, 1], [1, 0]])  # type: ignore[arg-type]
    costs.check(4, 2, 2)
    with pytest.raises(CostsError, match="latency is a table for 2 ranks, but there are 3"):
        ps.simulate(ps.schedule("1f1b", ranks=3, microbatches=3), costs)
    with pytest.raises(CostsError, match="latency is a table for 2 ranks, but there are 3"):
        ps.verify(ps.schedule("1f1b", ranks=3, microbatches=3), costs=costs)


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_links_go_through_files(suffix: str, tmp_path: Path) -> None:
    costs = Costs(
        latency=[[0, 1], [2, 0]], bandwidth=[[None, None], [3, 1]], contention="links", lanes=[[(0, 0), (5, 3)], [(3, 5), (0, 0)]]
    )  # type: ignore[arg-type]
    costs.save(tmp_path / f"costs{suffix}")
    loaded = Costs.load(tmp_path / f"costs{suffix}")
    assert loaded == costs
    assert hash(loaded) == hash(costs)
    assert loaded.lanes == (((0, 0), (0, 1)), ((1, 0), (0, 0)))


def test_links_stay_when_microbatches_change_places_and_change_with_the_unit() -> None:
    costs = Costs(f=[[1, 2], [3, 4]], latency=[[0, 1], [2, 0]], bandwidth=[[None, 8], [None, None]])  # type: ignore[arg-type]
    assert costs.permuted([1, 0]) == replace(costs, f=((2.0, 1.0), (4.0, 3.0)))
    assert costs.differing == ["f"]
    in_halves = costs.scaled(2)
    assert in_halves.latency == ((0, 2), (4, 0))
    assert in_halves.bandwidth == ((None, 4), (None, None))
    assert in_halves.travel(8.0, 0, 1) == 2 * costs.travel(8.0, 0, 1)
