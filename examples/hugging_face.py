"""A Hugging Face model in a plain loop.

python examples/hugging_face.py                              # two virtual ranks in this process
torchrun --nproc-per-node 2 examples/hugging_face.py --gloo  # two processes
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.runtime import Pipeline, launch, rank

RANKS = 2
CONFIG = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count upwards, of different lengths, as a tokenizer and a collator would give them."""
    for _ in range(count):
        tokens = (torch.randint(0, 64, (16, 1)) + torch.arange(24)) % 64
        mask = (torch.arange(24) < torch.randint(8, 25, (16, 1))).long()
        yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def train(steps: int = 30) -> list[float]:
    torch.manual_seed(0)  # every rank sees the same model and the same batches
    model = AutoModelForCausalLM.from_config(CONFIG)
    pipe = Pipeline(model, schedule="zb-h1", microbatches=4)  # cut between its layers; its own loss
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # of this rank's layers
    losses = []
    for batch in batches(steps):
        result = pipe.step(batch)
        pipe.clip_grad_norm_(1.0)  # over all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss))
    if rank() == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    return losses


if __name__ == "__main__":
    launch(train, RANKS, backend="gloo" if "--gloo" in sys.argv else "threads")
