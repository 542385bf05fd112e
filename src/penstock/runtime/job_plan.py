"""A pipeline of a whole job's plan: everything that was planned is run, or refused with what to do instead.

The pipeline runs the plan's schedule on the plan's partition, and recomputes the layers that the plan recomputes. It shards parameters,
gradients and optimizer state together (ZeRO-3), but not the rows of a shared vocabulary, and has no dimension for context; a plan that asks
for anything else needs a choice of the caller.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.planner.job.plan import JobPlan
from penstock.runtime.model.transforms import Recompute
from penstock.runtime.parallel.fsdp import Sharding
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.text.units import Units

_BY_HAND = "or run its parts, Pipeline(model, plan.schedule, split=plan.partition), and take care of the rest yourself"
_EVERYTHING = 3
"""The ZeRO stage that `shard=True` stands for."""


def settle_sharding(plan: object, sharding: Sharding | None) -> Sharding:
    """The sharding that was chosen, by default the plan's."""
    if sharding is not None or not isinstance(plan, JobPlan):
        return bool(sharding) if sharding is None else sharding
    stage, replicas = plan.configuration.sharding, plan.configuration.replicas
    if stage not in (0, _EVERYTHING):
        what = "the optimizer's state" if stage == 1 else "gradients and the optimizer's state"
        raise ScheduleError(
            f"the plan shards {what} over {replicas} GPUs (ZeRO-{stage}), but a pipeline shards parameters too or nothing: give shard=True "
            "for that, shard=False if your optimizer shards its state itself, or plan with sharding=3"
        )
    if stage == _EVERYTHING and any(plan.configuration.shared_ends):
        rows = sum(share.static for share in plan.profile.shares)
        planned, whole = Units("s", True).size(rows), Units("s", True).size(rows * replicas)
        raise ScheduleError(
            f"the plan shards everything over {replicas} GPUs (ZeRO-3), but a pipeline keeps a rank's rows of a shared "
            f"vocabulary whole on each: they take {whole} per GPU, not {planned}. Give shard=True to shard the rest, "
            "or plan with vocabulary='ends' or another ZeRO stage"
        )
    return stage == _EVERYTHING


def settle_recompute(plan: object, recompute: Recompute) -> Recompute:
    """The recomputed stages or layers that were chosen, by default the plan's: its memory is that of layers recomputed by themselves."""
    if recompute is not None or not isinstance(plan, JobPlan):
        return recompute
    return plan.recomputed_layers if any(plan.recomputed_layers) else False


def check_degrees(plan: object, mesh: PipelineMesh | None) -> None:
    """Refuse a plan whose degrees the ranks do not have, or that asks for what no pipeline does."""
    if not isinstance(plan, JobPlan):
        return
    chosen = plan.configuration
    if chosen.context > 1:
        raise ScheduleError(
            f"the plan has context={chosen.context}, but a pipeline cuts no sequences among ranks: plan with context=1, {_BY_HAND}"
        )
    if any(chosen.shared_ends) and chosen.tensor > 1:
        raise ScheduleError(
            f"the plan has vocabulary={chosen.vocabulary!r} and tensor={chosen.tensor}, but a pipeline does not split the "
            "rows that its ranks share over tensor ranks too: plan with tensor=1 or vocabulary='ends'"
        )
    if chosen.selective:
        raise ScheduleError(f"the plan has attention run its scores again, which is up to the model: plan with selective=False, {_BY_HAND}")
    for name, dimension, wanted in (("data", "dp", chosen.data), ("tensor", "tp", chosen.tensor)):
        ranks = 1 if mesh is None else len(getattr(mesh, name).members)
        if ranks != wanted:
            raise ScheduleError(
                f"the plan has {wanted} {name} ranks, but there {'is' if ranks == 1 else 'are'} {ranks}: give mesh=device_mesh("
                f"pp={chosen.pipeline}, dp={chosen.data}{f', tp={chosen.tensor}' if chosen.tensor > 1 else ''}), or plan with {name}="
                f"{ranks} (dimension {dimension!r} of the mesh)"
            )
