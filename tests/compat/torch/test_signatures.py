"""Every public name has the parameters of the installed torch's, except for the differences listed here, each with its reason."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from compat.torch.both import MODULES, OURS, TORCH, VERSION

_NEWER = "a keyword of a newer torch, which works on this one too"
_STEP = ("loss_kwargs", "arg_mbs", "kwarg_mbs", "target_mbs", "finalize_gradients")
_LOWERING = ("defer_pp_recv", "max_active_stages", "unshard_lookahead", "defer_reduce_grad_wait", "max_outstanding_sends")
_MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_ALL = ("Single", "Multi", "1F1B", "GPipe", *_MULTI)

MORE: dict[str, tuple[tuple[str, ...], str]] = {
    "*.step": (_STEP, _NEWER),
    "*.eval": (_STEP[1:4], _NEWER),
    "*.__init__": (_LOWERING, _NEWER),
    "get_schedule_ops": (("defer_pp_recv",), "an option of torch 2.13, which works on older ones too"),
    "PipelineStage._prepare_forward_infra": (("has_backward",), "torch 2.12 added it"),
    "PipelineStage._prepare_backward_infra": (("loss_fn", "target", "received_grad_meta", "loss_kwargs"), "torch 2.12 and 2.13 added them"),
}
"""Parameters that ours has and the installed torch may lack."""


def list_public() -> list[tuple[str, str]]:
    """List each public function and class of torch's modules, with its module."""
    found = []
    for module in ("", *MODULES):
        theirs = importlib.import_module(f"{TORCH.name}.{module}".rstrip("."))
        found += [(module, name) for name in sorted(getattr(theirs, "__all__", ())) if callable(getattr(theirs, name))]
    return found


def list_methods(owner: type) -> list[str]:
    return sorted(
        name for name in dir(owner) if inspect.isfunction(getattr(owner, name)) and (not name.startswith("_") or name == "__init__")
    )


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def allowed(name: str) -> tuple[str, ...]:
    owner, _, method = name.rpartition(".")
    general = f"*.{method}" if "Schedule" in owner or method in ("step", "eval") else ""
    return (*MORE.get(name, ((), ""))[0], *MORE.get(general, ((), ""))[0])


def compare(name: str, mine: Any, theirs: Any) -> None:
    found, wanted = parameters(mine), parameters(theirs)
    known = {parameter[0] for parameter in wanted}
    kept = [parameter for parameter in found if parameter[0] in known or parameter[0] not in allowed(name)]
    if VERSION >= (2, 15):
        kept = found  # nothing is newer than the newest
    order_free = sorted(kept, key=lambda p: (p[1], p[0])) == sorted(wanted, key=lambda p: (p[1], p[0]))
    positional = [p for p in kept if p[1] != inspect.Parameter.KEYWORD_ONLY] == [
        p for p in wanted if p[1] != inspect.Parameter.KEYWORD_ONLY
    ]
    assert order_free and positional, (name, found, wanted)


@pytest.mark.parametrize(("module", "name"), list_public())
def test_public_signatures(module: str, name: str) -> None:
    theirs = getattr(importlib.import_module(f"{TORCH.name}.{module}".rstrip(".")), name)
    mine = getattr(importlib.import_module(f"{OURS.name}.{module}".rstrip(".")), name)
    if not inspect.isclass(theirs):
        compare(name, mine, theirs)
        return
    for method in list_methods(theirs):
        compare(f"{name}.{method}", getattr(mine, method), getattr(theirs, method))


def test_every_listed_difference_is_real() -> None:
    """A parameter that the list allows exists in ours."""
    for name in _ALL:
        found = next(
            value for each in (name, f"Schedule{name}", f"PipelineSchedule{name}") if (value := getattr(OURS.schedules, each, None))
        )
        assert set(_STEP) <= set(inspect.signature(found.step).parameters)
        if name in _MULTI:
            assert set(_LOWERING) <= set(inspect.signature(found).parameters)
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        assert set(MORE[f"PipelineStage.{name}"][0]) <= set(inspect.signature(getattr(OURS.stage.PipelineStage, name)).parameters)
