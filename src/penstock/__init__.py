"""Penstock plans, proves and runs pipeline-parallel training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import PlanError as PlanError
    from penstock.errors import VerifyError as VerifyError
    from penstock.ir.action import Action as Action
    from penstock.ir.costs import Costs as Costs
    from penstock.ir.formats.files import load as load
    from penstock.ir.graph import StageGraph as StageGraph
    from penstock.ir.kind import Kind as Kind
    from penstock.ir.placement import Placement as Placement
    from penstock.ir.program import Program as Program
    from penstock.ir.schedule import Schedule as Schedule
    from penstock.passes.lower import lower as lower
    from penstock.passes.lower import lower_rank as lower_rank
    from penstock.passes.pass_list import PassList as PassList
    from penstock.planner.plan import Plan as Plan
    from penstock.planner.plan import plan as plan
    from penstock.planner.profile import Layer as Layer
    from penstock.planner.profile import Profile as Profile
    from penstock.schedules.registry import available as available
    from penstock.schedules.registry import register as register
    from penstock.schedules.registry import schedule as schedule
    from penstock.simulator.simulate import retime as retime
    from penstock.simulator.simulate import simulate as simulate
    from penstock.simulator.simulate import simulate_many as simulate_many
    from penstock.simulator.timeline import Timeline as Timeline
    from penstock.verifier.proof import Proof as Proof
    from penstock.verifier.verify import verify as verify

# Where each public name lives; imported when first asked for, so that `import penstock` loads next to nothing.
_HOMES = {
    "PenstockError": "penstock.errors",
    "PlanError": "penstock.errors",
    "VerifyError": "penstock.errors",
    "Action": "penstock.ir.action",
    "Costs": "penstock.ir.costs",
    "load": "penstock.ir.formats.files",
    "StageGraph": "penstock.ir.graph",
    "Kind": "penstock.ir.kind",
    "Placement": "penstock.ir.placement",
    "Program": "penstock.ir.program",
    "Schedule": "penstock.ir.schedule",
    "lower": "penstock.passes.lower",
    "lower_rank": "penstock.passes.lower",
    "PassList": "penstock.passes.pass_list",
    "Plan": "penstock.planner.plan",
    "plan": "penstock.planner.plan",
    "Layer": "penstock.planner.profile",
    "Profile": "penstock.planner.profile",
    "available": "penstock.schedules.registry",
    "register": "penstock.schedules.registry",
    "schedule": "penstock.schedules.registry",
    "retime": "penstock.simulator.simulate",
    "simulate": "penstock.simulator.simulate",
    "simulate_many": "penstock.simulator.simulate",
    "Timeline": "penstock.simulator.timeline",
    "Proof": "penstock.verifier.proof",
    "verify": "penstock.verifier.verify",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the names are the table's


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
