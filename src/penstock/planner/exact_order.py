"""From a solution to a schedule, and from a schedule to a hint."""

from __future__ import annotations

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.planner.exact_model import Cell, Doing, Model
from penstock.planner.problem import Problem

Done = tuple[int, int, Kind, Cell]


def schedule_of(problem: Problem, done: list[Done]) -> Schedule:
    """Each rank's actions in the order of the solution; what takes no time stands where what it needs is before it."""
    rows: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for _, _, kind, (stage, m) in sorted(done, key=_place):
        rows[problem.placement.rank_of(stage, m)].append(Action(stage, kind, m))
    return Schedule.from_actions(rows, problem.placement, microbatches=problem.microbatches, name="solved")


def _place(one: Done) -> tuple[int, int, int, int]:
    start, end, kind, (stage, _) = one
    return start, end, (Kind.F, Kind.B, Kind.I, Kind.W).index(kind), stage if kind is Kind.F else -stage


def hint(model: Model, schedule: Schedule) -> None:
    """Tell the solver when the schedule's actions start; microbatches that are alike are renamed to come in order."""
    problem, unit = model.instance.problem, float(model.instance.time)
    timeline = problem.evaluate(schedule)
    starts: dict[Kind, dict[Cell, int]] = {kind: {} for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for rank in range(problem.ranks):
        for span in timeline.spans(rank):
            for part in span.action.parts:
                starts[part.kind][part.stage, part.microbatch or 0] = round(span.start / unit)
    for alike in model.instance.classes:
        for stage in range(problem.stages):
            _hint_forwards(model, starts, [(stage, m) for m in alike])
            _hint_backwards(model, starts, [(stage, m) for m in alike])
    model.cp.add_hint(model.end, min(model.most, round(problem.objective(timeline) / unit)))


def _hint_forwards(model: Model, starts: dict[Kind, dict[Cell, int]], cells: list[Cell]) -> None:
    for cell, start in zip(cells, sorted(starts[Kind.F][cell] for cell in cells), strict=True):
        _hint(model, model.forward[cell], start)


def _hint_backwards(model: Model, starts: dict[Kind, dict[Cell, int]], cells: list[Cell]) -> None:
    gradients = sorted((start, kind) for kind in (Kind.B, Kind.I) for cell in cells if (start := starts[kind].get(cell)) is not None)
    weights = sorted(start for cell in cells if (start := starts[Kind.W].get(cell)) is not None)
    for cell, (start, kind) in zip(cells, gradients, strict=True):
        _hint(model, model.gradient[cell], start)
        if cell in model.full:
            model.cp.add_hint(model.full[cell], kind is Kind.B)
        if cell in model.weight:
            later = weights.pop(0) if kind is Kind.I and weights else start + int(model.instance.i[cell])
            _hint(model, model.weight[cell], later)


def _hint(model: Model, doing: Doing, start: int) -> None:
    model.cp.add_hint(doing.start, start)
