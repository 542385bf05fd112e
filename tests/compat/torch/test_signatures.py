"""Every public name has the parameters of the installed torch's, except for the differences listed here, each with its reason."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from compat.torch.both import MODULES, OURS, TORCH, VERSION

STEP = ("loss_kwargs", "arg_mbs", "kwarg_mbs", "target_mbs", "finalize_gradients")
LOWERING = ("defer_pp_recv", "max_active_stages", "unshard_lookahead", "defer_reduce_grad_wait", "max_outstanding_sends")
_SHAPES = ("loss_fn", "target", "received_grad_meta", "loss_kwargs")

DIFFERENCES: dict[str, tuple[tuple[str, ...], str]] = {
    "Schedule.step": (STEP, "keywords of torch 2.13, 2.14 and 2.15 work on older ones too"),
    "Schedule.eval": (STEP[1:4], "keywords of torch 2.14 work on older ones too"),
    "Schedule.__init__": (LOWERING, "options of torch 2.13 and 2.15 work on older ones too"),
    "Schedule._step_microbatches": (("loss_kwargs",), "torch 2.13 added it; overrides without it are still called"),
    "Schedule._initialize_stage": (("target", "loss_kwargs"), "torch 2.12 and 2.13 added them; overrides without them are still called"),
    "Schedule._initialize_stages": (("target", "loss_kwargs"), "torch 2.12 and 2.13 added them; overrides without them are still called"),
    "Schedule._compute_loss": (("loss_kwargs",), "torch 2.13 added it; overrides without it are still called"),
    "Schedule._maybe_compute_loss": (("loss_kwargs",), "torch 2.13 added it; overrides without it are still called"),
    "Stage._prepare_forward_infra": (("has_backward",), "torch 2.12 added it; overrides without it are still called"),
    "Stage._prepare_backward_infra": (_SHAPES, "torch 2.12 and 2.13 added them; overrides without them are still called"),
    "_add_reduce_grad": (("defer_reduce_grad_wait",), "an option of torch 2.15 works on older ones too"),
    "_add_unshard_reshard": (("unshard_lookahead",), "an option of torch 2.15 works on older ones too"),
    "get_schedule_ops": (("defer_pp_recv",), "an option of torch 2.13 works on older ones too"),
}
"""Parameters that ours has and the installed torch may lack: none with torch 2.15. A method's name begins with the kind of its class."""


def list_public() -> list[tuple[str, str]]:
    """List each public function and class of torch's modules, with its module."""
    found = []
    for module in ("", *MODULES):
        theirs = importlib.import_module(f"{TORCH.name}.{module}".rstrip("."))
        found += [(module, name) for name in sorted(getattr(theirs, "__all__", ())) if callable(getattr(theirs, name))]
    return found


def list_methods(owner: type) -> list[str]:
    """List a class's constructor and public methods."""
    names = [name for name in dir(owner) if not name.startswith("_") or name == "__init__"]
    return sorted(name for name in names if inspect.isfunction(getattr(owner, name)))


def list_differences(name: str) -> tuple[str, ...]:
    """List the parameters that ours may have and torch's may lack."""
    owner, _, method = name.rpartition(".")
    kind = "Schedule" if "Schedule" in owner else "Stage" if "Stage" in owner else ""
    return DIFFERENCES.get(f"{kind}.{method}" if kind else name, ((), ""))[0] if VERSION < (2, 15) else ()


def compare(name: str, mine: Any, theirs: Any) -> None:
    """Compare the parameters of two functions: names, kinds, defaults and, but for keyword-only ones, their order."""
    found, wanted = ([(p.name, p.kind, p.default) for p in inspect.signature(each).parameters.values()] for each in (mine, theirs))
    known = {parameter[0] for parameter in wanted}
    kept = [parameter for parameter in found if parameter[0] in known or parameter[0] not in list_differences(name)]
    for keyword_only in (True, False):
        one, other = ([p for p in each if (p[1] == inspect.Parameter.KEYWORD_ONLY) == keyword_only] for each in (kept, wanted))
        assert (sorted(one, key=str) if keyword_only else one) == (sorted(other, key=str) if keyword_only else other), name


@pytest.mark.parametrize(("module", "name"), list_public())
def test_public_signatures(module: str, name: str) -> None:
    mine, theirs = (getattr(importlib.import_module(f"{package.name}.{module}".rstrip(".")), name) for package in (OURS, TORCH))
    if not inspect.isclass(theirs):
        compare(name, mine, theirs)
        return
    for method in list_methods(theirs):
        compare(f"{name}.{method}", getattr(mine, method), getattr(theirs, method))


@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "1F1B", "GPipe"])
def test_newer_keywords_exist_on_every_torch(name: str) -> None:
    schedule = getattr(OURS.schedules, f"Schedule{name}")
    assert set(STEP) <= set(inspect.signature(schedule.step).parameters)
    assert set(STEP[1:4]) <= set(inspect.signature(schedule.eval).parameters)
    if name not in {"1F1B", "GPipe"}:
        assert set(LOWERING) <= set(inspect.signature(schedule).parameters)
