"""The option --costs: a file, or costs written out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.ir.costs import Costs

_FILES = (".toml", ".json")
# The costs that grow with a stage: its work and its memory. The size of messages does not depend on the partition.
_PER_STAGE = ("f", "i", "w", "b", "activation", "weight_stash", "parameters", "shard", "unshard", "reduce", "optimizer")


class Per(StrEnum):
    """What one number in the costs is for."""

    STAGE = "stage"
    RANK = "rank"


PerOption = Annotated[Per, typer.Option("--per", help="What one number in the costs is for: each stage, or all stages of a rank together.")]


def read_costs(text: str) -> Costs:
    """Read costs from a file, or from text like `f=1,latency=0.1,activation=[1,2]`."""
    from penstock.errors import CostsError
    from penstock.ir.costs import Costs

    path = Path(text)
    if path.suffix.lower() in _FILES or (text and "=" not in text and path.exists()):
        if path.is_dir():
            raise UsageError(f"--costs: {path} is a folder, not a file")
        if not path.is_file():
            raise UsageError(f"--costs: there is no file {path}")
        return Costs.load(path)
    try:
        return Costs.from_json(_parse(text))
    except CostsError as error:
        raise UsageError(f"--costs: {error}") from None


def divide_among_stages(costs: Costs, stages: int, ranks: int) -> Costs:
    """Turn the costs of all stages of a rank into the costs of one: divide each number that grows with a stage.

    Lists have one value per stage already, and stay as they are.
    """
    share = ranks / stages
    values = {name: getattr(costs, name) for name in _PER_STAGE}
    divided: dict[str, Any] = {name: value * share for name, value in values.items() if isinstance(value, float)}
    return replace(costs, **divided)


def _parse(text: str) -> dict[str, Any]:
    costs: dict[str, Any] = {}
    for part in re.split(r",(?=[^\[\]]*(?:=|$))", text):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals or not name.isidentifier():
            raise UsageError(f'--costs: {part.strip()!r} is not NAME=VALUE: write "f=1,i=1,w=1,latency=0.1", or name a .toml or .json file')
        if name in costs:
            raise UsageError(f"--costs: {name} is given twice")
        costs[name] = _parse_value(value)
    return costs


def _parse_value(text: str) -> Any:
    """Read a number, a list of numbers, a size like 1.5GiB, or a word."""
    from penstock.errors import CostsError
    from penstock.text.units import parse_size

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return parse_size(text)
    except CostsError:
        return text
