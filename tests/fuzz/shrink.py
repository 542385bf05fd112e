"""Make a failing case smaller while it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.case import Case, StageSpec
from fuzz.check import Outcome
from fuzz.orders import build_table
from penstock.errors import PenstockError

_PLAIN = StageSpec()
_SIMPLE_SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zbv", "chimera", "dualpipe")


def shrink(case: Case, check: Callable[[Case], Outcome], kind: str, seconds: float = 60.0) -> Case:
    """The smallest case found that fails with the same kind, tried greedily."""
    until = time.monotonic() + seconds
    seen = {case.to_json()}
    going = True
    while going and time.monotonic() < until:
        going = False
        for smaller in list_smaller(case):
            text = smaller.to_json()
            if text in seen or time.monotonic() > until:
                continue
            seen.add(text)
            if check(smaller).kind == kind:
                case, going = smaller, True
                break
    return case


def list_smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the largest simplifications first."""
    yield from (_fit(smaller) for smaller in _list_candidates(case))


def _list_candidates(case: Case) -> Iterator[Case]:
    if case.transport != "threads":
        yield replace(case, transport="threads")
    yield from _simpler_schedules(case)
    plain = Case()
    for field in fields(Case):
        if field.name not in ("schedule", "form", "ranks", "order", "placement", "stages", "transport", "chunks", "microbatches", "script"):
            value = getattr(plain, field.name)
            if getattr(case, field.name) != value:
                yield replace(case, **{field.name: value})
    yield from _fewer(case, "script")
    yield from _simpler_stages(case)
    for name in ("skips", "recompute", "kwargs"):
        yield from _fewer(case, name)
    if case.transport == "both":
        yield replace(case, transport="gloo")
    for call in set(case.script) - {"step"}:
        yield replace(case, script=tuple("step" if each == call else each for each in case.script))


def _fewer(case: Case, name: str) -> Iterator[Case]:
    """One element of a tuple left out."""
    value: tuple[Any, ...] = getattr(case, name)
    for at in range(len(value)):
        shorter = value[:at] + value[at + 1 :]
        if shorter or name != "script":
            yield replace(case, **{name: shorter})


def _simpler_schedules(case: Case) -> Iterator[Case]:
    if case.form != "name":
        named = replace(case, form="name", order=(), placement=(), chunks=None)
        yield from (replace(named, schedule=name) for name in (case.schedule, *_SIMPLE_SCHEDULES))
        if case.form == "order":
            return
    for ranks in range(1, case.ranks):
        yield replace(case, ranks=ranks)
    for microbatches in range(1, case.microbatches):
        yield replace(case, microbatches=microbatches)
    if case.chunks is not None:
        yield replace(case, chunks=None)
        yield from (replace(case, chunks=chunks) for chunks in range(1, case.chunks))
    simpler = _SIMPLE_SCHEDULES[: _SIMPLE_SCHEDULES.index(case.schedule)] if case.schedule in _SIMPLE_SCHEDULES else _SIMPLE_SCHEDULES
    yield from (replace(case, schedule=name, chunks=None) for name in simpler)


def _simpler_stages(case: Case) -> Iterator[Case]:
    for at, spec in enumerate(case.stages):
        if spec != _PLAIN:
            yield _with_stage(case, at, _PLAIN)
    for at in range(len(case.stages)):
        yield replace(case, stages=case.stages[:at] + case.stages[at + 1 :])
    for at, spec in enumerate(case.stages):
        if spec.gives != "tensor":
            yield _with_stage(case, at, replace(spec, gives="tensor"))
        if spec.changes:
            yield _with_stage(case, at, replace(spec, changes=""))
        if len(spec.layers) > 1:
            for place in range(len(spec.layers)):
                yield _with_stage(case, at, replace(spec, layers=spec.layers[:place] + spec.layers[place + 1 :]))
        if spec.layers != ("linear",):
            yield _with_stage(case, at, replace(spec, layers=("linear",)))


def _with_stage(case: Case, at: int, spec: StageSpec) -> Case:
    return replace(case, stages=(*case.stages[:at], spec, *case.stages[at + 1 :]))


def _fit(case: Case) -> Case:
    """The case without what its schedule has no stages for."""
    try:
        stages = build_table(case).stages
    except PenstockError:
        return case
    specs = list(case.stages[:stages])
    while specs and specs[-1] == _PLAIN:
        specs.pop()
    return replace(
        case,
        stages=tuple(specs),
        skips=tuple(skip for skip in case.skips if skip[1] < stages),
        recompute=tuple(stage for stage in case.recompute if stage < stages),
        kwargs=tuple(stage for stage in case.kwargs if stage < stages),
    )
