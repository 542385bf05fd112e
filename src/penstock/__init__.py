"""Penstock plans, proves and runs pipeline-parallel training.

A schedule comes from `schedules` or from the planner, passes lower it to a program, the verifier proves it, and the simulator or the
runtime runs it. Public names are loaded when they are first used, so that importing the package needs neither torch nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.errors import LoweringError as LoweringError
    from penstock.errors import PenstockError as PenstockError
    from penstock.errors import PlanError as PlanError
    from penstock.errors import ScheduleError as ScheduleError
    from penstock.errors import VerifyError as VerifyError
    from penstock.ir.action import Action as Action
    from penstock.ir.cluster import Cluster as Cluster
    from penstock.ir.cluster import Device as Device
    from penstock.ir.codes import B as B
    from penstock.ir.codes import F as F
    from penstock.ir.codes import I as I
    from penstock.ir.codes import W as W
    from penstock.ir.codes import overlap as overlap
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
    from penstock.passes.vocabulary import Vocabulary as Vocabulary
    from penstock.passes.vocabulary import spread_vocabulary as spread_vocabulary
    from penstock.planner.batches.batch_planner import BatchOrder as BatchOrder
    from penstock.planner.batches.batch_planner import BatchPlanner as BatchPlanner
    from penstock.planner.batches.packing import Packing as Packing
    from penstock.planner.batches.packing import pack as pack
    from penstock.planner.job import Configuration as Configuration
    from penstock.planner.job import Job as Job
    from penstock.planner.job import JobPlan as JobPlan
    from penstock.planner.job import Machines as Machines
    from penstock.planner.job import plan_job as plan_job
    from penstock.planner.job import predict_job as predict_job
    from penstock.planner.losses import Survivors as Survivors
    from penstock.planner.losses import TakeOver as TakeOver
    from penstock.planner.losses import take_over as take_over
    from penstock.planner.plan import Plan as Plan
    from penstock.planner.plan import plan as plan
    from penstock.planner.profile import Layer as Layer
    from penstock.planner.profile import Profile as Profile
    from penstock.schedules.registry import Layout as Layout
    from penstock.schedules.registry import Shape as Shape
    from penstock.schedules.registry import available as available
    from penstock.schedules.registry import register as register
    from penstock.schedules.registry import schedule as schedule
    from penstock.simulator.simulate import retime as retime
    from penstock.simulator.simulate import simulate as simulate
    from penstock.simulator.simulate import simulate_many as simulate_many
    from penstock.simulator.timeline import Timeline as Timeline
    from penstock.verifier.finding import Finding as Finding
    from penstock.verifier.proof import Proof as Proof
    from penstock.verifier.verify import verify as verify

# Where each public name lives; imported when first asked for, so that `import penstock` loads next to nothing.
_NAMES = {
    "errors": "LoweringError PenstockError PlanError ScheduleError VerifyError",
    "ir.action": "Action",
    "ir.cluster": "Cluster Device",
    "ir.codes": "F B I W overlap",
    "ir.costs": "Costs",
    "ir.formats.files": "load",
    "ir.graph": "StageGraph",
    "ir.kind": "Kind",
    "ir.placement": "Placement",
    "ir.program": "Program",
    "ir.schedule": "Schedule",
    "passes.lower": "lower lower_rank",
    "passes.pass_list": "PassList",
    "passes.vocabulary": "Vocabulary spread_vocabulary",
    "planner.batches.batch_planner": "BatchOrder BatchPlanner",
    "planner.batches.packing": "Packing pack",
    "planner.job": "Configuration Job JobPlan Machines plan_job predict_job",
    "planner.losses": "Survivors TakeOver take_over",
    "planner.plan": "Plan plan",
    "planner.profile": "Layer Profile",
    "schedules.registry": "Layout Shape available register schedule",
    "simulator.simulate": "retime simulate simulate_many",
    "simulator.timeline": "Timeline",
    "verifier.finding": "Finding",
    "verifier.proof": "Proof",
    "verifier.verify": "verify",
}
_HOMES = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names.split()}

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
