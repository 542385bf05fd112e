"""Everything that is measured on a GPU, in one run: `PYTHONPATH=src python benchmarks/gpu.py --out DIR [--only split,memory]`.

Writes `gpu.md` and `gpu.json`. Ranks are virtual: threads of one process, each on a stream of the one GPU. Without a GPU, or with
`--small`, everything runs at a tiny size, to see that it runs; the figures mean nothing then. Ends with 1 if a section fails or a
row says NO.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), str(HERE.parent / "tests"), *(each for each in sys.path if Path(each or ".").resolve() != HERE)]

SECTIONS = {
    "overhead": "gpu_actions",
    "graphs": "gpu_actions",
    "split": "gpu_split",
    "overlap": "gpu_numbers",
    "conformance": "gpu_numbers",
    "memory": "gpu_memory",
    "partitions": "gpu_partitions",
    "uneven": "gpu_uneven",
    "vocabulary": "gpu_vocabulary",
}
"""Each section and the file that it is in; those first that the host's state tells on."""

_SAME = {"same to the last bit", "same losses"}


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    import torch

    there = torch.cuda.is_available()
    small = options.small or not there
    if not there:
        torch.set_num_threads(1)
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if there else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "PYTHONPATH=src python benchmarks/gpu.py" + "".join(f" {each}" for each in (arguments or sys.argv[1:])),
        "size": "tiny, only to see that it runs" if small else "full",
    }
    found: dict[str, dict[str, Any]] = {}
    for name in options.only or SECTIONS:
        found[name] = _run(name, torch.device("cuda" if there else "cpu"), small)
        _write(options.out, about, found)
    return 1 if any(fails(name, section, small) for name, section in found.items()) else 0


def fails(name: str, section: dict[str, Any], small: bool) -> bool:
    """Whether a section failed, or a row of it is not as it should be. At the tiny size numbers are judged, and no figures."""
    if "error" in section:
        return True
    columns = {*_SAME, "good"} if not small or name == "conformance" else _SAME
    return any(row.get(column) == "NO" for row in section["rows"] for column in columns)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--only", type=lambda text: text.split(","), default=None, help=f"sections of {', '.join(SECTIONS)}")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only or () if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return options


def _run(name: str, device: Any, small: bool) -> dict[str, Any]:
    """One section's rows, or what went wrong, without losing the others."""
    start = time.perf_counter()
    section: dict[str, Any]
    try:
        module = importlib.import_module(f"benchmarks.{SECTIONS[name]}")
        section = getattr(module, name)(device, small)
    except Exception:
        section = {"error": traceback.format_exc()}
    section["seconds"] = round(time.perf_counter() - start, 1)
    print(_section(name, section), flush=True)
    return section


def _write(folder: Path, about: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps({"about": about, "sections": found}, indent=1), encoding="utf-8")
    head = [f"- {name}: {value}" for name, value in about.items()]
    text = "\n".join(["# Measured on a GPU", "", *head, "", *(_section(name, section) for name, section in found.items())])
    (folder / "gpu.md").write_text(text, encoding="utf-8")


def _section(name: str, section: dict[str, Any]) -> str:
    """A heading, what was run, and a table of the rows."""
    lines = [f"## {name} ({section['seconds']} s)", ""]
    if "error" in section:
        return "\n".join([*lines, "```", section["error"].strip(), "```", ""])
    lines += [section["what"], ""]
    rows: list[dict[str, Any]] = section["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
