"""The main job on a machine without a GPU, in under three minutes: measure a small GPT, plan it for four ranks under a memory limit,
prove the plan, train it on four processes, and show that the numbers are those of the unpipelined model.
"""

import os
import sys
from pathlib import Path

from penstock.cli.main import main as command

HERE = Path(__file__).parent
REPORT = Path("demo") / "report.html"
OPTIONS = ["--ranks", "4", "--schedule", "auto", "--batch", "32", "--memory-limit", "15MiB", "--steps", "100", "--check"]


def main(more: list[str]) -> int:
    """Run `penstock train`, as the first line says; `more` options come after those of the demo and win."""
    arguments = ["train", os.path.relpath(HERE / "gpt.py"), *OPTIONS, "--report", str(REPORT), *more]
    print(f"$ penstock {' '.join(arguments)}\n", flush=True)
    sys.argv = ["penstock", *arguments]  # the report says what made it
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
