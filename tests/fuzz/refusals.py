"""What the library may refuse, and the part of a case that a refusal needs: any other refusal is a failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fuzz.case import LOADED, Case, list_features
from fuzz.trees import ALIASED

IN_PLACE = ("in_place", "relu_")
"""Layers that change their input."""


@dataclass(frozen=True)
class Rule:
    """A known refusal: what its text says, and the cases that may get it."""

    name: str
    text: str
    applies: Callable[[Case, set[str]], bool]


def _changes(case: Case) -> bool:
    """Whether a stage changes its input in place."""
    return any(stage.changes or stage.layers[0] in IN_PLACE for stage in case.stages)


def _gives(features: set[str], *names: str) -> bool:
    return any(f"gives:{name}" in features for name in names)


def _feeds(features: set[str], *names: str) -> bool:
    return any(f"{part}:{name}" in features for part in ("inputs", "target") for name in names)


def _keeps_state(features: set[str]) -> bool:
    """Whether a forward changes other state than batch-norm statistics."""
    return any(f"layer:{layer}" in features for layer in ("spectral_norm", "counter", "running_mean"))


RULES = (
    Rule(
        "a change in place of a value that others read, or that shares memory",
        r"changes .*in place",
        lambda case, features: _changes(case) and (bool(case.skips) or _gives(features, *ALIASED)),
    ),
    Rule(
        "an object that is not a pytree",
        r"holds a tensor but is not a pytree",
        lambda case, features: _gives(features, "box", "box_in_tuple", "userdict") or _feeds(features, "box", "box_beside", "userdict"),
    ),
    Rule(
        "a tensor that cannot cross a boundary as it is",
        r"a stage returns a .*, which cannot be sent as it is",
        lambda case, features: _gives(features, "subclass", "wrapper", "attribute", "sparse", "nested"),
    ),
    Rule(
        "nested tensors in a recomputed stage, which torch's own checkpoint does not take",
        r"torch\.utils\.checkpoint: Recomputed values",
        lambda case, features: "layer:nested" in features and bool(case.recompute),
    ),
    Rule("an array in a batch", r"the batch has a NumPy array", lambda case, features: _feeds(features, "array")),
    Rule(
        "another count of microbatches than the schedule was written for",
        r"is fixed to \d+, because it was loaded",
        lambda case, features: case.form in LOADED and "more" in case.script,
    ),
    Rule(
        "a change in place of a part of the batch that is read elsewhere",
        r"a tensor of the batch that",
        lambda case, features: _changes(case) and _feeds(features, "whole"),
    ),
    Rule("weights that are all zero", r"weights of the microbatches are", lambda case, features: case.weight),
    Rule(
        "state of a stage whose microbatches do not come in order on one rank",
        r"this rank does not run all of the stage's microbatches in order",
        lambda case, features: ("bidirectional" in features or case.form == "order") and _keeps_state(features),
    ),
    Rule(
        "an optimizer step inside a hook",
        r"a hook that runs when a gradient is complete has changed",
        lambda case, features: case.hooks == "step" and bool({"several", "layer:tied", "bidirectional"} & features),
    ),
    Rule(
        "a gradient of a weight that other stages use too",
        r"the gradient of a weight that another stage uses too",
        lambda case, features: case.loss == "adaptive" and "layer:tied" in features,
    ),
    Rule(
        "a parameter that was added late",
        r"was added to the model after the pipeline was created",
        lambda case, features: "late" in case.script,
    ),
)


def find_rule(case: Case, text: str) -> Rule | None:
    """The rule that allows a refusal with this text."""
    features = list_features(case)
    return next((rule for rule in RULES if re.search(rule.text, text) and rule.applies(case, features)), None)


def is_odd(case: Case) -> bool:
    """Whether some rule could apply, so that the case may end early."""
    features = list_features(case)
    return any(rule.applies(case, features) for rule in RULES)
