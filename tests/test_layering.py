"""Data walks one way: what each part may import, at the top of a file and inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
HEAVY = {"torch", "numba", "matplotlib", "ortools", "starlette", "uvicorn"}

# Each part and what it may import of ours, besides itself, `errors` and `text`. The package itself loads its public names lazily.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "text": set(),
    "ir": set(),
    "simulator": {"ir"},
    "verifier": {"ir"},
    "passes": {"ir", "verifier"},
    "schedules": {"ir", "simulator"},
    "planner": {"ir", "simulator", "verifier", "passes", "schedules"},
    "draw": {"ir", "simulator"},
    "studio": {"ir", "simulator", "verifier", "passes", "schedules", "planner"},
    "runtime": {"ir", "simulator", "verifier", "passes", "schedules", "planner"},
    "compat": {"ir", "simulator", "verifier", "passes", "schedules", "planner", "runtime"},
    "integrations": {"ir", "simulator", "verifier", "passes", "schedules", "planner", "runtime"},
    "testing": {"ir", "simulator", "verifier", "passes", "schedules", "planner", "draw", "runtime"},
    "__main__": {"cli"},
    "cli": {
        "ir",
        "simulator",
        "verifier",
        "passes",
        "schedules",
        "planner",
        "draw",
        "studio",
        "runtime",
        "compat",
        "integrations",
        "testing",
    },
}
# Beyond that only inside a function: timelines and plans are saved by the part that draws them.
WHEN_CALLED = {("simulator", "draw"), ("planner", "draw")}
TORCH = {"runtime", "compat", "integrations"}
# Parts that may use the package by its public names, which reach into every part.
ON_TOP = {"cli", "testing", "__main__"}

FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part a file belongs to: its folder, or its name where it stands alone."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module imported when the code runs, and whether that is inside a function."""
    if is_type_checking(node):
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, inside
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are written in full"
        for alias in node.names:
            yield f"{node.module}.{alias.name}", inside
    inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(tree_of(path)))


def test_the_scan_sees_what_it_should() -> None:
    code = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    from d.e import g\nclass H:\n    import i\n"
    assert list(imports(ast.parse(code))) == [("a", False), ("d.e.g", True), ("i", False)]


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in FILES} <= set(ALLOWED)


def test_imports_go_the_way_of_the_data() -> None:
    for path, (module, inside) in ((file, found) for file in FILES for found in imports_of(file)):
        part = part_of(path)
        package, _, rest = module.partition(".")
        if package != "penstock" or rest == "__version__":
            continue
        other = rest.split(".")[0]
        allowed = part in ON_TOP if other not in ALLOWED else other in ALLOWED[part] | {part, "errors", "text"}
        assert allowed or (inside and (part, other) in WHEN_CALLED), f"{path.relative_to(SOURCE)} imports {module}"


def test_only_the_runtime_and_the_peers_names_import_torch() -> None:
    importing = [path for path in FILES if any(module.split(".")[0] == "torch" for module, _ in imports_of(path))]
    assert [str(path.relative_to(SOURCE)) for path in importing if part_of(path) not in TORCH] == []


def test_only_the_device_room_calls_a_device() -> None:
    """Nothing else has to change for another kind of device."""
    calls = {path for path in FILES if re.search(r"torch\.(cuda|mps|xpu)\b|libcuda", path.read_text(encoding="utf-8"))}
    assert calls == {SOURCE / "runtime/device/gpu.py", SOURCE / "runtime/device/streams.py"}
    users = {path for path in FILES if any(module == "penstock.runtime.device.gpu.cuda" for module, _ in imports_of(path))}
    assert users
    assert {path.parent for path in users} == {SOURCE / "runtime/device"}


# The rooms of the runtime, each with the rooms that it may import, also for types. `pipeline` stands above `measure`.
ROOMS: dict[str, set[str]] = {
    "torch_internals": set(),
    "device": {"torch_internals"},
    "tensors": {"torch_internals"},
    "split_backward": {"torch_internals", "tensors"},
    "transport": {"torch_internals", "device", "tensors"},
    "batch": {"torch_internals", "tensors"},
    "sequence": {"torch_internals", "device"},
    "model": {"torch_internals", "device", "tensors", "split_backward", "batch", "sequence"},
    "weights": {"torch_internals", "tensors", "model"},
    "parallel": {"torch_internals", "device", "tensors", "transport", "batch", "model"},
    "execution": {"torch_internals", "device", "tensors", "split_backward", "transport", "batch", "sequence", "model", "parallel"},
    "measure": {
        "torch_internals",
        "device",
        "tensors",
        "split_backward",
        "transport",
        "batch",
        "sequence",
        "model",
        "parallel",
        "execution",
    },
    "launch": {"torch_internals", "device", "tensors", "transport"},
    "checkpoint": {"torch_internals", "tensors", "model", "transport", "pipeline"},
    "train": {"torch_internals", "device", "transport", "launch", "model", "measure", "checkpoint", "pipeline"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_runtime_import_only_those_below(room: str) -> None:
    files = [path for path in FILES if path.is_relative_to(SOURCE / "runtime" / room)]
    assert files
    for path in files:
        nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            if node.module and node.module.startswith("penstock.runtime."):
                assert node.module.split(".")[2] in ROOMS[room] | {room}, f"{path.relative_to(SOURCE)} imports {node.module}"


def test_every_folder_of_the_runtime_is_a_room() -> None:
    assert {path.relative_to(SOURCE / "runtime").parts[0] for path in (SOURCE / "runtime").glob("*/*.py")} == set(ROOMS)


def test_the_runtime_is_imported_without_torch_modules_that_take_seconds() -> None:
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
    code = f"import sys, penstock.runtime; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_folder_is_crowded() -> None:
    """About a dozen modules are a room that can be looked over; `schedules` has one file per schedule."""
    for folder in {path.parent for path in FILES} - {SOURCE / "schedules"}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 14, f"{folder.relative_to(SOURCE)} has {len(modules)} modules: {sorted(modules)}"


def test_the_tests_mirror_the_tree() -> None:
    """The tests of a room are under the same path."""
    tests = Path(__file__).parent
    for folder in {path.parent.relative_to(SOURCE) for path in FILES}:
        assert list((tests / folder).rglob("test_*.py")), f"tests/{folder} has no tests"


def test_every_folder_says_what_lives_in_it() -> None:
    """In at least three sentences: what lives there, and how data passes through."""
    for folder in {path.parent for path in FILES}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        sentences = re.findall(r"[.!?](?=\s|$)", re.sub(r"`[^`]*`", "", text))
        assert len(sentences) >= 3, f"{folder.relative_to(SOURCE)}: {text!r}"


def test_no_private_name_crosses_a_module() -> None:
    """The drop-in for PyTorch is left out if torch itself has the private name; 2.11 and 2.12 do not have all of them yet."""
    for path, node in ((file, found) for file in FILES for found in ast.walk(tree_of(file))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock"):
            private = [alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")]
            if path.is_relative_to(SOURCE / "compat" / "torch"):
                private = [name for name in private if not is_of_torch(name)]
            if path.parent == SOURCE / "schedules":
                private = [name for name in private if not (SOURCE / "schedules" / f"{name}.py").exists()]
            assert not private, f"{path.relative_to(SOURCE)} imports {private} from {node.module}"


LATER_TORCH = {
    "_add_wait_send",
    "_add_wait_send_budget",
    "_assign_pipeline_activation_slots",
    "_resolve_unshard_lookahead",
    "_validate_send_waits",
}
"""Private names of torch 2.15 that the default version does not have yet."""


def is_of_torch(name: str) -> bool:
    """Whether torch's own pipelining has this name, in any of its modules."""
    if name in LATER_TORCH or version("torch") < "2.13":
        return True
    from torch.distributed import pipelining

    return any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in Path(pipelining.__file__).parent.glob("*.py"))


# A verb, and the return types that a function named after it cannot have.
RETURNS = {
    "is|has|can|should": r"(?!(bool|Flags|Any|list\[bool\]|NDArray\[np\.bool_\]|Type(Guard|Is)\[.*\])$)",
    "describe|explain|format|summarize": r"(?!.*(str|TextSection)\b)",
    "count": r"(str|bool|list\[Any\])$",
    "list|find|make|build|choose|collect|estimate|compute": r"(None|NoReturn)$",
    "list|collect|write|save|draw": r"(bool|int|float)\b",
    "describe|explain|find|list|write|count": r".*(Error|Exception)\b(?!\])",
}
FOREIGN = {"format_usage", "format_options", "format_commands", "save_checkpoint"}
"""Methods whose names and return types are click's and DeepSpeed's."""


def test_functions_return_what_their_verbs_say() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef) and node.returns is not None and node.name not in FOREIGN:
                verb, _, noun = node.name.strip("_").partition("_")
                returned = ast.unparse(node.returns)
                if noun and any(verb in verbs.split("|") and re.match(types, returned) for verbs, types in RETURNS.items()):
                    wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {node.name} returns {returned}")
    assert wrong == []


GLOSSARY = {
    "Action": "ir/action.py",
    "Channel": None,
    "Chunk": "schedules/dualpipe.py",
    "Costs": "ir/costs.py",
    "Grid": "ir/grid.py",
    "Microbatch": None,
    "Partition": "runtime/model/partition.py",
    "Placement": "ir/placement.py",
    "Plan": "planner/plan.py",
    "Profile": "planner/profile/profile.py",
    "Program": "ir/program.py",
    "Rank": None,
    "Schedule": "ir/schedule.py",
    "Stage": "runtime/model/stage.py",
    "Timeline": "simulator/timeline.py",
}
"""The words of the glossary, and the home of the class that each names; a word without one names no class."""
TORCH_NAMES = {"_Action", "_PipelineStage"}
"""Classes of PyTorch's that its drop-in has beside ours or beside a public one."""


def list_classes() -> Iterator[tuple[str, str]]:
    """Every class of the source, nested ones too, and its file."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name not in TORCH_NAMES:
                yield node.name.strip("_"), str(path.relative_to(SOURCE))


def test_every_class_has_a_name_of_its_own() -> None:
    """With or without an underscore: a search for a name finds one class."""
    classes: dict[str, list[str]] = {}
    for name, place in list_classes():
        classes.setdefault(name, []).append(place)
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_a_word_of_the_glossary_names_nothing_else() -> None:
    assert {name: place for name, place in list_classes() if GLOSSARY.get(name, place) != place} == {}


def test_optional_packages_are_imported_when_used() -> None:
    """A missing extra fails late and in a full sentence, never at import."""
    for path in FILES:
        early = [module for module, inside in imports_of(path) if not inside and module.split(".")[0] in HEAVY - {"torch"}]
        assert not early, path.relative_to(SOURCE)


def fresh(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after running the code."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {module.split(".")[0] for module in done.stdout.splitlines()}


@pytest.mark.parametrize(
    "code",
    [
        "import penstock",
        "import penstock; [getattr(penstock, name) for name in penstock.__all__]",
        "import penstock; penstock.verify(penstock.lower(penstock.schedule('1f1b', 2, 4)))",
    ],
)
def test_importing_and_using_the_language_loads_nothing_heavy(code: str) -> None:
    loaded = fresh(code)
    assert "penstock" in loaded
    assert not loaded & HEAVY


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.10.1", "2.99.0"])
def test_a_torch_outside_the_range_is_refused_and_the_rest_works(version: str) -> None:
    """With a pretended version. Planning and simulating go on, because they do not use torch."""
    code = f"""
import importlib
import torch
torch.__version__ = "{version}"
import penstock as ps
for package in ("penstock.runtime", "penstock.compat.torch"):
    try:
        importlib.import_module(package)
    except ImportError as error:
        print(isinstance(error, ps.PenstockError), error)
plan = ps.plan(ps.Profile(layers=[ps.Layer(f=1.0, i=1.0, w=1.0)] * 4), ranks=2, microbatches=4, rounds=1)
print(ps.simulate(ps.lower(plan.schedule), ps.Costs()).makespan > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *refusals, simulated = done.stdout.splitlines()
    refusal = rf"True penstock works with torch 2\.\d+ to 2\.\d+, and torch {re.escape(version)} is installed: install the extra .*"
    assert len(refusals) == 2
    assert all(re.fullmatch(refusal, line) for line in refusals)
    assert simulated == "True"


def test_importing_the_package_alone_does_not_even_load_numpy() -> None:
    assert "numpy" not in fresh("import penstock")
