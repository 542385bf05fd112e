"""Replicas of a stage: ranks that hold the same layers and train them on data of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from penstock.compat.deepspeed.transport import Transport


class Replicas:
    """The replicas of this rank's stage. They start from the values of the first, and take the mean of their gradients."""

    def __init__(self, module: nn.Module, transport: Transport) -> None:
        self._transport = transport
        self.active = transport.replicas > 1
        if not self.active:
            return
        mine = [(name, tuple(each.shape), each.dtype, transport.ident(each)) for name, each in module.named_parameters()]
        self._check(transport.gather_replicas("replicas", mine))
        self._start_equal([*(parameter.detach() for parameter in module.parameters()), *module.buffers()])

    def _check(self, everyone: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        mine = everyone[self._transport.replica]
        for replica, theirs in enumerate(everyone):
            if [each[:-1] for each in theirs] != [each[:-1] for each in mine]:
                raise ScheduleError(
                    f"stage {self._transport.stage} has other parameters in replica {replica} than in replica {self._transport.replica}: "
                    "build the same layers on every rank"
                )
            if replica != self._transport.replica and {each[-1] for each in theirs} & {each[-1] for each in mine}:
                raise ScheduleError("two replicas have a parameter that is one object: build the layers on every rank, or give LayerSpec")

    @torch.no_grad()
    def _start_equal(self, tensors: Sequence[Tensor]) -> None:
        transport = self._transport
        if transport.shares_memory:
            everyone = transport.gather_replicas("values of replicas", tensors)
            for tensor, first in zip(tensors, everyone[0], strict=True):
                if transport.replica:
                    tensor.copy_(first)
            transport.gather_replicas("values of replicas copied", None)
            return
        connection = transport.connect_replicas()
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            connection.broadcast([flat]).wait(transport.timeout)
            _spread(flat, bucket)

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every replica the mean; a replica whose parameter took no part counts as zero."""
        if not self.active:
            return
        transport, held = self._transport, list(parameters)
        present = [parameter.grad is not None for parameter in held]
        wanted = [any(each) for each in zip(*transport.gather_replicas("ReduceGrads", present), strict=True)]
        held = [parameter for parameter, want in zip(held, wanted, strict=True) if want]
        for parameter in held:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise ScheduleError("a sparse gradient cannot be averaged over replicas: use dense ones")
        grads = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in held]
        if transport.shares_memory:
            everyone = transport.gather_replicas("gradients of replicas", grads)
            means = [sum(each[1:], start=each[0].clone()) / transport.replicas for each in zip(*everyone, strict=True)]
            transport.gather_replicas("gradients of replicas summed", None)  # nobody changes a gradient that another has yet to add
            for parameter, mean in zip(held, means, strict=True):
                parameter.grad = mean
            return
        connection = transport.connect_replicas()
        for bucket in _buckets(grads):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            connection.allreduce([flat]).wait(transport.timeout)
            _spread(flat.div_(transport.replicas), bucket)
        for parameter, grad in zip(held, grads, strict=True):
            parameter.grad = grad

    def average(self, name: str, value: Any) -> Any:
        """The mean of a tree of tensors over the replicas."""
        if not self.active:
            return value
        everyone = self._transport.gather_replicas(name, value)
        if value is None:
            return None
        return pytree.tree_map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), everyone[0], *everyone[1:])


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors by type and device, in an order that all replicas have."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of one tensor into others."""
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
