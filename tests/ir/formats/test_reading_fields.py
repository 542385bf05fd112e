"""Fields of JSON objects: types are exact, and the error is the caller's."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.errors import FileFormatError, UsageError
from penstock.ir.formats.reading import check_fields

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
