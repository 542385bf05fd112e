"""DeepSpeed's pipeline API: its names, our schedules in its engine, and users' own modules and instructions on CPU.

`schedule`, `topology` and `module` have the names of the modules of `deepspeed.runtime.pipe` that are called so; `as_deepspeed` makes
any of our schedules with one stage per rank a `PipeSchedule` class; `prove` and `to_program` take such a class. `PipelineEngine` turns the
streams of all stages into one program and runs it on the runtime's executor; `initialize` explains how to replace a configuration.
Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.compat.deepspeed.configuration import initialize
from penstock.compat.deepspeed.proof import prove, to_program
from penstock.compat.deepspeed.schedule_export import as_deepspeed
from penstock.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

if TYPE_CHECKING:
    from penstock.compat.deepspeed.engine import PipelineEngine
    from penstock.compat.deepspeed.module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
    "as_deepspeed",
    "initialize",
    "prove",
    "to_program",
]

_NEEDS_TORCH = {"PipelineEngine": "engine", "PipelineModule": "module", "LayerSpec": "module", "TiedLayerSpec": "module"}


def __getattr__(name: str) -> Any:
    """Load a name that needs torch."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from penstock.errors import MissingExtraError

        raise MissingExtraError(name, "torch", "torch") from error
