"""Compare a step with the unpipelined model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime import microbatch as mb
from penstock.runtime.executor import Feed
from penstock.runtime.extras import collect, unwrap
from penstock.runtime.gradients import Backup
from penstock.runtime.stage import Stage
from penstock.runtime.values import detached

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from the reference: the largest difference, relative to the reference's largest value."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """A step against one reference."""

    reference: str
    """`microbatch loop`: the same slices in the same order; `whole batch`: the batch in one piece."""
    exact: bool
    """Whether every bit is the same."""
    differences: list[Difference] = field(default_factory=list)
    """What differs, the worst first."""

    @property
    def worst(self) -> float:
        return self.differences[0].relative if self.differences else 0.0

    def __str__(self) -> str:
        if self.exact:
            return f"{self.reference}: equal to the last bit"
        shown = ", ".join(f"{d.name} {d.relative:.2g}" for d in self.differences[:5])
        return f"{self.reference}: {len(self.differences)} differ, by up to {self.worst:.2g} of the largest value ({shown})"


@dataclass(frozen=True)
class Parity:
    """What a step gives against the unpipelined model: the loss, every gradient and their norm."""

    loop: Comparison
    batch: Comparison | None
    """None where the microbatches cannot be joined into one batch."""

    def __str__(self) -> str:
        return "\n".join(map(str, filter(None, (self.loop, self.batch))))


def parity(pipeline: Pipeline, feed: Feed) -> Parity:
    """Run a step and both references on copies of the model; the parameters' gradients are put back afterwards."""
    parts = [part for part in pipeline.partition.parts if part is not None]
    if len(parts) != pipeline.table.stages:
        raise ScheduleError("parity runs the whole model, but this pipeline was made of some of its stages only")
    modules = copy.deepcopy(nn.ModuleList(part.module for part in parts))
    held = {index: stage.module.state_dict() for index, stage in pipeline.stages.items()}
    for theirs in reversed(pipeline.gather("states", held)):  # each rank trains its own stages only
        for index, state in theirs.items():
            modules[index].load_state_dict(state)
    again = copy.deepcopy(modules)
    backup = Backup.take(pipeline.parameters())
    states = [(buffer, buffer.clone()) for stage in pipeline.stages.values() for buffer in stage.module.buffers()]
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.gather("parity", None)
    result = pipeline._run(feed, training=True)
    mine = {name: None if p.grad is None else p.grad.clone() for name, p in pipeline.named_parameters()}
    found = {"loss": result.loss} | {n: g for theirs in pipeline.gather("grads", mine) for n, g in theirs.items()}
    backup.restore()
    for buffer, value in states:
        buffer.copy_(value)
    names = [name for part in parts for name, _ in part.parameters]
    loop = _reference(pipeline, modules, feed, feed.seed)
    batch = _whole(feed, pipeline)
    whole = None if batch is None else _compare("whole batch", found, _named(names, again, _reference(pipeline, again, batch, None)))
    return Parity(_compare("microbatch loop", found, _named(names, modules, loop)), whole)


def _reference(pipeline: Pipeline, modules: nn.ModuleList, feed: Feed, seed: int | None) -> Tensor | None:
    """Forward and backward of the stages one after the other, a microbatch at a time; the loss."""
    modules.zero_grad(set_to_none=True)
    graph = pipeline.table.graph
    total: Tensor | None = None
    side: list[Tensor] = []
    for microbatch, args in enumerate(feed.args):
        made: dict[int, Any] = {}
        with torch.enable_grad(), collect() as extras:
            for stage, module in enumerate(modules):
                inputs = [made[other] for other in sorted(graph.inputs_of(stage), reverse=True)]
                given = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
                if seed is not None:
                    Stage(stage, module).seed(seed, microbatch)
                first = args if not inputs else inputs[0] if isinstance(inputs[0], tuple) else (inputs[0],)
                made[stage] = unwrap(module(*first, *inputs[1:], **given))
            last = made[len(modules) - 1]
            if pipeline.loss_fn is None:
                leaves = [leaf for leaf in pytree.tree_leaves(last) if isinstance(leaf, Tensor) and leaf.requires_grad]
                torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
                continue
            loss = pipeline.loss_fn(last) if feed.targets is None else pipeline.loss_fn(last, feed.targets[microbatch])
            scale = feed.scales[microbatch]
            more = [each * scale for each in extras.losses]
            ends = [each for each in (loss, *more) if each.requires_grad]
            torch.autograd.backward(ends, [torch.full_like(each, scale if each is loss else 1.0) for each in ends])
        total = loss.detach() * scale if total is None else total + loss.detach() * scale
        side += [torch.stack([each.detach() for each in more]).sum()] if more else []
    for each in side:
        total = each if total is None else total + each
    return total


def _whole(feed: Feed, pipeline: Pipeline) -> Feed | None:
    """The microbatches joined into one, where they can be."""
    dim = pipeline._out_dim()
    args = [detached(list(each)) for each in feed.args]
    joined = mb.merge(args, dim) if len(args) > 1 else args[0]
    targets = None if feed.targets is None else mb.merge(feed.targets, dim) if len(feed.targets) > 1 else feed.targets[0]
    kwargs = {stage: [mb.merge(given, dim) if len(given) > 1 else given[0]] for stage, given in feed.kwargs.items()}
    ragged = any(isinstance(leaf, list) for leaf in (joined if isinstance(joined, list) else [joined]))
    if ragged or pipeline.weight is not None:
        return None
    total = 1.0 if pipeline.loss_reduction == "mean" else feed.scales[0]
    return Feed([tuple(joined)], kwargs, None if targets is None else [targets], [total])


def _named(names: list[str], modules: nn.ModuleList, loss: Tensor | None) -> dict[str, Tensor | None]:
    every = [parameter for module in modules for parameter in module.parameters()]
    unique = {id(parameter): parameter for parameter in every}
    assert len(unique) <= len(names)
    of_stage = [p for module in modules for _, p in module.named_parameters(remove_duplicate=False)]
    return {"loss": loss} | {name: parameter.grad for name, parameter in zip(names, of_stage, strict=True)}


def _compare(reference: str, found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> Comparison:
    differences = [d for name in found if (d := _difference(name, found[name], wanted.get(name))) is not None]
    norms = [_norm(each) for each in (found, wanted)]
    if norms[0] is not None and norms[1] is not None and not torch.equal(norms[0], norms[1]):
        differences.append(Difference("norm", abs(float(norms[0] - norms[1])), abs(float(norms[0] / norms[1] - 1))))
    return Comparison(reference, not differences, sorted(differences, key=lambda d: -d.relative))


def _norm(values: dict[str, Tensor | None]) -> Tensor | None:
    grads = [value.double() for name, value in values.items() if name != "loss" and value is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])) if grads else None


def _difference(name: str, found: Tensor | None, wanted: Tensor | None) -> Difference | None:
    if found is None or wanted is None:
        return None if found is wanted else Difference(name, float("inf"), float("inf"))
    if torch.equal(found, wanted):
        return None
    absolute = float((found.double() - wanted.double()).abs().max())
    largest = float(wanted.double().abs().max())
    return Difference(name, absolute, absolute / largest if largest else float("inf"))
