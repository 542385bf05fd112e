"""Costs: scalars or one value a stage, refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CostsError
from penstock.ir.costs import Costs, parse_size

amounts = st.floats(0, 1e12)


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


@pytest.mark.parametrize("name", ["f", "i", "w", "b", "latency", "activation", "weight_stash"])
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf, "1", True, [1, 2], {}])
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    if value == [1, 2] and name != "latency":
        value = [1.0, -2.0]
        name_in_message = rf"{name}\[1\]"
    else:
        name_in_message = name
    with pytest.raises(CostsError, match=rf"^{name_in_message} "):
        Costs(**{name: value})  # type: ignore[arg-type]


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
