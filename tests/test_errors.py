"""The error tree: one root, children that are also the builtin that fits, messages that help."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
from pathlib import Path

import pytest

import penstock as ps
from penstock import errors
from penstock.errors import FileFormatError, MissingExtraError, PenstockError, UnknownNameError, VerifyError, nearest

SOURCE = Path(errors.__file__).parent
ALL = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, PenstockError)]


@pytest.mark.parametrize("error", [error for error in ALL if error is not PenstockError])
def test_every_error_is_also_a_builtin(error: type[PenstockError]) -> None:
    own = {Exception, BaseException, object}
    assert any(base.__module__ == builtins.__name__ and base not in own for base in error.__mro__)
    assert error.__doc__


def test_the_whole_tree_is_in_one_file() -> None:
    """No other file of the library defines an exception."""
    names = {"Exception", "BaseException", "ValueError", *(error.__name__ for error in ALL)}
    for path in SOURCE.rglob("*.py"):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert not names & {getattr(base, "id", "") for base in node.bases}, f"{node.name} in {path}"


def test_a_file_error_names_file_row_and_cell() -> None:
    error = FileFormatError("a.csv", "bad", row=1, cell=4)
    assert (error.file, error.reason, error.row, error.cell) == ("a.csv", "bad", 1, 4)
    assert str(error) == "a.csv, row 2 (rank 1), cell 5: bad"
    assert str(FileFormatError("a.csv", "bad", row=0)) == "a.csv, row 1 (rank 0): bad"
    assert str(FileFormatError("a.csv", "bad")) == "a.csv: bad"


def test_a_missing_extra_says_how_to_get_it() -> None:
    error = MissingExtraError("the solver", "ortools", "solve")
    assert isinstance(error, ImportError)
    assert (
        str(error)
        == "the solver needs ortools, which is not installed: install the extra 'solve', pip install '.[solve]' in a clone of Penstock"
    )


def test_a_verify_error_holds_its_findings() -> None:
    assert VerifyError(iter([1, 2]), "two").findings == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("gpip", ["gpipe", "1f1b"], "did you mean 'gpipe'? known: 1f1b, gpipe"),
        ("GPIPE", ["gpipe", "1f1b"], "did you mean 'gpipe'? known: 1f1b, gpipe"),
        ("reshad", ["RESHARD", "F"], "did you mean 'RESHARD'? known: F, RESHARD"),
        ("zzz", ["gpipe", "1f1b"], "known: 1f1b, gpipe"),
    ],
)
def test_nearest_names_come_first(name: str, known: list[str], said: str) -> None:
    assert nearest(name, known) == said


def test_an_unknown_schedule_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="there is no schedule 'gpip': did you mean 'gpipe'") as caught:
        ps.schedule("gpip", 2, 2)
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "error",
    [
        FileFormatError("a.csv", "bad", row=1, cell=4),
        MissingExtraError("x", "torch", "torch"),
        VerifyError([], "two findings"),
        PenstockError("plain", 3),
        UnknownNameError("no such name"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_go_between_processes(error: PenstockError) -> None:
    error.add_note("seen on rank 1")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
