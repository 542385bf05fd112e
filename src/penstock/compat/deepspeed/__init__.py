"""DeepSpeed's pipeline schedules over our parts: its names, our orders in its engine, and people's own instructions on CPU.

`schedule` has the names of `deepspeed.runtime.pipe.schedule`; `as_deepspeed` gives DeepSpeed's engine any of our schedules
with one stage a rank; `prove` and `to_program` take a `PipeSchedule` class; `PipelineEngine`, which needs torch, runs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.compat.deepspeed.orders import as_deepspeed
from penstock.compat.deepspeed.proof import prove, to_program

if TYPE_CHECKING:
    from penstock.compat.deepspeed.engine import PipelineEngine

__all__ = ["PipelineEngine", "as_deepspeed", "prove", "to_program"]


def __getattr__(name: str) -> Any:
    """The engine is loaded when it is asked for, so that schedules need no torch."""
    if name != "PipelineEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from penstock.compat.deepspeed.engine import PipelineEngine
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from penstock.errors import MissingExtraError

        raise MissingExtraError("PipelineEngine", "torch", "torch") from error
    return PipelineEngine
