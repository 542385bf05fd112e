"""Many of transformers' models, each built small: cut and run as the whole model, whatever their forwards do around their layers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.tiny import COMMON, batch, by_stages, by_whole
from runtime.models import assert_close

SMALL = COMMON | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "sliding_window": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
QUIET = (
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "embd_pdrop", "embed_dropout"),
    *("hidden_dropout", "hidden_dropout_prob", "input_jitter_noise", "layerdrop", "resid_dropout", "resid_pdrop", "residual_dropout"),
    "router_jitter_noise",
)
DENSE = [
    *("biogpt", "bloom", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_neo", "gpt_neox", "gptj", "granite"),
    *("mamba", "mistral", "modernbert-decoder", "mpt", "nanochat", "olmo2", "opt", "phi", "phi3", "qwen2", "smollm3", "stablelm"),
    *("starcoder2", "xglm"),
]
EXPERTS = ["gpt_oss", "granitemoe", "minimax", "olmoe", "phimoe", "qwen2_moe"]


def small(kind: str) -> Any:
    config = AutoConfig.for_model(kind)
    known = {*inspect.signature(type(config).__init__).parameters, *vars(config), *type(config).attribute_map}
    made = type(config)(**{name: value for name, value in (SMALL | dict.fromkeys(QUIET, 0.0)).items() if name in known}, **special(kind))
    if hasattr(made, "output_router_logits"):
        made.output_router_logits = True
    return AutoModelForCausalLM.from_config(made).train()


def special(kind: str) -> dict[str, Any]:
    return {"attention_types": [[["global", "local"], 2]]} if kind == "gpt_neo" else {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # about configurations as small as these
@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_it_is_cut_and_runs_as_the_whole_model(kind):
    model, inputs = small(kind), batch(rows=4, length=9)
    found, wanted = by_stages(model, inputs, "zbv", 2), by_whole(model, inputs, 2)
    assert_close(found, wanted, 1e-5)
    assert torch.isfinite(wanted.norm)
