"""ZeRO sharding of a layer over the GPUs that hold the same parameters, and its gradient reduction.

none      an all-reduce of the gradients after the last microbatch
ZeRO-1    a reduce-scatter of the gradients after the last microbatch, and an all-gather of the parameters after the update
ZeRO-2    the reduce-scatter with every W, behind it as far as it is as long
ZeRO-3    also an all-gather of the parameters with every F and every I, behind those
"""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.job.configuration import Configuration
from penstock.planner.job.machines import Machines
from penstock.planner.profile import Layer


def shard_layer(layer: Layer, configuration: Configuration, machines: Machines) -> Layer:
    """The layer of one GPU with the memory, the collectives and the update of its sharding, from the layer of a GPU without replicas."""
    replicas, sharding = configuration.replicas, configuration.sharding
    gather, scatter = (time_gather(size, configuration, machines) for size in (layer.parameters, layer.gradients))
    workspace = (layer.gradients if sharding >= 2 else 0.0) + (2 * layer.parameters if sharding == 3 else 0.0)
    return replace(
        layer,
        f=max(layer.f, gather) if sharding == 3 else layer.f,
        i=max(layer.i, gather) if sharding == 3 else layer.i,
        w=max(layer.w, scatter) if sharding >= 2 else layer.w,
        workspace=layer.workspace + workspace,
        parameters=layer.parameters / (replicas if sharding == 3 else 1),
        gradients=layer.gradients / (replicas if sharding >= 2 else 1),
        optimizer=layer.optimizer / (replicas if sharding else 1),
        reduction=0.0 if sharding >= 2 else scatter * (1 if sharding else 2),
        update=layer.update / (replicas if sharding else 1) + (gather if sharding in (1, 2) else 0.0),
    )


def time_update(layer: Layer, machines: Machines) -> float:
    """Seconds to update a layer element by element: it reads gradients and state, and writes state and parameters."""
    return machines.memory_time(layer.gradients + 2 * layer.optimizer + layer.parameters)


def time_gather(size: float, configuration: Configuration, machines: Machines) -> float:
    """Seconds of an all-gather or reduce-scatter of that many bytes over the replicas."""
    return machines.gather_time(size, configuration.replicas, stride=configuration.tensor)
