"""How a torch-shaped stage computes: our split backward, and what data parallelism around its module asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penstock.compat.torch._backward import _failed, _take_grad, _with_grads, stage_backward_input, stage_backward_weight
from penstock.compat.torch._graph import Group
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral

Grads = tuple[Tensor | None, ...]


class Halves:
    """The backwards of one stage: whole, or in two halves, announced before the forward or not."""

    def __init__(self, index: int, module: Any) -> None:
        self.module = module
        self.stage = Stage(index, module)
        self.splits = isinstance(module, nn.Module) and self.stage.splits
        """Whether it can be looked into: the whole backward of a compiled module runs in the first half."""
        self.kept: dict[int, Deferral] = {}
        """What the forward of each microbatch left for its backward for the weights."""
        self.groups: dict[int, list[Group]] = {}
        """The same of those whose split was not announced."""

    def forward(self, microbatch: int, run: Any) -> Any:
        """Run a forward whose backward will be split."""
        if not (self.splits and torch.is_grad_enabled()):
            return run()
        deferral = self.kept[microbatch] = Deferral()
        with self.stage.deferrable().forward(deferral):
            return run()

    def begin(self, split: bool) -> None:
        """A step begins: parameters may have been replaced, frozen or given hooks, and the module compiled, since the last one."""
        self.clear()
        self.stage.refresh()
        if split:
            self.splits = isinstance(self.module, nn.Module) and self.stage.splits

    def clear(self) -> None:
        self.kept.clear()
        self.groups.clear()

    def full(self, microbatch: int | None, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Gradients of everything; those of the inputs."""
        deferral = self.kept.pop(microbatch, None) if microbatch is not None else None
        found = self._run(deferral, outputs, grads, inputs)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        return found

    def first(self, microbatch: int, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Gradients of the inputs, and of what cannot wait."""
        deferral = self.kept.get(microbatch)
        if deferral is not None or not self.splits:
            return self._run(deferral, outputs, grads, inputs)
        ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        found, self.groups[microbatch] = stage_backward_input(ends, grads, inputs, self.module.parameters())
        return found

    def second(self, microbatch: int) -> None:
        """Gradients of the weights."""
        deferral = self.kept.pop(microbatch, None)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        elif microbatch in self.groups:
            stage_backward_weight(self.module.parameters(), self.groups.pop(microbatch))

    def _run(self, deferral: Deferral | None, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        try:
            pairs = list(_with_grads(outputs, grads)) if grads is not None else _from_loss(outputs)
            pairs = [(end, grad) for end, grad in pairs if grad is not None]
            if pairs:
                ends, starts = [end for end, _ in pairs], [grad for _, grad in pairs]
                if deferral is None:
                    run_backward(ends, starts)
                else:
                    self.stage.deferrable().backward_input(deferral, ends, starts)
            return tuple(map(_take_grad, inputs))
        except Exception as error:
            raise _failed("stage backward", outputs, grads, inputs) from error


def _from_loss(loss: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Where the last stage's backward starts."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RuntimeError(f"the loss is {what}, but a backward starts from a tensor of one number")
    return [(loss, torch.ones_like(loss))] if loss.requires_grad else []


# Data parallelism -----------------------------------------------------------------------------------------------------


@contextmanager
def data_parallel(module: Any, outputs: Any, last: bool) -> Iterator[None]:
    """Around a backward: gradients are accumulated, and with the last one DDP reduces them as they come."""
    if isinstance(module, DistributedDataParallel):
        if last:
            found = torch.nn.parallel.distributed._find_tensors(outputs)  # type: ignore[no-untyped-call]
            module.reducer.prepare_for_backward(list(found))
            yield
        else:
            with module.no_sync():
                yield
        return
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    yield


def reduce_replicas(module: DistributedDataParallel) -> None:
    """Average the gradients over the replicas: of weights that waited, DDP's own reduction never hears."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    group, count = module.process_group, dist.get_world_size(module.process_group)
    for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
        if work is not None:
            work.wait()
    for grad in grads:
        grad.div_(count)


class Aside:
    """Gradients from before a step, out of the way while the step's own are made and scaled; then the two are added."""

    def __init__(self, parameters: Iterable[nn.Parameter], copy: bool) -> None:
        self.before: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            self.before.append((parameter, grad.clone() if copy and grad is not None else grad))
            parameter.grad = None

    def add(self) -> None:
        """The sums, in the memory that the earlier gradients have."""
        for parameter, before in self.before:
            if before is not None:
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self.before.clear()

    def drop_new(self) -> None:
        """As if the step had not been."""
        for parameter, before in self.before:
            parameter.grad = before
        self.before.clear()
