"""Draw a case from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import penstock as ps
from fuzz.batches import INPUTS, REFUSED_BATCHES, TARGETS
from fuzz.case import BIDIRECTIONAL, STATEFUL, Case, StageSpec, is_exact, is_stateful
from fuzz.layers import LAYERS
from fuzz.orders import build_table, keeps_order, sums_in_order, write_order
from fuzz.trees import ALIASED, REFUSED, WRITERS
from penstock.errors import PenstockError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.table import Table
from penstock.schedules.registry import algorithms

SCHEDULES = tuple(name for name, each in algorithms().items() if name not in ("inference", "data-parallel") and not each.is_sliced)
"""Every schedule that trains one model."""
_FORMS = ("name",) * 9 + ("text",) * 2 + ("csv", "json", "program", "program-csv") * 2 + ("permuted",) * 2 + ("planned",)
_TREES = tuple(name for name in WRITERS if name not in (*REFUSED, "loss", "tensor"))
_SCRIPTS: tuple[tuple[str, ...], ...] = (
    ("step",),
    ("step",),
    ("step",),
    ("step", "step"),
    ("list",),
    ("step", "eval", "step"),
    ("step", "clip", "sgd", "step"),
    ("step", "adamw", "step", "eval"),
    ("step", "step", "clip", "adamw", "infer"),
    ("infer", "step", "zero", "step"),
    ("eval", "list", "sgd", "list", "eval"),
    ("more", "step"),
    ("step", "clip", "more", "eval"),
)
_ODD = ("gives", "gives", "gives", "inputs", "target", "hooks", "late", "state", "sparse", "change")
"""What is refused in some circumstances: at most one per case, because a case that is refused tests little else."""


def draw_case(seed: int, transport: str = "threads") -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    case = _draw_schedule(rng, replace(Case(), number=rng.randrange(1000), transport=transport))
    table = build_table(case)
    odd = rng.choice(_ODD) if rng.random() < 0.2 else ""
    case = replace(case, **_draw_options(rng, table, odd))
    case = replace(case, stages=_draw_stages(rng, case, table, odd))
    return _settle(rng, case, table)


# Schedules ------------------------------------------------------------------------------------------------------------


def _draw_schedule(rng: random.Random, case: Case) -> Case:
    """A schedule of a shape that it has."""
    form = rng.choice(_FORMS)
    while True:
        name = rng.choice(SCHEDULES)
        chunks = rng.choice((None, 1, 2, 3)) if "chunks" in algorithms()[name].layout.counts and form != "text" else None
        drawn = replace(case, schedule=name, ranks=rng.choice((1, 2, 2, 3, 4)), chunks=chunks, microbatches=rng.randint(1, 7))
        try:
            table = build_table(drawn)
        except PenstockError:
            continue
        if table.stages <= 8:
            break
    if form == "planned":
        drawn = replace(drawn, **_plan(rng, drawn))
    elif form == "permuted":
        drawn = replace(drawn, **write_order(_permute(rng, table)))
    else:
        drawn = replace(drawn, form=form)
    stages = build_table(drawn).stages
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    if pairs and form != "text" and rng.random() < 0.25:
        drawn = _skipping(rng, drawn, pairs)
    return drawn


def _skipping(rng: random.Random, case: Case, pairs: Sequence[tuple[int, int]]) -> Case:
    """The case with edges that skip stages, if its order is still possible."""
    skipping = replace(case, skips=tuple(sorted(rng.sample(pairs, min(len(pairs), rng.randint(1, 2))))))
    try:
        ps.verify(build_table(skipping))
    except PenstockError:
        return case
    return skipping


def _plan(rng: random.Random, case: Case) -> dict[str, Any]:
    """What the planner makes of a random model; without time to search, so that it is the same every time."""
    layers = [
        ps.Layer(
            f=rng.uniform(0.5, 2),
            i=rng.uniform(0.5, 2),
            w=rng.uniform(0.2, 2),
            activation=0.5,
            weight_stash=0.25,
            output=1.0,
            parameters=rng.uniform(1, 9),
        )
        for _ in range(8)
    ]
    names = rng.choice((["searched"], ["searched"], [case.schedule]))
    ranks = min(4, max(2, case.ranks))
    try:
        plan = ps.plan(ps.Profile(layers=layers, latency=0.1), ranks=ranks, microbatches=case.microbatches, schedules=names, seconds=0.0)
    except PenstockError:
        return {}
    return write_order(plan.schedule) | {"schedule": f"planned {plan.schedule.name}"}


def _permute(rng: random.Random, table: Table) -> Table:
    """The same actions in another order that the verifier accepts: neighbours of a rank change places."""
    rows: list[list[Action]] = [list(row) for row in table]
    for _ in range(12):
        row = rng.choice(rows)
        if len(row) < 2:
            continue
        at = rng.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]
        if not _is_legal(rows, table):
            row[at], row[at + 1] = row[at + 1], row[at]
    return _with_rows(rows, table)


def _with_rows(rows: Sequence[Sequence[Action]], table: Table) -> ps.Schedule:
    return ps.Schedule.from_actions(rows, table.placement, microbatches=table.microbatches)


def _is_legal(rows: Sequence[Sequence[Action]], table: Table) -> bool:
    """Whether the order can run; forwards keep the order of microbatches, on which models with state depend."""
    try:
        made = _with_rows(rows, table)
        ps.verify(ps.lower(made))
    except PenstockError:
        return False
    return keeps_order(made, Kind.F) or not keeps_order(table, Kind.F)


# Options --------------------------------------------------------------------------------------------------------------


def _draw_options(rng: random.Random, table: Table, odd: str) -> dict[str, Any]:
    def chance(share: float) -> bool:
        return rng.random() < share

    stages = range(table.stages)
    usual_inputs = [name for name in INPUTS if name not in REFUSED_BATCHES]
    usual_targets = [name for name in TARGETS if name not in REFUSED_BATCHES]
    options: dict[str, Any] = {
        "model": rng.choice(("list", "list", "list", "map", "sequential")),
        "share": chance(0.6),
        "inputs": rng.choice(usual_inputs) if chance(0.4) else "tensor",
        "target": rng.choice(usual_targets) if chance(0.3) else "tensor",
        "loss": rng.choice(("alone", "output", "adaptive")) if chance(0.12) else "mse",
        "reduction": "sum" if chance(0.2) else "mean",
        "weight": chance(0.12),
        "seed": rng.randrange(100) if chance(0.3) else None,
        "accumulate": "fused" if chance(0.06) else "autograd",
        "accumulate_dtype": "float64" if chance(0.08) else None,
        "record": chance(0.05),
        "hooks": rng.choice(("count", "double")) if chance(0.08) else "",
        "script": rng.choice(_SCRIPTS),
        "extra": rng.randrange(5),
    }
    if chance(0.2):
        options["recompute"] = tuple(stage for stage in stages if chance(0.6))
    if chance(0.12):
        options["kwargs"] = tuple(stage for stage in stages if chance(0.5))
    if odd == "inputs":
        options["inputs"] = rng.choice(REFUSED_BATCHES)
    if odd == "target":
        options["target"] = rng.choice([name for name in REFUSED_BATCHES if name in TARGETS])
    if odd == "hooks":
        options["hooks"] = "step"
    if odd == "late":
        options["script"] = ("step", "late", "step", "clip")
    return options


# Stages ---------------------------------------------------------------------------------------------------------------


def _draw_stages(rng: random.Random, case: Case, table: Table, odd: str) -> tuple[StageSpec, ...]:
    stages = table.stages
    mirrored = len(table.placement.copies) > 1
    usual = [name for name in LAYERS if name not in ("sparse_embedding", "in_place") and (case.seed is not None or name != "dropout")]
    if mirrored and odd != "state":
        usual = [name for name in usual if name not in STATEFUL or name == "batch_norm"]
    most = 3 if stages <= 4 else 2
    specs = []
    for stage in range(stages):
        layers = [rng.choice(usual) if rng.random() < 0.75 else "linear" for _ in range(rng.randint(1, most))]
        gives = rng.choice(_TREES) if stage < stages - 1 and rng.random() < 0.35 else "tensor"
        changes = rng.choice(("first", "last")) if rng.random() < 0.04 and gives != "sparse" else ""
        if stage in case.recompute:  # torch takes the lengths of a nested tensor that is made again for others
            layers = ["linear" if layer == "nested" else layer for layer in layers]
        if rng.random() < 0.05:
            layers.insert(rng.randrange(len(layers) + 1), "in_place")
        specs.append(StageSpec(tuple(layers), gives, changes))
    at = rng.randrange(max(1, stages - 1) if odd == "gives" else stages)
    specs[at] = _make_odd(rng, specs[at], odd, last=at == stages - 1)
    if odd == "change" and stages > 1:
        at = rng.randrange(stages - 1)
        specs[at] = replace(specs[at], gives=rng.choice((*ALIASED, "mask", "tensor")))
        specs[at + 1] = replace(specs[at + 1], changes=rng.choice(("first", "last")))
    if stages == 1 or rng.random() < 0.15:
        specs[-1] = replace(specs[-1], gives=rng.choice(("tensor", "dict", "list", "packet", "scalar", "none", "stage_output")))
    if case.loss == "output":
        specs[-1] = replace(specs[-1], gives="loss")
    return tuple(specs)


def _make_odd(rng: random.Random, spec: StageSpec, odd: str, last: bool) -> StageSpec:
    if odd == "gives" and not last:
        return replace(spec, gives=rng.choice(REFUSED))
    if odd == "sparse":
        return replace(spec, layers=(*spec.layers, "sparse_embedding"))
    if odd == "state":
        return replace(spec, layers=(*spec.layers, rng.choice(sorted(STATEFUL))))
    return spec


def _settle(rng: random.Random, case: Case, table: Table) -> Case:
    """Options that fit each other: float64 if sums come in another order, and calls that the case has."""
    if case.loss in ("alone", "output"):
        case = replace(case, weight=False, target="tensor")
    if case.model == "sequential":
        trees = tuple(replace(spec, gives="tensor") if spec.gives == "stage_output" else spec for spec in case.stages)
        case = replace(case, stages=trees, kwargs=(), skips=case.skips)
    if case.inputs in ("whole", "second_dim"):
        case = replace(case, script=tuple("step" if call == "list" else call for call in case.script))
    if case.form not in ("name", "text"):
        case = replace(case, script=tuple("step" if call == "more" and rng.random() < 0.8 else call for call in case.script))
    if any("sparse_embedding" in spec.layers for spec in case.stages):
        case = replace(case, script=tuple(call for call in case.script if call not in ("clip", "adamw")))
    single = rng.random() < (0.8 if sums_in_order(table) and is_exact(case) else 0.1)
    dtype = "float32" if single or case.accumulate_dtype else "float64"
    if case.share and is_stateful(case) and any(name in case.schedule for name in BIDIRECTIONAL):
        case = replace(case, share=rng.random() < 0.5)
    return replace(case, dtype=dtype)
