"""LoRA on a Hugging Face model through PEFT: the base is frozen, gradients pass through it to the adapters.

python examples/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.runtime import Pipeline, launch, rank

RANKS = 2
CONFIG = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)
# Adapters in the first layers alone: the second rank has nothing to train, and passes gradients on.
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj", "up_proj"], layers_to_transform=[0, 1])


def train(steps: int = 30) -> tuple[list[float], int]:
    torch.manual_seed(0)  # every rank sees the same model and the same batches
    model = get_peft_model(AutoModelForCausalLM.from_config(CONFIG), LORA)
    pipe = Pipeline(model, schedule="1f1b", microbatches=4)
    trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=1e-2)  # as a group, which may be empty
    losses = []
    for _ in range(steps):
        tokens = (torch.randint(0, 64, (16, 1)) + torch.arange(24)) % 64
        losses.append(float(pipe.step({"input_ids": tokens, "labels": tokens}).loss))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.requires_grad or parameter.grad is None for parameter in pipe.parameters())
    print(f"rank {rank()} trains {sum(parameter.numel() for parameter in trained):,} parameters")
    if rank() == 0:
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    return losses, len(trained)


if __name__ == "__main__":
    launch(train, RANKS)
