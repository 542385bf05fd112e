"""Supervised fine-tuning with LoRA in TRL's own trainer, on a pipeline of two processes.

torchrun --nproc-per-node 2 examples/sft_lora.py       # or: python examples/sft_lora.py, which starts the processes itself
"""

from __future__ import annotations

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from penstock.integrations.transformers import PipelineMixin
from penstock.runtime import launch

RANKS = 2


class PipelineSFTTrainer(PipelineMixin, SFTTrainer):
    """TRL's trainer on a pipeline."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, made here so that nothing is downloaded; use `AutoTokenizer.from_pretrained` for a real model."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = ["<pad>", "<end>", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({character: number for number, character in enumerate(characters)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<end>")


def questions(count: int) -> Dataset:
    """Sums, as prompts with their completions."""
    pairs = [(one, other) for one in range(10) for other in range(10)]
    return Dataset.from_list([{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a, b in (pairs * 10)[:count]])


def train(steps: int = 30) -> list[float]:
    torch.manual_seed(0)  # every rank builds the same model
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PipelineSFTTrainer(
            model,
            SFTConfig(
                folder,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                per_device_train_batch_size=8,
                max_steps=steps,
                learning_rate=1e-2,
                logging_steps=10,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=questions(200),
            processing_class=tokenizer(),
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
            plan_or_schedule="zb-h1",
            microbatches=4,
        )
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    losses = launch(train, RANKS, backend="gloo", args=(int(sys.argv[1]) if len(sys.argv) > 1 else 30,))[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
