"""DeepSpeed's configuration, which is not here: `initialize` says what to write in its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from penstock.errors import ScheduleError


def initialize(args: Any = None, *_: Any, config: Any = None, config_params: Any = None, **__: Any) -> NoReturn:
    """Refuse what `deepspeed.initialize` takes, with the way to say it here."""
    given: Any = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None), {})
    zero = _read(given).get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(bool(zero))
    if stage:
        raise ScheduleError(
            f"ZeRO (stage {stage}) is not here: train with penstock.runtime.Pipeline(mesh=..., shard=True), which shards stages over data "
            "ranks"
        )
    raise ScheduleError(
        "initialize() is configured by DeepSpeed's own file, which is not read here: make the engine from the same PipelineModule with "
        "PipelineEngine(module, micro_batches=..., micro_batch_size=..., optimizer=..., lr_scheduler=...)"
    )


def _read(config: Any) -> Mapping[str, Any]:
    """A configuration as far as it can be read: a mapping, or a file with one."""
    if isinstance(config, Mapping):
        return config
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}
