"""What a case showed, and the comparison with the unpipelined model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

RIGHT, MISSING, SCALED, DIFFERS, WASTES = "right", "missing", "scaled", "differs", "wastes"
"""Symptoms of a step that ends: gradients that are None, a constant factor, other numbers, work or memory without use."""
RAISES, HANGS, CRASHES = "raises", "hangs", "crashes"
"""Symptoms of one that does not: an error, a wait for another rank until its timeout, a process that dies."""
EXACT = 1e-9
"""The relative error allowed in float64."""


@dataclass(frozen=True)
class Outcome:
    """A symptom, and the measured numbers in words."""

    symptom: str
    text: str

    @property
    def right(self) -> bool:
        return self.symptom == RIGHT


@dataclass(frozen=True)
class Case:
    """One thing to try: `run(engine)` is called on each of the `ranks`.

    `recorded` is the symptom that torch 2.13 showed. `admitted` has symptoms of our own engines that their documentation names, by engine.
    """

    number: str
    title: str
    recorded: str
    run: Callable[[Any], Outcome]
    ranks: int = 2
    admitted: Mapping[str, str] = field(default_factory=dict)


def compare_gradients(modules: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> Outcome:
    """Compare the gradients of some stages with those of the unpipelined model's."""
    pairs = [
        (mine.grad, theirs.grad)
        for module, other in zip(modules, wanted, strict=True)
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True)
        if theirs.grad is not None
    ]
    missing = sum(mine is None for mine, _ in pairs)
    if missing:
        return Outcome(MISSING, f"{missing} of {len(pairs)} gradients are None on one rank")
    mine, theirs = (torch.cat([grad.flatten() for grad in column]) for column in zip(*pairs, strict=True))
    return compare_values(mine, theirs, "gradients")


def compare_values(mine: Tensor, theirs: Tensor, what: str) -> Outcome:
    """Say whether values are equal, a constant multiple, or different."""
    if mine.shape != theirs.shape:
        return Outcome(DIFFERS, f"{what} of shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}")
    scale = theirs.abs().max()
    error = float((mine - theirs).abs().max() / scale)
    if error <= EXACT:
        return Outcome(RIGHT, f"{what} equal")
    factor = float((mine * theirs).sum() / theirs.square().sum())
    if float((mine - factor * theirs).abs().max() / scale) <= EXACT:
        return Outcome(SCALED, f"{factor:.4g} times the {what}")
    return Outcome(DIFFERS, f"{what} differ by {error:.1%}")


def first_wrong(*outcomes: Outcome) -> Outcome:
    """The first outcome that is wrong, or the first."""
    return next((outcome for outcome in outcomes if not outcome.right), outcomes[0])
