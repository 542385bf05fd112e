"""Every command with every kind of bad input: one clear message, the right exit code, nothing written and no traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock as ps

FILES = {
    "empty.csv": b"",
    "empty.json": b"",
    "empty.toml": b"",
    "empty.py": b"",
    "blank.csv": b"\r\n , \r\n",
    "binary.csv": b"0F0,\xff\xfe\x00",
    "binary.json": b"\xff\xfe\x00",
    "binary.toml": b"\xff\xfe\x00",
    "binary.ds": b"\xff\xfe\x00",
    "binary.py": b"\xff\xfe\x00",
    "bad.csv": b"0F0,nonsense\n",
    "cut.json": b'{"format": ',
    "deep.json": b"[" * 100_000,
    "list.json": b"[1, 2]",
    "other.json": b'{"format": "something else"}',
    "cut.toml": b"layers = [",
    "odd.txt": b"0F0\n",
    "nothing.py": b"x = 1\n",
    "fails.py": b"1 / 0\n",
}
TRANSFORMER = "layers=8 hidden=512 heads=8 sequence=256 vocabulary=1000 flops=1e12"
READERS = ("show", "lower", "verify", "simulate", "compare")
SUBJECTS = [
    ("zbw", 2, r"there is no schedule 'zbw': did you mean 'zbv'"),
    ("missing.csv", 2, "there is no file missing.csv"),
    ("missing.json", 2, "there is no file missing.json"),
    ("folder", 2, "folder is a folder, not a file"),
    ("folder.csv", 2, "folder.csv is a folder, not a file"),
    ("odd.txt", 2, r"odd.txt ends in none of \.csv, \.json"),
    ("empty.csv", 1, "empty.csv: the file is empty"),
    ("blank.csv", 1, "blank.csv: the file is empty"),
    ("empty.json", 1, "empty.json: not a JSON file: it is empty"),
    ("binary.csv", 1, "binary.csv: not a CSV file: byte 4 is not UTF-8"),
    ("binary.json", 1, "binary.json: not a JSON file: byte 0 is not UTF-8"),
    ("bad.csv", 1, r"bad.csv, row 1 \(rank 0\), cell 2: 'nonsense' is not an action"),
    ("cut.json", 1, "cut.json: not a JSON file"),
    ("deep.json", 1, "deep.json: not a JSON file"),
    ("list.json", 1, "list.json: not a Penstock schedule or program"),
    ("other.json", 1, "other.json: not a Penstock schedule or program"),
]
SETTINGS = [
    ("missing.toml", 2, "there is no file missing.toml"),
    ("folder", 2, "folder is a folder, not a file"),
    ("empty.json", 1, "empty.json: not a JSON file: it is empty"),
    ("binary.json", 1, "binary.json: not a JSON file: byte 0 is not UTF-8"),
    ("binary.toml", 1, "binary.toml: not a TOML file: byte 0 is not UTF-8"),
    ("cut.toml", 1, "cut.toml: not a TOML file"),
    ("deep.json", 1, "deep.json: not a JSON file"),
    ("list.json", 1, "list.json: "),
    ("odd.txt", 1, r"odd.txt: the suffix '.txt' is not one of .json, .toml"),
]
PLAN = ("plan", "--transformer", TRANSFORMER, "-p", 4)
TRAIN = ("train", "training.py", "-p", 2, "--device", "cpu")
OPTIONS = [
    (("lst",), 2, "No such command 'lst'. Did you mean 'list'"),
    (("list", "--passs"), 2, "--passes"),
    (("show",), 2, "Missing argument 'NAME|FILE'"),
    (("show", "zbv", "-p", -3), 2, "ranks must be from 1 to 65535, got -3"),
    (("show", "zbv", "-m", 0), 2, "microbatches must be from 1"),
    (("show", "zbv", "-p", "two"), 2, "'two' is not a whole number"),
    (("show", "zbv", "--chunks", 0), 2, "chunks must be from 1"),
    (("show", "zbv", "-O", "size"), 2, "write KEY=VALUE"),
    (("show", "zbv", "-O", "size=1"), 2, "zbv has no option 'size'"),
    (("show", "zbv", "-o", "folder"), 2, "folder is a folder: name a file in it"),
    (("show", "zbv", "-o", "missing/a.csv"), 2, "there is no folder missing to write a.csv into"),
    (("lower", "zbv", "--receive", "never"), 2, "it must be paired or just-in-time"),
    (("lower", "zbv", "--receive", -1), 2, "a depth of at least 0"),
    (("verify", "zbv", "--memory-limit", "40Gib"), 2, "--memory-limit: '40Gib' is not a size: did you mean 40GiB?"),
    (("verify", "zbv", "--memory-limit", "40 gb"), 2, "did you mean 40GB?"),
    (("verify", "zbv", "--memory-limit", "40G"), 2, "did you mean 40GB?"),
    (("verify", "zbv", "--memory-limit", "lots"), 2, "'lots' is not a size: write a number"),
    (("verify", "zbv", "--memory-limit", -4), 2, "'-4' is not a size"),
    (("verify", "zbv", "--semantics", "both2"), 2, "'both2' is not one of"),
    (("simulate", "zbv", "--costs", "f=-1"), 2, "--costs: f must be a finite number of at least 0, got -1"),
    (("simulate", "zbv", "--costs", "latncy=1"), 2, "there is no field 'latncy': did you mean 'latency'"),
    (("simulate", "zbv", "--unit", "hours"), 2, "unit must be one of s, ms, us, ns, got 'hours'"),
    (("simulate", "zbv", "-o", "a.gif"), 2, "the suffix is not one of .trace.json, .json, .svg, .pdf, .png, .html"),
    (("compare",), 2, "Missing argument 'NAME|FILE'"),
    (("compare", "zbv{chunks=x}"), 2, "chunks=x is not a whole number"),
    (("compare", "zbv", "1f1b", "--scale", "x"), 2, "'x' is neither a number above 0 nor 'auto'"),
    (("compare", "zbv", "1f1b", "--tolerance", -1), 2, "--tolerance"),
    (("convert", "zbv"), 2, "give one file to write"),
    (("convert", "zbv", "a.foo"), 2, "a.foo ends in none of"),
    (("convert", "missing.csv", "a.json"), 2, "there is no file missing.csv"),
    (("convert", "binary.csv", "a.json"), 1, "binary.csv: not a CSV file"),
    (("convert", "binary.ds", "a.json"), 1, "binary.ds: not a DeepSpeed file: byte 0 is not UTF-8"),
    (("convert", "empty.json", "a.csv", "--from", "deepspeed"), 1, "empty.json: "),
    (("convert", "chimera", "a.csv"), 1, "PyTorch cannot express a bidirectional placement"),
    (("plan", "-p", 4, "-m", 4), 2, "give one model: --profile FILE or --transformer SIZES"),
    ((*PLAN,), 2, "give one of the two: --microbatches, or --batch"),
    ((*PLAN, "-m", 4, "--batch", 8), 2, "give one of the two: --microbatches, or --batch"),
    ((*PLAN, "-m", -4), 2, "microbatches must be a whole number of at least 1"),
    ((*PLAN, "-m", 4, "--memory-limit", "1KiB", "--seconds", 0), 1, "no plan fits: .* memory limit of 1KiB"),
    ((*PLAN, "-m", 4, "--memory-limit", "40mib"), 2, "did you mean 40MiB?"),
    ((*PLAN, "-m", 4, "--memory-limit", "1MiB,2MiB"), 2, "2 values for 4 ranks"),
    ((*PLAN, "-m", 4, "--schedules", "zbw"), 2, "there is no schedule 'zbw': did you mean 'zbv'"),
    ((*PLAN, "-m", 4, "--seconds", "nan"), 2, "seconds must be a number"),
    ((*PLAN, "-m", 4, "--bandwidth", "fast"), 2, "--bandwidth: 'fast' is not a bandwidth"),
    ((*PLAN, "-m", 4, "--latency", -1), 2, "latency"),
    ((*PLAN, "-m", 4, "-o", "a.csv"), 2, "the suffix is not one of .json"),
    ((*PLAN, "--batch", 7, "--microbatch-sizes", 2), 2, "a batch of 7 is not a multiple"),
    ((*PLAN, "--batch", 8, "--microbatch-sizes", "x"), 2, "not a list of whole numbers"),
    (("plan", "--transformer", "layrs=8", "-p", 4, "-m", 4), 2, "no field 'layrs': did you mean 'layers'"),
    (("plan", "--transformer", TRANSFORMER, "-p", 400, "-m", 4), 2, "10 layers are too few for 400 ranks"),
    (("profile", "missing.py:build"), 2, "there is no file missing.py"),
    (("profile", "folder:build"), 2, "folder is a folder, not a file"),
    (("profile", "empty.py:build"), 2, "empty.py has no function 'build': there are none"),
    (("profile", "binary.py:build"), 2, "binary.py could not be run: SyntaxError"),
    (("profile", "fails.py:build"), 2, "fails.py could not be run: ZeroDivisionError"),
    (("profile", "training.py:biuld"), 2, "training.py has no function 'biuld': did you mean 'build'"),
    (("profile", "no.such.module:build"), 2, "there is no module no.such.module"),
    (("profile", "training.py"), 2, "is not FILE.py:FUNCTION"),
    (("train", "missing.py", "-p", 2), 2, "there is no file missing.py"),
    (("train", "folder", "-p", 2), 2, "folder is a folder, not a file"),
    (("train", "empty.py", "-p", 2), 2, "empty.py has no function 'build'"),
    (("train", "binary.py", "-p", 2), 2, "binary.py could not be run: SyntaxError"),
    (("train", "training.py:biuld", "-p", 2), 2, "has no function 'biuld': .*did you mean 'build'"),
    (("train", "no such file", "-p", 2), 2, "is not a training file"),
    (("train", "training.py", "--device", "cpu"), 2, "the number of ranks is not known"),
    ((*TRAIN, "-p", -2), 2, "--ranks -2: give a whole number of at least 1"),
    ((*TRAIN, "--schedule", "gpip"), 2, "there is no schedule 'gpip': did you mean 'gpipe'"),
    ((*TRAIN, "--schedule", "folder"), 2, "folder is a folder, not a file"),
    ((*TRAIN, "--schedule", "binary.json"), 1, "binary.json: not a JSON file"),
    ((*TRAIN, "--schedule", "other.json"), 1, "other.json: not a Penstock schedule or program"),
    ((*TRAIN, "--memory-limit", "12mb"), 2, "did you mean 12MB?"),
    ((*TRAIN, "--schedule", "good.csv", "--memory-limit", "1GiB"), 2, "good.csv is a file and is used as it is"),
    ((*TRAIN, "--checkpoints", "odd.txt"), 2, "odd.txt is a file: name a folder"),
    ((*TRAIN, "--report", "folder"), 2, "the suffix is not one of .html"),
    ((*TRAIN, "--report", "odd.txt/report.html"), 2, "cannot be written"),
    ((*TRAIN, "--record", "a.gif"), 2, "the suffix is not one of"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of bad files, and what is in it."""
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    for name in ("folder", "folder.csv"):
        (tmp_path / name).mkdir()
    (tmp_path / "training.py").write_text("def build(): ...\ndef data(): ...\n")
    ps.schedule("1f1b", 2, 4).to_csv(tmp_path / "good.csv")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.runtime.train.ranks.Workers", None)  # nothing may be started
    return tmp_path


def check(folder: Path, refused, code: int, said: str, *command: object) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}
    found = refused(code, *command)
    assert re.search(re.sub(r"(?<!\.)\?$", r"\\?", said), found.replace("\n", " ")), found
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}
    assert {path for path in after if path.is_file()} == {path for path in before if path.is_file()}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(("subject", "code", "said"), SUBJECTS, ids=[each[0] for each in SUBJECTS])
def test_what_is_read(folder, refused, command, subject, code, said):
    check(folder, refused, code, said, command, subject)


@pytest.mark.parametrize("command", [("simulate", "zbv", "--costs"), ("plan", "-p", 2, "-m", 2, "--profile")], ids=["costs", "profile"])
@pytest.mark.parametrize(("subject", "code", "said"), SETTINGS, ids=[each[0] for each in SETTINGS])
def test_settings_that_are_read(folder, refused, command, subject, code, said):
    check(folder, refused, code, said, *command, subject)


@pytest.mark.parametrize(("command", "code", "said"), OPTIONS, ids=[" ".join(map(str, each[0]))[:60] for each in OPTIONS])
def test_options(folder, refused, command, code, said):
    check(folder, refused, code, said, *command)


@pytest.mark.parametrize(("command", "extra"), [(("profile", "training.py:build"), "torch"), (TRAIN, "torch")])
def test_without_torch(folder, refused, monkeypatch, command, extra):
    """As where it is not installed: the message says what to install."""
    import sys

    for name in [name for name in sys.modules if name.startswith("penstock.runtime")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = refused(2, *command)
    assert f"needs {extra}, which is not installed: install the extra '{extra}', pip install '.[{extra}]'" in found
