"""The example of supervised fine-tuning with LoRA, in TRL's trainer on a pipeline and without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.launch.workers import Workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_lora.py"


def fine_tune(path: str, piped: bool) -> list[float]:
    """The losses of some steps; without a pipeline, the plain trainer gets the same arguments."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("sft_lora", path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if not piped:

        def plain(*args: Any, plan_or_schedule: Any, microbatches: int, **kwargs: Any) -> Any:
            return example.SFTTrainer(*args, **kwargs)

        example.PipelineSFTTrainer = plain
    try:
        losses: list[float] = example.train(20)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return losses


@pytest.mark.slow
def test_the_losses_are_those_of_the_plain_trainer(workers: Workers) -> None:
    plain = workers.run(fine_tune, (str(EXAMPLE), False), ranks=1)[0]
    assert len(plain) == 2
    assert plain[1] < plain[0]
    for losses in workers.run(fine_tune, (str(EXAMPLE), True), ranks=2):
        assert losses == pytest.approx(plain, rel=1e-4)
