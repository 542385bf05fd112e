"""Spans in the constraint model: when a rank begins.

The simulator starts everything as soon as its order allows. A span counts from the rank's first action, so the model may not
start that one late to make the span look short: it must be *prompt*. Something is prompt if it starts at 0, or just when what
it waits for ends, and that is prompt too. Before every rank has begun only forwards run, since a gradient comes after its
microbatch's forward on every stage; so only forwards and their messages are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.planner.exact_model import Cell, Model

MOST_CAUSES = 20_000
"""With more, ranks may start late in the model."""

Thing = tuple[str, "Cell"]
"""A forward, or the message that it waits for."""
Cause = tuple[Any, Thing | None]
"""A time at which something may start, and what must be prompt for that."""


def add_begins(model: Model) -> list[Any]:
    """When each rank's first action starts."""
    causes = _all_causes(model)
    few = sum(map(len, causes.values())) <= MOST_CAUSES
    prompt = {thing: model.cp.new_bool_var("") for thing in causes} if few else {}
    for thing, literal in prompt.items():
        start = model.forward[thing[1]].start if thing[0] == "forward" else model.links.leaves[model.links.forward[thing[1]]]
        _explain(model, start, literal, causes[thing], prompt)
    return [_begin(model, rank, prompt) for rank in range(model.instance.problem.ranks)]


def _begin(model: Model, rank: int, prompt: dict[Thing, Any]) -> Any:
    first = _firsts(model, rank)
    if not first:
        return 0
    begin = model.moment()
    model.cp.add_min_equality(begin, [model.forward[cell].start for cell in first])
    if prompt:
        always = model.cp.new_constant(1)
        _explain(model, begin, always, [(model.forward[cell].start, ("forward", cell)) for cell in first], prompt)
    return begin


def _firsts(model: Model, rank: int) -> list[Cell]:
    """The forwards that can be the rank's first action: of the lowest of its stages that their microbatches pass."""
    found: list[Cell] = []
    for m in range(model.instance.microbatches):
        stages = [stage for stage in range(model.instance.stages) if model.instance.ranks[stage][m] == rank]
        found += [(stages[0], m)] if stages else []
    return found


def _explain(model: Model, start: Any, literal: Any, causes: list[Cause], prompt: dict[Thing, Any]) -> None:
    """Where the literal holds, the start is the time of one of the causes, and what that rests on is prompt."""
    reasons = []
    for time, thing in causes:
        reason = model.cp.new_bool_var("")
        model.cp.add(start == time).only_enforce_if(reason)
        if thing is not None:
            model.cp.add_implication(reason, prompt[thing])
        reasons.append(reason)
    model.cp.add_bool_or(reasons).only_enforce_if(literal)


def _all_causes(model: Model) -> dict[Thing, list[Cause]]:
    lanes = {m: (k, place) for k, alike in enumerate(model.instance.classes) for place, m in enumerate(alike)}
    causes: dict[Thing, list[Cause]] = {}
    for cell in model.forward:
        before = [other for other in model.forward if other != cell and _may_precede(model, other, cell, lanes)]
        causes["forward", cell] = [*_input(model, cell), *((model.forward[other].end, ("forward", other)) for other in before)]
        message = model.links.forward.get(cell)
        if message in model.links.leaves:
            beside = [other for other in model.links.beside[message] if not other.backward]
            queue = [(model.links.leaves[other] + other.takes, ("message", other.edge)) for other in beside]
            causes["message", cell] = [(message.maker.end, ("forward", (cell[0] - 1, cell[1]))), *queue]
    return causes


def _may_precede(model: Model, one: Cell, other: Cell, lanes: dict[int, tuple[int, int]]) -> bool:
    """Whether a forward may run right before another: on its rank, and of its own kind only the one before it."""
    ranks = model.instance.ranks
    if ranks[one[0]][one[1]] != ranks[other[0]][other[1]]:
        return False
    (kind, place), (other_kind, other_place) = lanes[one[1]], lanes[other[1]]
    return one[0] != other[0] or kind != other_kind or place + 1 == other_place


def _input(model: Model, cell: Cell) -> list[Cause]:
    """When what the forward needs is there."""
    if cell[0] == 0:
        return [(0, None)]
    before, message = (cell[0] - 1, cell[1]), model.links.forward.get(cell)
    if message is None:
        return [(model.forward[before].end, ("forward", before))]
    if message in model.links.leaves:
        return [(model.links.leaves[message] + message.takes, ("message", cell))]
    return [(message.maker.end + message.takes, ("forward", before))]
