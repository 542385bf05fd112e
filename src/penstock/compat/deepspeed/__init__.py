"""DeepSpeed's pipeline API: its names, our schedules in its engine, and users' own modules and instructions on CPU.

`schedule`, `topology` and `module` have the names of the modules of `deepspeed.runtime.pipe` that are called so; `as_deepspeed` makes
any of our schedules with one stage per rank a `PipeSchedule` class; `prove` and `to_program` take such a class. `PipelineEngine` turns the
streams of all stages into one program and runs it on the runtime's executor; `initialize` explains how to replace a configuration.
Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.compat.deepspeed.proof import as_deepspeed, prove, to_program
from penstock.compat.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from penstock.errors import MissingExtraError, ScheduleError
from penstock.ir.formats.reading import read_json

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
        raise MissingExtraError(name, "torch", "torch") from error


def initialize(args: Any = None, *_: Any, config: Any = None, config_params: Any = None, **__: Any) -> NoReturn:
    """Refuse what `deepspeed.initialize` takes, with the way to say it here."""
    sources = (config, config_params, getattr(args, "deepspeed_config", None))
    zero = _read_mapping(next((source for source in sources if source is not None), {})).get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(bool(zero))
    if stage:
        raise ScheduleError(
            f"ZeRO (stage {stage}) is not supported: train with penstock.runtime.Pipeline(mesh=..., shard=True), which shards stages over "
            "data ranks"
        )
    raise ScheduleError(
        "initialize() is configured by DeepSpeed's own file, which is not read here: make the engine from the same PipelineModule with "
        "PipelineEngine(module, micro_batches=..., micro_batch_size=..., optimizer=..., lr_scheduler=...)"
    )


def _read_mapping(config: Any) -> Mapping[str, Any]:
    """A configuration as far as it can be read: a mapping, or a file with one."""
    if isinstance(config, Mapping):
        return config
    try:
        content = read_json(config)
    except (OSError, TypeError, ValueError):
        return {}
    return content if isinstance(content, Mapping) else {}
