"""The result of a step, the same on every rank, and the losses and metrics that stages compute for it on the side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import PipelineError
from penstock.text.numbers import format_count

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


class StepResult:
    """Loss, losses, metrics and outputs of a step, in the order of microbatches.

    Every rank has the shares of all ranks; each value is built from them on first access.
    """

    def __init__(
        self, shares: Sequence[ResultShare], merge: Callable[[list[Any]], Any], timeline: Callable[[], Timeline] | None = None
    ) -> None:
        self._shares, self._merge, self._timeline = shares, merge, timeline
        self.lost: str | None = None
        """Which ranks are lost and which run their microbatches in this step, in one line; None if all ranks take part."""

    @cached_property
    def loss(self) -> Tensor | None:
        """The loss of the whole batch, side losses included; None if none was computed.

        Summed in the order of microbatches and stages, so that every rank gets the same.
        """
        side = _sort_values({(m, s): v for share in self._shares for (s, m), v in share.side.items()})
        total: Tensor | None = None
        for value in (*(loss * scale for loss, scale in self._weighted if scale), *side):
            total = value if total is None else total + value
        return total

    @cached_property
    def losses(self) -> list[Tensor]:
        """Each microbatch's loss as the loss function returned it."""
        return [loss for loss, _ in self._weighted]

    @property
    def scales(self) -> list[float]:
        """How much each microbatch's loss counts in the loss of the whole batch."""
        return [scale for _, scale in self._weighted]

    @cached_property
    def _weighted(self) -> list[tuple[Tensor, float]]:
        return _sort_values({k: v for share in self._shares for k, v in share.losses.items()})

    @cached_property
    def metrics(self) -> dict[str, list[Tensor]]:
        """Each metric's value for each microbatch that reported it."""
        by_name: dict[str, dict[tuple[int, int], Tensor]] = {}
        for share in self._shares:
            for name, values in share.metrics.items():
                by_name.setdefault(name, {}).update({(m, s): v for (s, m), v in values.items()})
        return {name: _sort_values(by_name[name]) for name in sorted(by_name)}

    @cached_property
    def outputs(self) -> Any:
        """The last stage's outputs, joined along the batch dimension if they can be; None unless the step was given `outputs=True`."""
        outputs = _sort_values({k: v for share in self._shares for k, v in share.outputs.items()} | self._logits)
        return self._merge(outputs) if outputs else None

    @property
    def _logits(self) -> dict[int, Tensor]:
        """The whole logits of each microbatch, if the head is spread over the ranks and they are wanted."""
        first = self._shares[0].logits
        return {number: torch.cat([share.logits[number].to(own.device) for share in self._shares], dim=-1) for number, own in first.items()}

    def __repr__(self) -> str:
        loss = "no loss" if self.loss is None else f"loss {float(self.loss):.6g}"
        parts = [
            f"{format_count(len(self.losses), 'microbatch')}",
            *(["outputs"] if any(share.outputs or share.logits for share in self._shares) else []),
        ]
        parts += [f"metrics {', '.join(self.metrics)}"] if self.metrics else []
        return f"<StepResult {', '.join([loss, *parts, *(['timeline'] if self._timeline is not None else [])])}>"

    @cached_property
    def timeline(self) -> Timeline | None:
        """When each action ran on every rank; None unless the pipeline records."""
        return None if self._timeline is None else self._timeline()


@dataclass(frozen=True)
class RankTimes:
    """How one rank spent a step, in nanoseconds; moments are on its own clock."""

    machine: int
    """Tells machines apart, because the ranks of one share a clock."""
    common: int
    """A moment that is nearly the same on all ranks: when this one left the last exchange between all of them."""
    first: int
    """When the rank began its first compute action, after waiting for its input; 0 if it has none."""
    last: int
    """When its last compute action ended."""
    interval: int
    """The time since the same point of the last step."""
    forward: int
    backward: int
    overlapped: int
    waits: dict[int, int]
    """How long the rank waited for messages, by the rank that sent them."""
    tokens: float | None
    """The sum of the microbatches' weights, if the pipeline was given a function for them and this rank a target."""


@dataclass
class ResultShare:
    """One rank's part of the result: values by microbatch."""

    microbatches: int = 0
    losses: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """Each loss and its scale."""
    side: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weighted side losses by stage and microbatch."""
    metrics: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    """The logits of the rank's rows of a head that is spread over the ranks."""
    wants_logits: bool | None = None
    """Whether the rank keeps them; None if the head is not spread."""
    sizes: tuple[tuple[int, int], ...] | None = None
    """The sizes of the microbatches, each with how many in a row have it; None if this rank was given no batch."""
    call: int = 0
    """How many batches the rank has been given, this one included."""
    records: bool = False
    finalizes: bool = True
    """Whether the step sums its gradients over the ranks, and those of earlier steps that did not."""
    whole: dict[int, str] = field(default_factory=dict)
    """The rank's stages whose backward cannot be split, each with the reason, as far as forwards have shown."""
    times: RankTimes | None = None
    """How the rank spent the step; None unless the pipeline has an `on_step` callback."""
    order: tuple[int, ...] = ()
    """The caller's number of each microbatch if they ran in another order."""
    slices: int = 1
    """How many slices microbatches are cut into: side losses and metrics are those of slices then."""
    schedule: str = ""
    """Identifies the schedule of the step, if it is not the pipeline's own."""

    def restore_order(self) -> None:
        """Number everything as the caller does."""
        order = self.order
        if order:
            self.losses = {order[m]: value for m, value in self.losses.items()}
            units = [microbatch * self.slices + part for microbatch in order for part in range(self.slices)]
            self.side = {(stage, units[m]): value for (stage, m), value in self.side.items()}
            self.metrics = {
                name: {(stage, units[m]): value for (stage, m), value in values.items()} for name, values in self.metrics.items()
            }
            self.outputs = {order[m]: value for m, value in self.outputs.items()}
            self.logits = {order[m]: value for m, value in self.logits.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Stack the losses and metrics of one dtype and shape, because one tensor is quicker to send than many."""
        values = [
            *(loss for loss, _ in self.losses.values()),
            *self.side.values(),
            *(value for values in self.metrics.values() for value in values.values()),
        ]
        state = dict(self.__dict__)
        state["losses"] = {number: scale for number, (_, scale) in self.losses.items()}
        state["side"], state["metrics"] = list(self.side), {name: list(values) for name, values in self.metrics.items()}
        return {**state, "values": _stack(values)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = iter(_unstack(state.pop("values")))
        state["losses"] = {number: (next(values), scale) for number, scale in state["losses"].items()}
        state["side"] = {place: next(values) for place in state["side"]}
        state["metrics"] = {name: {place: next(values) for place in places} for name, places in state["metrics"].items()}
        self.__dict__.update(state)


_Stacks = list[tuple[list[int], Tensor]]
"""Tensors in stacks, each with the places of its tensors among all."""


def _stack(tensors: Sequence[Tensor]) -> _Stacks:
    """One stack per dtype, shape and device."""
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.shape, tensor.device), []).append(place)
    return [(alike, torch.stack([tensors[place] for place in alike])) for alike in places.values()]


def _unstack(stacks: _Stacks) -> list[Tensor]:
    by_place = {place: tensor for places, stack in stacks for place, tensor in zip(places, stack.unbind(), strict=True)}
    return _sort_values(by_place)


def _describe_sizes(sizes: tuple[tuple[int, int], ...]) -> str:
    return "was given microbatches of " + ", ".join(f"{size} ({count} times)" if count > 1 else str(size) for size, count in sizes)


_SAME: dict[str, tuple[Callable[[Any], str], str]] = {
    "call": (
        "is at batch {} of this pipeline".format,
        "a call has failed or was left out on some ranks, so go back to the last checkpoint, with a new pipeline on all ranks",
    ),
    "microbatches": ("ran {} microbatches".format, "give all ranks the same number"),
    "records": (lambda records: "records" if records else "does not record", "set `record` to the same value on all ranks"),
    "finalizes": (
        lambda finalizes: "finalizes its gradients" if finalizes else "does not finalize its gradients",
        "give `finalize_gradients` the same value on all ranks",
    ),
    "wants_logits": (
        lambda wants: "returns outputs" if wants else "does not return outputs",
        "each has a share of the head, so give `outputs` the same value on all ranks",
    ),
    "sizes": (_describe_sizes, "give all ranks the same batch, or none to those that need none"),
    "schedule": (
        lambda schedule: f"ran the schedule {schedule}" if schedule else "ran the pipeline's own schedule",
        "give all ranks the same `order`",
    ),
    "order": (
        lambda order: f"ran its microbatches in the order {list(order)}" if order else "ran its microbatches in the order of the batch",
        "give all ranks the same `order`",
    ),
}
"""The fields of a share that must be the same on all ranks, how to describe them, and what to do if they differ."""


def check_same_step(shares: list[ResultShare], called: Callable[[int], str]) -> list[ResultShare]:
    """Return the shares of all ranks; refuse a step that was not the same on all."""
    for name, (describe, advice) in _SAME.items():
        known = [(rank, value) for rank, share in enumerate(shares) if (value := getattr(share, name)) is not None]
        for rank, value in known:
            if value != known[0][1]:
                first, expected = known[0]
                raise PipelineError(f"{called(first)} {describe(expected)}, but {called(rank)} {describe(value)}: {advice}")
    return shares


def _sort_values(values: dict[Any, Any]) -> list[Any]:
    return [values[key] for key in sorted(values)]


# Side outputs ---------------------------------------------------------------------------------------------------------


@dataclass
class SideOutputs:
    """The side losses and metrics of one forward of one stage."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """A return value of a stage: its output with a side loss (a router's balance, for example) and metrics."""

    value: Any
    side_loss: Tensor | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


class _Collecting(threading.local):
    target: SideOutputs | None = None


_collecting = _Collecting()


def add_loss(loss: Tensor) -> None:
    """Add to the loss from anywhere inside a forward, weighted as the microbatch is. Does nothing outside a pipeline."""
    if _collecting.target is not None:
        _collecting.target.losses.append(loss)


def add_metric(name: str, value: Tensor | float) -> None:
    """Report a metric of this microbatch from anywhere inside a forward. Does nothing outside a pipeline."""
    if _collecting.target is not None:
        _collecting.target.metrics[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(value)


class collect:  # noqa: N801 - used like a function
    """Collect the side outputs of forwards: `with collect() as side: model(x)`."""

    def __enter__(self) -> SideOutputs:
        self.before, _collecting.target = _collecting.target, SideOutputs()
        return _collecting.target

    def __exit__(self, *exc: object) -> None:
        _collecting.target = self.before


def unwrap_stage_output(output: Any) -> Any:
    """Return a stage's plain output; the side outputs of a `StageOutput` are collected."""
    if not isinstance(output, StageOutput):
        return output
    if output.side_loss is not None:
        add_loss(output.side_loss)
    for name, value in output.metrics.items():
        add_metric(name, value)
    return output.value
