"""When to use each schedule: the sections of `advice.md`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


@cache
def advice() -> dict[str, str]:
    """The text of each schedule."""
    text = Path(__file__).with_name("advice.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {name: said.strip() for name, said in zip(parts[::2], parts[1::2], strict=True)}
