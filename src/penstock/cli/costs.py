"""Costs as they are given to a command."""

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
# What grows with a stage: its work and what it holds. Messages are as large however the model is cut.
_OF_A_STAGE = ("f", "i", "w", "b", "activation", "weight_stash", "parameters", "shard", "unshard", "reduce", "optimizer")


class Per(StrEnum):
    """What a single number in the costs is for."""

    STAGE = "stage"
    RANK = "rank"


PerOption = Annotated[Per, typer.Option("--per", help="What one number in the costs is for: each stage, or all stages of a rank.")]


def read_costs(text: str) -> Costs:
    """Costs from a file, or written out as `f=1,latency=0.1,activation=[1,2]`."""
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
        return Costs.from_json(_written(text))
    except CostsError as error:
        raise UsageError(f"--costs: {error}") from None


def of_stages(costs: Costs, stages: int, ranks: int) -> Costs:
    """Costs of a rank's share of the model as those of its stages: each number that grows with a stage is divided among them.

    Lists, which have one value a stage, stay as they are.
    """
    share = ranks / stages
    values = {name: getattr(costs, name) for name in _OF_A_STAGE}
    divided: dict[str, Any] = {name: value * share for name, value in values.items() if isinstance(value, float)}
    return replace(costs, **divided)


def _written(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in re.split(r",(?=[^\[\]]*(?:=|$))", text):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name.isidentifier():
            raise UsageError(f'--costs: {part.strip()!r} is not NAME=VALUE: write "f=1,i=1,w=1,latency=0.1", or name a .toml or .json file')
        if name in found:
            raise UsageError(f"--costs: {name} is given twice")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    """A number, a list of them, a size like 1.5GiB, or a word."""
    from penstock.errors import CostsError
    from penstock.ir.costs import parse_size

    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return parse_size(text)
    except CostsError:
        return text
