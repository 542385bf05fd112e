"""Compare a step with the unpipelined model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime import microbatch as mb
from penstock.runtime.cells import Feed
from penstock.runtime.extras import collect, unwrap
from penstock.runtime.randomness import draw_from, kept_random_state
from penstock.runtime.stage import Stage

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


CLOSE = 1e-4
"""Of the largest value: what numbers of 32 bits may differ by when they are summed in another order."""


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

    @property
    def close(self) -> bool:
        """Whether everything is equal up to rounding."""
        return self.worst <= CLOSE

    def in_words(self) -> str:
        """How near it is."""
        if self.exact or not self.close:
            return str(self)
        return f"{self.reference}: equal up to rounding, {self.worst:.1e} of the largest value"

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

    @property
    def all(self) -> list[Comparison]:
        return [self.loop] if self.batch is None else [self.loop, self.batch]

    def __str__(self) -> str:
        return "\n".join(map(str, self.all))


def parity(pipeline: Pipeline, feed: Feed) -> Parity:
    """Run a step and both references on copies of the model; gradients, buffers and random streams are put back afterwards.

    The references run the pipeline's own stages one after the other: what they cannot tell is whether the model was cut rightly.
    """
    parts = [part for part in pipeline.partition.parts if part is not None]
    if len(parts) != pipeline.table.stages:
        raise ScheduleError("parity runs the whole model, but this pipeline was made of some of its stages only")
    if pipeline.data.scattered:
        raise ScheduleError("parity runs a copy of the whole model, but of some parameters ranks hold a part only: compare before sharding")
    modules = copy.deepcopy(nn.ModuleList(part.module for part in parts))
    held = {index: stage.module.state_dict() for index, stage in pipeline.stages.items()}
    for theirs in reversed(pipeline.gather("states", held)):  # a rank trains its own stages, and its model's others stay as they were
        for index, state in theirs.items():
            modules[index].load_state_dict(state)
    again = copy.deepcopy(modules)
    found = _stepped(pipeline, feed)
    names = [name for part in parts for name, _ in part.parameters]
    loop = _reference(pipeline, modules, feed)
    compared = _compare("microbatch loop", found, pipeline.data.summed(_named(names, modules, loop)))
    batch = _whole(feed, pipeline)
    if batch is None:
        return Parity(compared, None)
    whole = _reference(pipeline, again, batch)
    return Parity(compared, _compare("whole batch", found, pipeline.data.summed(_named(names, again, whole))))


def _stepped(pipeline: Pipeline, feed: Feed) -> list[dict[str, Tensor | None]]:
    """The loss and the gradients that a step gives on each rank; everything is as before afterwards."""
    parameters = [parameter for _, parameter in pipeline.local_parameters()]
    buffers = [buffer for stage in pipeline.stages.values() for buffer in stage.module.buffers()]
    grads, states, steps = [p.grad for p in parameters], [buffer.clone() for buffer in buffers], pipeline._steps
    pipeline.gather("parity", None)  # nobody clears a gradient that another has yet to set aside
    try:
        for parameter in parameters:
            parameter.grad = None
        loss = pipeline._run(feed, training=True).loss
        mine = {name: None if p.grad is None else p.grad.clone() for name, p in pipeline.local_parameters()}
        return pipeline.gather("gradients", {"loss": loss, **mine})
    finally:
        pipeline._steps = steps
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for buffer, state in zip(buffers, states, strict=True):
            buffer.copy_(state)


def _reference(pipeline: Pipeline, modules: nn.ModuleList, feed: Feed) -> Tensor | None:
    """Forward and backward of the stages one after the other, a microbatch at a time; the loss."""
    modules.zero_grad(set_to_none=True)
    total: Tensor | None = None
    side: list[Tensor] = []
    with kept_random_state(), torch.enable_grad():
        for microbatch, scale in enumerate(feed.scales):
            with collect() as extras:
                output = _forward(pipeline, modules, feed, microbatch)
                loss = pipeline.loss(output, feed.targets, microbatch)
            more = [each * scale for each in extras.losses]
            ends = [each for each in (*([loss] if scale else []), *more) if each.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.full_like(each, scale if each is loss else 1.0) for each in ends])
            if scale:
                total = loss.detach() * scale if total is None else total + loss.detach() * scale
            side += [each.detach() for each in more]
    for each in side:
        total = each if total is None else total + each
    return total


def _forward(pipeline: Pipeline, modules: nn.ModuleList, feed: Feed, microbatch: int) -> Any:
    """The model's output, stage by stage."""
    graph = pipeline.table.graph
    made: dict[int, Any] = {}
    for stage, module in enumerate(modules):
        inputs = [made[other] for other in sorted(graph.inputs_of(stage), reverse=True)]
        given = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
        part = pipeline.partition.parts[stage]
        staged = Stage(stage, module, unpack=part is not None and part.unpack)
        if feed.seed is not None:
            draw_from(feed.seed, staged.stream, microbatch)
        made[stage] = unwrap(staged.run(inputs, given) if inputs else module(*feed.args[microbatch], **given))
    return made[len(modules) - 1]


def _whole(feed: Feed, pipeline: Pipeline) -> Feed | None:
    """The microbatches as the one batch that they were cut from, where they were and the loss is a plain mean or sum over it."""
    if pipeline.batches.weight is not None:
        return None
    batch_dims = pipeline.batches.dims_of(feed.args[0])
    args = mb.unsplit(feed.args, batch_dims)
    targets = (None,) if feed.targets is None else mb.unsplit(feed.targets, pipeline.batches.targets)
    kwargs = {stage: mb.unsplit(given, pipeline.batches.kwargs) for stage, given in feed.kwargs.items()}
    if args is None or targets is None or None in kwargs.values():
        return None
    joined = {stage: [given[0]] for stage, given in kwargs.items() if given is not None}
    alone = pipeline.data.ranks == 1 or feed.weights is None
    return Feed([args[0]], joined, None if feed.targets is None else [targets[0]], [1.0 if alone else sum(feed.scales)])


def _named(names: list[str], modules: nn.ModuleList, loss: Tensor | None) -> dict[str, Tensor | None]:
    of_stage = [p for module in modules for _, p in module.named_parameters(remove_duplicate=False)]
    return {"loss": loss} | {name: parameter.grad for name, parameter in zip(names, of_stage, strict=True)}


def _compare(reference: str, found: list[dict[str, Tensor | None]], wanted: dict[str, Tensor | None]) -> Comparison:
    """Every rank's figures against the reference's; the worst of those that several ranks have."""
    worst: dict[str, Difference] = {}
    for rank in found:
        for name, value in rank.items():
            seen = _difference(name, value, wanted.get(name))
            if seen is not None and (name not in worst or worst[name].relative < seen.relative):
                worst[name] = seen
    together = {name: value for rank in found for name, value in rank.items()}
    norms = [_norm(each) for each in (together, {name: wanted[name] for name in together if name in wanted})]
    norm = _difference("norm", *norms)
    if norm is not None:
        worst["norm"] = norm
    return Comparison(reference, not worst, sorted(worst.values(), key=lambda d: -d.relative))


def _norm(values: dict[str, Tensor | None]) -> Tensor | None:
    grads = [value.double() for name, value in values.items() if name != "loss" and value is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])) if grads else None


def _difference(name: str, found: Tensor | None, wanted: Tensor | None) -> Difference | None:
    if found is None or wanted is None:
        return None if found is wanted else Difference(name, float("inf"), float("inf"))
    if torch.equal(found, wanted):
        return None
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if bool(same.all()):
        return None
    apart = (found.double() - wanted.double()).abs().masked_fill(same, 0.0)
    absolute = float(apart.nan_to_num(nan=float("inf")).max())  # not a number on one side only: as far off as can be
    usual = wanted.double().abs()[wanted.isfinite()]
    largest = float(usual.max()) if len(usual) else 0.0
    return Difference(name, absolute, absolute / largest if largest else float("inf"))
