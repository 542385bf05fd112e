"""Data walks one way: what each part may import, at the top of a file and inside functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
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
    "testing": {"ir", "simulator", "verifier", "passes", "schedules", "planner", "draw", "runtime"},
    "__main__": {"cli"},
    "cli": {"ir", "simulator", "verifier", "passes", "schedules", "planner", "draw", "studio", "runtime", "compat", "testing"},
}
# Beyond that only inside a function: timelines and plans are saved by the part that draws them.
WHEN_CALLED = {("simulator", "draw"), ("planner", "draw")}
TORCH = {"runtime", "compat"}
# Who may use the package by its public names, which reach into every part.
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


def imports_of(path: Path) -> list[tuple[str, bool]]:
    return list(imports(ast.parse(path.read_text(encoding="utf-8"))))


def test_the_scan_sees_what_it_should() -> None:
    code = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\ndef f():\n    from d.e import g\nclass H:\n    import i\n"
    assert list(imports(ast.parse(code))) == [("a", False), ("d.e.g", True), ("i", False)]


def test_every_part_is_in_the_table() -> None:
    assert {part_of(path) for path in FILES} <= set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_the_way_of_the_data(path: Path) -> None:
    part = part_of(path)
    for module, inside in imports_of(path):
        package, _, rest = module.partition(".")
        if package != "penstock" or rest == "__version__":
            continue
        other = rest.split(".")[0]
        allowed = part in ON_TOP if other not in ALLOWED else other in ALLOWED[part] | {part, "errors", "text"}
        assert allowed or (inside and (part, other) in WHEN_CALLED), f"{path.relative_to(SOURCE)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_runtime_and_the_peers_names_import_torch(path: Path) -> None:
    torch = [module for module, _ in imports_of(path) if module.split(".")[0] == "torch"]
    assert not torch or part_of(path) in TORCH


def test_only_the_device_room_calls_a_device() -> None:
    """Nothing else has to change for another kind of device."""
    calls = {path for path in FILES if re.search(r"torch\.(cuda|mps|xpu)\b|libcuda", path.read_text(encoding="utf-8"))}
    assert calls == {SOURCE / "runtime/device/gpu.py", SOURCE / "runtime/device/multiprocessors.py"}
    users = {path for path in FILES if any(module == "penstock.runtime.device.gpu.cuda" for module, _ in imports_of(path))}
    assert users
    assert {path.parent for path in users} == {SOURCE / "runtime/device"}


# Rooms of the runtime that others build on, and the rooms that each of them may import.
ROOMS: dict[str, set[str]] = {
    "device": set(),
    "tensors": {"device"},
    "transport": {"device", "tensors"},
    "launch": {"device", "tensors", "transport"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_the_runtime_import_only_those_below(room: str) -> None:
    files = [path for path in FILES if path.parent == SOURCE / "runtime" / room]
    assert files
    for path in files:
        for module, _ in imports_of(path):
            if module.startswith("penstock.runtime."):
                assert module.split(".")[2] in ROOMS[room] | {room}, f"{path.relative_to(SOURCE)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_optional_packages_are_imported_when_used(path: Path) -> None:
    """A missing extra fails late and in a full sentence, never at import."""
    early = [module for module, inside in imports_of(path) if not inside and module.split(".")[0] in HEAVY - {"torch"}]
    assert not early


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


def test_importing_the_package_alone_does_not_even_load_numpy() -> None:
    assert "numpy" not in fresh("import penstock")
