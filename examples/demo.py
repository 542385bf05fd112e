"""The main job on a machine without a GPU, in under three minutes: measure a small GPT, plan it for one rank per core under a memory
limit, prove the plan, train it on as many processes, show that the numbers are those of the unpipelined model, and measure the plan
against 1F1B.
"""

import os
import re
import shlex
import sys
from pathlib import Path

from penstock.cli.main import main as command
from penstock.cli.training.session import count_cores

HERE = Path(__file__).parent
REPORT = Path("demo") / "report.html"
RANKS, LIMIT = (4, "80MiB") if count_cores() >= 4 else (2, "130MiB")
"""One rank per core, so that a rank that waits leaves a core idle, and a limit that 1F1B just meets."""
BATCH = f"--batch {2 * RANKS} -m {2 * RANKS}"
OPTIONS = shlex.split(f"--ranks {RANKS} --schedule auto {BATCH} --memory-limit {LIMIT} --recompute --steps 50 --check --against 1f1b")


def main(more: list[str]) -> int:
    """Run `penstock train`, as the first lines say; `more` options come after those of the demo and win."""
    arguments = ["train", os.path.relpath(HERE / "gpt.py"), *OPTIONS, "--report", str(REPORT), *more]
    print("$ " + re.sub(r" (?=--)", " \\\\\n    ", f"penstock {shlex.join(arguments)}") + "\n", flush=True)
    sys.argv = ["penstock", *arguments]  # the report says what made it
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
