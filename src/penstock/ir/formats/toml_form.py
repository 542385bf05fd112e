"""Values as TOML text."""

from __future__ import annotations

import json
from typing import Any


def toml_value(value: Any) -> str:
    """A plain value, a list, or a table, in one line. None is `inf`: unlimited is the only value that files leave open.

    >>> toml_value([1.5, None, {"name": "a"}])
    '[1.5, inf, {name = "a"}]'
    """
    if value is None:
        return "inf"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
