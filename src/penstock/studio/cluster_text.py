"""Clusters from the page: the text of a file, TOML or JSON, within the limits of the studio."""

from __future__ import annotations

from typing import Any

from penstock.errors import CostsError, FileFormatError, UsageError
from penstock.ir.cluster import Cluster
from penstock.ir.formats.reading import parse_json, parse_toml
from penstock.studio.limits import LONGEST_NAME, MOST_CLUSTER, MOST_DEVICES, check_request

NAME = "the cluster"
"""Names a text without a file in errors."""


def read_cluster(value: str | dict[str, Any], name: str = NAME) -> Cluster:
    """Read a cluster from the text of a file, or from what `Cluster.to_json` gives; `name` is that of the file."""
    data = _parse(value, name) if isinstance(value, str) else value
    _check_devices(data)
    try:
        return Cluster.from_json(data)
    except CostsError as error:
        raise FileFormatError(name, str(error)) from None


def _parse(text: str, name: str) -> Any:
    """JSON if it begins like an object, else TOML."""
    if len(text) > MOST_CLUSTER:
        raise UsageError(f"{name} has {len(text):,} characters, more than the studio takes: {MOST_CLUSTER:,}")
    content = text.removeprefix("\ufeff")
    if not content.strip():
        raise FileFormatError(name, "it is empty")
    return parse_json(content, name) if content.lstrip()[0] == "{" else parse_toml(content.replace("\r\n", "\n"), name)


def _check_devices(data: Any) -> None:
    """Refuse too many devices before they and their links are built."""
    devices = data.get("devices") if isinstance(data, dict) else None
    counts = [device.get("count", 1) for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    total = sum(count for count in counts if isinstance(count, int) and count > 0)
    if total > MOST_DEVICES:
        raise UsageError(f"{total:,} devices are more than the studio takes, {MOST_DEVICES:,}")


def check_cluster(body: Any) -> dict[str, Any]:
    """Read a cluster that was opened or typed in the page, and say what it is."""
    request = check_request(body, {"name": (str,), "content": (str,)}, required=("content",))
    cluster = read_cluster(request["content"], request.get("name", "")[:LONGEST_NAME] or NAME)
    return {"ranks": len(cluster), "summary": cluster.describe(), "has_memory": cluster.memory_limit is not None}
