"""Numbers on a GPU: every schedule against the unpipelined model, and actions that run together."""

from __future__ import annotations

import copy
from typing import Any

import torch
from benchmarks.gpu_models import blocks as transformer
from benchmarks.gpu_models import mean_loss
from benchmarks.gpu_time import step_seconds
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, launch
from penstock.runtime.measure.parity import Parity
from penstock.schedules.registry import algorithms
from penstock.testing import check_schedule
from runtime.models import blocks, sums_in_order

MICROBATCHES, BATCH, WIDTH = 5, 13, 16


def conformance(device: Any, small: bool) -> dict[str, Any]:
    names = [name for name, each in algorithms().items() if not each.is_sliced]
    rows = [row for name in (names[:4] if small else names) for row in _of(name, device, (2,) if small else (1, 2, 4))]
    bad = [f"{row['schedule']} on {row['ranks']}" for row in rows if row["good"] != "yes"]
    what = (
        f"Every training schedule with {MICROBATCHES} microbatches of a batch of {BATCH}: the checks of `penstock.testing`; a "
        "float32 step against the microbatch loop, to the last bit if weight gradients are summed in order, else to 1e-5; a float64 "
        f"step against the whole batch, to 1e-12. {len(rows)} cases, {len(bad)} bad{': ' if bad else ''}{', '.join(bad)}."
    )
    return {"what": what, "rows": rows}


def _of(name: str, device: Any, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for ranks in counts:
        try:
            schedule = ps.schedule(name, ranks=ranks, microbatches=MICROBATCHES)
        except ScheduleError:
            continue
        if schedule.training:
            check_schedule(schedule)
            rows.append(_row(name, schedule, device))
    return rows


def _row(name: str, schedule: ps.Schedule, device: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    single, double = (_parity(schedule, dtype, device) for dtype in (torch.float32, torch.float64))
    ordered, whole = sums_in_order(schedule), double.batch
    assert whole is not None
    good = (single.loop.exact if ordered else single.loop.worst <= 1e-5) and whole.worst <= 1e-12
    loop = "equal" if single.loop.exact else single.loop.worst
    row = {"schedule": name, "ranks": schedule.ranks, "sums in order": "yes" if ordered else "no", "float32 loop": loop}
    return row | {"float64 batch": whole.worst, "good": "yes" if good else "NO"}


def _parity(schedule: ps.Schedule, dtype: torch.dtype, device: Any) -> Parity:
    model = blocks(schedule.stages + 1, WIDTH, dtype).to(device)
    x, y = (torch.randn(BATCH, WIDTH, dtype=dtype, device=device) for _ in range(2))

    def check() -> Parity:  # each rank has a model of its own, as on devices of their own
        return Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss).parity(x, target=y)

    return launch(check, schedule.ranks)[0]  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """A stage with a hook of its own, which runs the backward before the forward."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made

    def overlapped_forward_backward(self, inputs: tuple[Tensor, ...], kwargs: dict[str, Any], backward: Any) -> Tensor:
        backward()
        made: Tensor = self(*inputs, **kwargs)
        return made


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one after the other": (False, {}),
    "two streams": (False, {"overlap": "streams"}),
    "a hook of the model's, backward first": (True, {}),
    "graphs, one after the other": (False, {"graphs": True}),
    "graphs, two streams": (False, {"graphs": True, "overlap": "streams"}),
}
"""Whether the stages have a hook, and the pipeline's options."""


def overlap(device: Any, small: bool) -> dict[str, Any]:
    width, tokens, deep = (32, 8, 1) if small else (512, 256, 4)
    rows = []
    for name, ranks in (("dualpipe-v", 1), ("dualpipe-v", 2)):
        schedule = ps.schedule(name, ranks=ranks, microbatches=8)
        x = torch.randn(8, tokens, width, device=device, dtype=torch.bfloat16)
        plain: list[Tensor] | None = None
        for way, (hook, options) in WAYS.items():
            modules: list[nn.Module] = [transformer(deep, width, device) for _ in range(schedule.stages)]
            modules = [Hooked(module) for module in modules] if hook else modules
            found = _gradients(schedule, modules, x, options)
            plain = plain or found
            same = all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
            taken = step_seconds(schedule, modules, x, mean_loss, 2 if small else 7, **options)
            row = {"schedule": name, "ranks": ranks, "way": way, "step ms": taken * 1e3}
            rows.append(row | {"same to the last bit": "yes" if same else "NO"})
    what = f"OVERLAP_F_B of {deep} bf16 blocks of {width} a stage, 8 microbatches of {tokens} tokens, all ranks on one GPU."
    return {"what": what, "rows": rows}


def _gradients(schedule: ps.Schedule, modules: list[nn.Module], x: Tensor, options: dict[str, Any]) -> list[Tensor]:
    launch(lambda: Pipeline(modules, schedule, loss_fn=mean_loss, **options).step(x, target=x), schedule.ranks)
    found = [p.grad.clone() for module in modules for p in module.parameters() if p.grad is not None]
    for module in modules:
        module.zero_grad()
    return found
