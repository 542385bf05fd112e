"""Fields of JSON objects: types are exact, and the error is the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from penstock.errors import FileFormatError, UsageError
from penstock.ir.formats.reading import check_fields, check_record, parse_json

FIELDS: dict[str, tuple[type, ...]] = {"name": (str,), "ranks": (int,), "limit": (int, float, type(None))}


def test_good_data_come_back():
    data = {"name": "a", "ranks": 2, "limit": None, "more": 1}
    assert check_fields(data, FIELDS, error=UsageError) is data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object, got a list"),
        ({"name": "a", "ranks": 2}, "'limit' is missing"),
        ({"name": "a", "ranks": True, "limit": 1}, "'ranks' must be a whole number, got true or false"),
        ({"name": None, "ranks": 2, "limit": 1}, "'name' must be text, got null"),
        ({"name": "a", "ranks": 2, "limit": "x"}, "'limit' must be a whole number or a number or null, got text"),
    ],
)
def test_wrong_data_are_refused(data, message):
    with pytest.raises(UsageError, match=message):
        check_fields(data, FIELDS, error=UsageError)
    with pytest.raises(FileFormatError, match=rf"^a\.json: .*{message}"):
        check_fields(data, FIELDS, error=partial(FileFormatError, "a.json"))


def test_optional_and_unknown_fields():
    assert check_fields({"ranks": 1}, FIELDS, error=UsageError, required=("ranks",), closed=True) == {"ranks": 1}
    with pytest.raises(UsageError, match=r"there is no field 'rank': .*'ranks'"):
        check_fields({"ranks": 1, "rank": 1}, FIELDS, error=UsageError, required=(), closed=True)


@dataclass
class Record:
    ranks: int
    sizes: tuple[int, ...] = ()
    index: int = 0


def test_the_fields_of_a_dataclass():
    check = partial(check_record, record=Record, what="a record", error=UsageError, types={"sizes": (list,)}, omit={"index"})
    assert check({"ranks": "any type"}) == {"ranks": "any type"}
    for data, message in [
        ({}, "^a record: 'ranks' is missing"),
        ({"ranks": 1, "index": 2}, "^a record: there is no field 'index'"),
        ({"ranks": 1, "sizes": 2}, "^a record: 'sizes' must be a list, got a whole number"),
        (None, "^a record: the data must be an object, got null"),
        ({"format": "penstock", "version": 1, "type": "plan", "ranks": 1}, "^not a record: it is a saved plan$"),
    ]:
        with pytest.raises(UsageError, match=message):
            check(data)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_strict_json_has_finite_numbers_only(text):
    parse_json(text, "a.json")
    with pytest.raises(FileFormatError, match=r"^a\.json: not a JSON file: .* is not a number"):
        parse_json(text, "a.json", strict=True)
