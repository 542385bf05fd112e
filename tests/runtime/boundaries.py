"""What stages pass to each other, case by case: equal to the unpipelined model or refused with a reason, on every transport."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PenstockError
from penstock.ir.graph import StageGraph
from penstock.ir.schedule import Schedule
from penstock.runtime import Pipeline
from penstock.schedules.registry import schedule as named
from runtime.distributed import Stage

Body = Callable[..., Any]
MICROBATCHES, STEPS = 3, 2


class Bag:
    """A plain object."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@dataclass
class Pair:
    """A dataclass that is not registered."""

    x: Tensor
    note: str = "pair"


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Tagged(Tensor):
    """A tensor subclass."""


def tag(tensor: Any, value: Any = 1) -> Any:
    tensor.tag = value
    return tensor


@dataclass(frozen=True)
class Case:
    """Stages of linear maps with one body per stage, and the expected result of a step: equal (None), or a refusal."""

    bodies: tuple[Body, ...]
    refused: str | None = None
    skips: tuple[tuple[int, int], ...] = ()
    buffers: dict[int, int] = field(default_factory=dict)
    """The size of a buffer `table` that a stage has."""


def forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(linear(x))


def _same_twice(linear: nn.Linear, x: Tensor) -> Any:
    h = linear(x)
    return h, h


def _same_twice_in_dict(linear: nn.Linear, x: Tensor) -> Any:
    h = linear(x)
    return {"a": h, "b": [h]}


def _change_one(linear: nn.Linear, a: Tensor, b: Tensor) -> Tensor:
    a = a.mul_(2)
    return linear(a + b)


def _view(linear: nn.Linear, x: Tensor) -> Any:
    h = linear(x)
    return h, h[:, :3]


def _detached(linear: nn.Linear, x: Tensor) -> Any:
    h = linear(x)
    return h, h.detach()


def _change_second(linear: nn.Linear, a: Tensor, b: Tensor) -> Tensor:
    b.add_(1)
    return linear(a) + b.sum()


def _chunks(linear: nn.Linear, x: Tensor) -> Any:
    h = linear(x)
    return h[:, :3], h[:, 3:]


def _with_mask(linear: nn.Linear, x: Tensor) -> Any:
    return linear(x), (x > 0).float()


def _change_mask(linear: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
    mask.mul_(0.5)
    return linear(x) * mask


def _join_mask(linear: nn.Linear, x: Tensor, given: Any) -> Tensor:
    return linear(x) + given[0] * given[1]


def _table(linear: Any, x: Tensor) -> Any:
    return linear(x), linear.table


CASES: dict[str, Case] = {
    # Objects that hide a tensor.
    "plain object": Case((lambda m, x: Bag(m(x)), lambda m, bag: m(bag.x)), "Bag that holds a tensor but is not a pytree"),
    "dataclass": Case((lambda m, x: Pair(m(x)), lambda m, pair: m(pair.x)), "Pair that holds a tensor but is not a pytree"),
    "UserDict": Case((lambda m, x: UserDict(x=m(x)), lambda m, d: m(d["x"])), "UserDict that holds a tensor but is not a pytree"),
    "slots": Case((lambda m, x: (m(x), Slotted(x)), lambda m, x, s: m(x + s.x)), "Slotted that holds a tensor"),
    "closure": Case((lambda m, x: (m(x), lambda y: y + x), lambda m, x, f: m(f(x))), "function that holds a tensor"),
    "set": Case((lambda m, x: (m(x), {x}), lambda m, x, s: m(x + next(iter(s)))), "set that holds a tensor"),
    "object without tensors": Case((lambda m, x: (m(x), {1, 2}, np.ones(2)), lambda m, x, s, a: m(x) * len(s) * float(a.sum()))),
    # Tensors that are more than their numbers.
    "subclass": Case((lambda m, x: m(x).as_subclass(Tagged), lambda m, x: m(x)), "tensor of the class Tagged"),
    "attribute": Case((lambda m, x: tag(m(x)), lambda m, x: m(x)), "tensor with the attribute 'tag'"),
    "attribute in a tree": Case((lambda m, x: {"h": m(x), "x": tag(x * 1)}, lambda m, d: m(d["h"])), "tensor with the attribute 'tag'"),
    "sparse": Case((lambda m, x: m(x).to_sparse(), lambda m, x: m(x.to_dense())), "tensor of the layout torch.sparse_coo"),
    "nested": Case((lambda m, x: torch.nested.nested_tensor([*m(x)], layout=torch.jagged), lambda m, x: m(x.values())), "a nested tensor"),
    "parameter": Case((lambda m, x: (m(x), m.weight), lambda m, x, w: functional.linear(m(x), w))),
    # Tensors that share memory.
    "same twice, changed in place": Case((_same_twice, _change_one)),
    "same twice in a dict": Case((_same_twice_in_dict, lambda m, d: m(d["a"].mul_(3) + d["b"][0] * 2))),
    "view, base changed": Case((_view, lambda m, h, v: m(h.mul_(2)) + v.sum()), "shares memory with another tensor"),
    "view, view changed": Case((_view, lambda m, h, v: m(h) + v.mul_(2).sum()), "shares memory with another tensor"),
    "view, nothing changed": Case((_view, lambda m, h, v: m(h) + v.amax())),
    "detached view changed": Case((_detached, _change_second), "shares memory with another tensor"),
    "chunks, one changed": Case((_chunks, lambda m, a, b: m(torch.cat([a.mul_(2), b], 1)))),
    # Values that several stages read.
    "mask changed by one of two readers": Case((_with_mask, _change_mask, _join_mask), "stage 2 reads the same value", ((0, 2),)),
    "value changed by one of two readers": Case(
        (forward, lambda m, x: m(x.mul_(2)), lambda m, x, y: m(x) + y), "stage 2 reads the same value", ((0, 2),)
    ),
    "value of two readers, passed on and changed later": Case(
        (lambda m, x: m(x), lambda m, x: x, lambda m, x: m(x.mul_(2)), lambda m, x, y: m(x) + y), "stage 3 reads too", ((0, 3),)
    ),
    "value of two readers": Case((_with_mask, lambda m, x, mask: m(x) * mask, _join_mask), skips=((0, 2),)),
    "mask changed by its only reader": Case((_with_mask, lambda m, x, mask: m(x) * mask.mul_(0.5))),
    # A stage's own memory.
    "buffer changed by its reader": Case(
        (_table, lambda m, x, t: m(x) * t.add_(1)), "changes buffer 'map.table' of stage 0 in place", buffers={0: 6}
    ),
    "buffer passed on and changed later": Case(
        (_table, lambda m, x, t: (m(x), t), lambda m, x, t: m(x) * t.add_(1)),
        "changes buffer 'map.table' of stage 0 in place",
        buffers={0: 6},
    ),
    "buffer read": Case((_table, lambda m, x, t: m(x) * t), buffers={0: 6}),
    "detached weight changed by its reader": Case(
        (lambda m, x: (m(x), m.bias.detach()), lambda m, x, b: m(x) * b.add_(1)), "changes parameter 'map.bias' of stage 0 in place"
    ),
    # What a stage does to its inputs.
    "requires_grad_ on one of two inputs": Case((_with_mask, lambda m, x, mask: m(x) * mask.requires_grad_())),
    "detach_ on one of two inputs": Case((lambda m, x: (m(x), m(x) * 2), lambda m, x, y: m(x) + y.detach_())),
    "batch passed on and changed": Case((lambda m, x: (m(x * 1), x), lambda m, h, x: m(h) + x.mul_(2))),
}


def stages_of(case: Case) -> nn.ModuleList:
    torch.manual_seed(5)
    stages = nn.ModuleList(Stage(body) for body in case.bodies)
    for stage, size in case.buffers.items():
        stages[stage].map.register_buffer("table", torch.ones(size))
    return stages


def schedule_of(case: Case, name: str) -> Schedule:
    """On as many ranks as stages, or on half as many for placements with two stages per rank."""
    count = len(case.bodies)
    graph = StageGraph.chain(count, case.skips) if case.skips else None
    ranks = count if name in ("1f1b", "zb-h1") else 1
    return named(name, ranks, MICROBATCHES, graph=graph, **({} if ranks == count else {"chunks": count}))


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(6)
    return torch.randn(7, 6), torch.randn(7, 6)


def loop(case: Case) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The losses of the last step and all gradients of the same stages called one after the other."""
    stages, graph = stages_of(case), schedule_of(case, "1f1b").graph
    x, y = data()
    losses = []
    for _ in range(STEPS):
        losses = []
        for piece, yy in zip(x.clone().tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            xx = piece.detach()  # a stage may change it in place, unlike a slice
            made: dict[int, Any] = {}
            for number, stage in enumerate(stages):
                inputs = [made[other] for other in sorted(graph.inputs_of(number), reverse=True)] or [xx]
                first = inputs[0] if type(inputs[0]) is tuple else (inputs[0],)
                made[number] = stage(*first, *inputs[1:])
            loss = functional.mse_loss(made[len(stages) - 1], yy)
            (loss * (len(xx) / len(x))).backward()
            losses.append(loss.detach())
    return losses, {name: parameter.grad for name, parameter in stages.named_parameters()}


Found = tuple[str | None, list[Tensor], dict[str, Tensor | None], bool]


def step(case: Case, name: str, stages: nn.ModuleList | None = None, recompute: bool = False, device: str = "cpu", **options: Any) -> Found:
    """The refusal, if any; the losses, this rank's gradients, and whether buffers are as they were."""
    stages = stages_of(case).to(device) if stages is None else stages
    before = copy.deepcopy(stages.state_dict())
    x, y = (each.to(device) for each in data())
    pipe = Pipeline(stages, schedule_of(case, name), loss_fn=functional.mse_loss, deadline=30.0, recompute=recompute, **options)
    try:
        for _ in range(STEPS):
            result = pipe.step(x, target=y)
    except PenstockError as error:
        kept = all(torch.equal(value, before[key]) for key, value in stages.state_dict().items())
        return str(error), [], {}, kept
    grads = {key: None if parameter.grad is None else parameter.grad.cpu() for key, parameter in pipe.local_parameters()}
    return None, [loss.cpu() for loss in result.losses], grads, True


def assert_case(case: Case, found: list[Any], exact: bool = True) -> None:
    """What each rank found, against the loop or the refusal."""
    if case.refused is not None:
        for refusal, _, _, kept in found:
            assert refusal is not None, "nothing was refused"
            assert case.refused in refusal, refusal
            assert kept
        return
    losses, wanted = loop(case)
    assert [refusal for refusal, *_ in found] == [None] * len(found)
    grads: dict[str, Tensor | None] = {}
    for _, theirs, local, _ in found:
        for mine, other in zip(theirs, losses, strict=True):
            torch.testing.assert_close(mine, other, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)
        grads |= local
    assert sorted(grads) == sorted(wanted)
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-6 if exact else 1e-3, atol=1e-7 if exact else 1e-5, msg=key)
