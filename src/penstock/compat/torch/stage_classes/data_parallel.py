"""What DDP, FSDP and gradients of earlier steps need around the backwards of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penstock.compat.torch.installed import FINALIZES_BACKWARD


@contextmanager
def synchronize_on_last(module: Any, outputs: Any, last: bool) -> Iterator[None]:
    """Run a backward that only accumulates gradients; in the last one, DDP reduces them as they are computed."""
    if isinstance(module, DistributedDataParallel):
        if last:
            tensors = torch.nn.parallel.distributed._find_tensors(outputs)  # type: ignore[no-untyped-call]
            module.reducer.prepare_for_backward(list(tensors))
            yield
        else:
            with module.no_sync():
                yield
        return
    if isinstance(module, FSDPModule):
        if not FINALIZES_BACKWARD:
            module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    yield


def average_replicas(module: DistributedDataParallel) -> None:
    """Average the gradients over the replicas. After a split backward this is needed because DDP does not see deferred gradients."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    group, count = module.process_group, dist.get_world_size(module.process_group)
    for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
        if work is not None:
            work.wait()
    for grad in grads:
        grad.div_(count)


class EarlierGradients:
    """Gradients from before a step, set aside while the step's own are computed and scaled."""

    def __init__(self, parameters: Iterable[nn.Parameter], copy: bool) -> None:
        self.earlier: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            self.earlier.append((parameter, grad.clone() if copy and grad is not None else grad))
            parameter.grad = None

    def add_back(self) -> None:
        """Add the step's gradients to the earlier ones, in the earlier ones' memory."""
        for parameter, earlier in self.earlier:
            if earlier is not None:
                if parameter.grad is not None:
                    earlier.add_(parameter.grad)
                parameter.grad = earlier
        self.earlier.clear()

    def restore(self) -> None:
        """Discard the step's gradients."""
        for parameter, earlier in self.earlier:
            parameter.grad = earlier
        self.earlier.clear()
