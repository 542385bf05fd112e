"""One case of the fuzzer: a small, frozen description from which the model, the batch, the schedule and the calls follow."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

LOADED = ("csv", "json", "order", "program", "program-csv")
"""Forms of a schedule that are known for one number of microbatches only."""
BIDIRECTIONAL = ("chimera", "dualpipe")


@dataclass(frozen=True)
class StageSpec:
    """One stage: its layers in order, the tree that it returns, and which leaf of its input it changes in place."""

    layers: tuple[str, ...] = ("linear",)
    gives: str = "tensor"
    changes: str = ""
    """Empty, or `first` or `last`: the tensor of the input that is changed in place."""


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on. Equal cases give equal numbers."""

    schedule: str = "gpipe"
    form: str = "name"
    """How the pipeline gets the schedule: `name` (built), `text` (its name), `csv` or `json` (written and loaded back), `order` (the
    rows below), `program` (lowered), `program-csv` (lowered, written and loaded back)."""
    ranks: int = 1
    chunks: int | None = None
    microbatches: int = 1
    order: tuple[str, ...] = ()
    """For `order`: one row per rank, actions separated by commas, as a planner or a permutation made them."""
    placement: tuple[tuple[int, ...], ...] = ()
    """For `order`: the rank of each stage, one row per copy."""
    skips: tuple[tuple[int, int], ...] = ()
    """Edges of the stage graph beyond the chain."""
    stages: tuple[StageSpec, ...] = ()
    """Stages beyond these are plain."""
    model: str = "list"
    """`list` (one module per stage), `map` (this rank's stages) or `sequential` (a whole module, cut by `split`)."""
    share: bool = True
    """Whether virtual ranks share one model; otherwise each builds its own, as processes do."""
    inputs: str = "tensor"
    target: str = "tensor"
    loss: str = "mse"
    reduction: str = "mean"
    weight: bool = False
    """Whether microbatches count by a function of their target."""
    seed: int | None = None
    recompute: tuple[int, ...] = ()
    """The stages that are recomputed."""
    accumulate: str = "autograd"
    accumulate_dtype: str | None = None
    kwargs: tuple[int, ...] = ()
    """The stages that get a keyword argument."""
    hooks: str = ""
    """Hooks on parameters: empty, `count`, `double` or `step`."""
    record: bool = False
    script: tuple[str, ...] = ("step",)
    """The calls, in order: `step`, `list`, `more` (a step of another count), `eval`, `infer`, `clip`, `zero`, `sgd`, `adamw`, `late`."""
    dtype: str = "float32"
    extra: int = 0
    """How many elements a batch has beyond two per microbatch."""
    number: int = 0
    """What the random numbers are drawn from."""
    transport: str = "threads"
    """`threads`, `gloo`, or `both`, which are compared with each other too."""

    def to_json(self) -> str:
        """One line; fields with their default value are left out."""
        return json.dumps(_without_defaults(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read what `to_json` wrote; unknown fields are an error."""
        given = json.loads(text)
        stages = tuple(StageSpec(**{name: _frozen(value) for name, value in stage.items()}) for stage in given.pop("stages", ()))
        return cls(stages=stages, **{name: _frozen(value) for name, value in given.items()})


def _without_defaults(value: Case | StageSpec) -> dict[str, Any]:
    kept = {}
    for field in fields(value):
        held = getattr(value, field.name)
        if held != field.default:
            kept[field.name] = [_without_defaults(stage) for stage in held] if field.name == "stages" else held
    return kept


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def list_features(case: Case) -> set[str]:
    """What the case contains, by name: known refusals and the coverage table refer to these."""
    plain = asdict(Case())
    found = {f"schedule:{case.schedule}", f"form:{case.form}", f"dtype:{case.dtype}", f"model:{case.model}"}
    found |= {f"{name}:{getattr(case, name)}" for name in ("inputs", "target", "loss", "reduction") if getattr(case, name) != plain[name]}
    found |= {f"call:{call}" for call in case.script}
    found |= {f"hooks:{case.hooks}"} if case.hooks else set()
    for name in ("skips", "weight", "recompute", "kwargs", "record", "accumulate_dtype"):
        if getattr(case, name):
            found.add(name)
    if case.accumulate == "fused":
        found.add("fused")
    if case.seed is not None:
        found.add("seed")
    if case.share:
        found.add("share")
    if case.microbatches > 1 or "more" in case.script:
        found.add("several")
    if any(name in case.schedule for name in BIDIRECTIONAL) or len(case.placement) > 1:
        found.add("bidirectional")
    for number, stage in enumerate(case.stages):
        found |= {f"layer:{layer}" for layer in stage.layers}
        if stage.gives != "tensor":
            found.add(f"gives:{stage.gives}")
        if stage.changes:
            found.add(f"changes:{stage.changes}" if number else "changes:batch")
    return found


STATEFUL = {"batch_norm", "spectral_norm", "counter", "running_mean"}
"""Layers whose state changes in a forward."""


def is_stateful(case: Case) -> bool:
    return any(layer in STATEFUL for stage in case.stages for layer in stage.layers)


def is_exact(case: Case) -> bool:
    """Whether the pipeline adds the same numbers in the same order as the plain loop, if its schedule keeps the order of microbatches.

    Copies of a tied weight are summed one by one; a value that several stages read gets the sum of each stage's gradient; and a
    gradient of other strides goes through other kernels.
    """
    summed_apart = case.accumulate != "autograd" or case.accumulate_dtype is not None
    strided = any(stage.gives in ("transposed", "expanded") for stage in case.stages)
    return not (summed_apart or case.skips or strided or any("tied" in stage.layers for stage in case.stages))
