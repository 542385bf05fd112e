"""Settings of DeepSpeed's configuration that are not supported."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.compat import deepspeed
from penstock.errors import ScheduleError

ZERO: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("given", [{}, {"train_batch_size": 8}, {"zero_optimization": {"stage": 0}}, "no_such_file.json", None])
def test_a_configuration_is_refused_with_the_way_out(given: Any) -> None:
    with pytest.raises(ScheduleError, match=r"PipelineEngine\(module, micro_batches=...") as refused:
        deepspeed.initialize(model=None, config=given)
    assert "\n" not in str(refused.value)
    assert ". " not in str(refused.value)


def test_zero_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(ZERO))
    for call in (
        lambda: deepspeed.initialize(config=ZERO),
        lambda: deepspeed.initialize(config_params=ZERO),
        lambda: deepspeed.initialize(config=file),
        lambda: deepspeed.initialize(SimpleNamespace(deepspeed_config=str(file)), model=None),
        lambda: deepspeed.initialize(config={"zero_optimization": True}),
    ):
        with pytest.raises(ScheduleError, match=r"ZeRO \(stage [12]\) is not supported: train with penstock.runtime.Pipeline"):
            call()
