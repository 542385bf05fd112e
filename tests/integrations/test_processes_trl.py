"""The example of supervised fine-tuning with LoRA, in TRL's trainer on a pipeline and without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.launch.workers import Workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "sft_lora.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("sft_lora", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def fine_tune(piped: bool) -> list[float]:
    """The losses of some steps; without a pipeline, the plain trainer gets the same arguments."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    torch.set_num_threads(1)
    example = load_example()
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
    plain = workers.run(fine_tune, (False,), ranks=1)[0]
    assert len(plain) == 2
    assert plain[1] < plain[0]
    for losses in workers.run(fine_tune, (True,), ranks=2):
        assert losses == pytest.approx(plain, rel=1e-4)


def refusals(folder: str) -> list[str]:
    """What is said about TRL's other trainers, and about an option of its configuration."""
    import trl

    from penstock.errors import IntegrationError
    from penstock.integrations.transformers import PipelineMixin

    messages, example = [], load_example()
    config = example.LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = example.AutoModelForCausalLM.from_config(config)
    tokens = {"processing_class": example.tokenizer(), "train_dataset": example.questions(8)}
    for base in (trl.DPOTrainer, trl.KTOTrainer, trl.RewardTrainer, trl.GRPOTrainer, trl.SFTTrainer):
        kind: Any = type(f"Pipeline{base.__name__}", (PipelineMixin, base), {})
        args = trl.SFTConfig(folder, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, activation_offloading=True)
        try:
            kind(model, args, plan_or_schedule="1f1b", microbatches=2, **tokens)
            messages.append("made")
        except IntegrationError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
def test_trainers_with_other_losses_are_refused(workers: Workers, tmp_path: Path) -> None:
    for messages in workers.run(refusals, (str(tmp_path),), ranks=2):
        for kind, sentence in zip(("DPO", "KTO", "Reward", "GRPO"), messages, strict=False):
            assert f"{kind}Trainer.compute_loss is not run on a pipeline" in sentence
        assert "activation_offloading=True has no meaning on a pipeline" in messages[-1]
