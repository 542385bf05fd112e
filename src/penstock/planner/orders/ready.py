"""Have everything compiled before the time of a search begins."""

from __future__ import annotations

from functools import cache

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.orders.anneal import Pace
from penstock.planner.orders.dispatch import Rule
from penstock.planner.orders.patterns import Pattern, pattern_of
from penstock.planner.orders.shop import shop_of
from penstock.planner.orders.workshop import Order, Workshop
from penstock.planner.problem import Problem


@cache
def get_ready() -> None:
    """Run every loop once; compiling them takes some seconds the first time after an installation."""
    workshop = Workshop(shop_of(Problem(Placement.linear(2), 2, Costs())))
    full, counts = np.zeros(workshop.cells, dtype=np.int8), np.full(2, 2)
    objective = workshop.dispatch(Rule(np.zeros(6), 1.0, counts, counts, 0.0, 0.0), full)
    order = Order(workshop.made, full, objective)
    workshop.time(order.nodes, full)
    workshop.annealing(order, 0).run(Pace(1, 0.0, 0.5, 1, 1, 0.5))
    Pattern(workshop, *pattern_of(workshop, order), full, 0).run(1, 1.0)
