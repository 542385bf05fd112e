"""Messages in the constraint model: a link carries one at a time, first come, first served."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.planner.exact_model import Cell, Doing, Model

MOST_PAIRS = 20_000
"""Pairs of messages on one channel whose order is decided one by one; with more, one may overtake another in the model."""


@dataclass(frozen=True, eq=False)
class Message:
    """From its maker on one rank to its user on another."""

    maker: Doing
    user: Doing
    takes: int
    source: int
    target: int
    backward: bool
    lane: tuple[int, bool, int]
    """Messages of one lane are made in the order of their microbatches."""
    edge: Cell
    """The higher stage, and the microbatch."""


@dataclass(frozen=True, eq=False)
class Links:
    """When messages leave, where that is not the end of their maker, and the others on their channel."""

    leaves: dict[Message, Any] = field(default_factory=dict)
    forward: dict[Cell, Message] = field(default_factory=dict)
    """The message that the forward of a stage and microbatch waits for."""
    beside: dict[Message, list[Message]] = field(default_factory=dict)


def add_links(model: Model, messages: list[Message]) -> Links:
    """A message arrives so long after it was made, and later where its link is taken."""
    links, made = _by_link(model, messages), Links()
    ordered = model.instance.problem.costs.contention == "independent"
    for link in links.values():
        if not ordered or _can_wait(link):
            _share(model, link, made, ordered)
    for message in messages:
        leaves = made.leaves.get(message, message.maker.end)
        model.cp.add(message.user.start >= leaves + message.takes)
        if not message.backward:
            made.forward[message.edge] = message
    return made


def _by_link(model: Model, messages: list[Message]) -> dict[object, list[Message]]:
    links: dict[object, list[Message]] = {}
    contention = model.instance.problem.costs.contention
    for message in messages:
        ends = (message.source, message.target)
        names: tuple[object, ...] = {
            "independent": ((*ends, message.backward),),
            "pair": (ends,),
            "duplex": (("from", message.source), ("to", message.target)),
            "rank": ends,
        }[contention]
        for name in names:
            links.setdefault(name, []).append(message)
    return links


def _can_wait(link: list[Message]) -> bool:
    """Not where every message is through before the next can be made: each is made by the same rank, after the one before."""
    return max(message.takes for message in link) > min(message.maker.takes for message in link)


def _share(model: Model, link: list[Message], made: Links, ordered: bool) -> None:
    cp, lane = model.cp, []
    for message in link:
        if message not in made.leaves:
            made.leaves[message] = model.moment()
            cp.add(made.leaves[message] >= message.maker.end)
        lane.append(cp.new_fixed_size_interval_var(made.leaves[message], message.takes, ""))
        made.beside[message] = [other for other in link if other is not message]
    cp.add_no_overlap(lane)
    if ordered:
        _first_come(model, link, made.leaves)


def _first_come(model: Model, link: list[Message], leaves: dict[Message, Any]) -> None:
    """Messages leave in the order in which they were made, which is known in advance within a lane."""
    lanes: dict[object, list[Message]] = {}
    for message in link:
        lanes.setdefault(message.lane, []).append(message)
    for lane in lanes.values():
        for first, second in pairwise(lane):
            model.cp.add(leaves[second] >= leaves[first] + first.takes)
    pairs = [(one, other) for some, others in combinations(lanes.values(), 2) for one in some for other in others]
    for one, other in pairs if len(pairs) <= MOST_PAIRS else []:
        sooner = model.cp.new_bool_var("")
        for first, second, when in ((one, other, sooner), (other, one, sooner.negated())):
            model.cp.add(second.maker.start >= first.maker.end).only_enforce_if(when)
            model.cp.add(leaves[second] >= leaves[first] + first.takes).only_enforce_if(when)
