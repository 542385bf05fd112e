"""Small models of transformers' with random weights, and what the whole model gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

from penstock.runtime import Pipeline, launch
from runtime.models import Numbers, assert_same_results, gradients

VOCABULARY, DEPTH = 29, 4
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTERS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def llama(**given: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**COMMON | given))


def qwen(**given: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**COMMON | {"head_dim": 8} | given))


def gpt2(**given: Any) -> GPT2LMHeadModel:
    names = {"n_embd": 16, "n_layer": DEPTH, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**names | quiet | given))


def mixtral(**given: Any) -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**COMMON | ROUTERS | {"num_local_experts": 4} | given))


def qwen_experts(**given: Any) -> Qwen3MoeForCausalLM:
    own = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON | ROUTERS | own | given))


def nanochat(**given: Any) -> NanoChatForCausalLM:
    """One norm without parameters runs before the layers and after them."""
    model = NanoChatForCausalLM(NanoChatConfig(**COMMON | given))
    nn.init.normal_(model.lm_head.weight)
    return model


def modernbert(**given: Any) -> ModernBertDecoderForCausalLM:
    """Its embeddings are called by name, with None for what is not given."""
    names = {"cls_token_id": 1, "sep_token_id": 2}
    return ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**COMMON | names | given))


def opt(**given: Any) -> OPTForCausalLM:
    return OPTForCausalLM(OPTConfig(**COMMON | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "layerdrop": 0.0} | given))


def xglm(**given: Any) -> XGLMForCausalLM:
    """Has its dropout around the layers as a function, by the mode of the module that calls it."""
    names = {"d_model": 16, "ffn_dim": 24, "num_layers": DEPTH, "attention_heads": 2, "vocab_size": VOCABULARY, "layerdrop": 0.0}
    return XGLMForCausalLM(XGLMConfig(**names | {"max_position_embeddings": 32, "pad_token_id": 0} | given))


MODELS: dict[str, Callable[..., Any]] = {"llama": llama, "qwen": qwen, "gpt2": gpt2, "mixtral": mixtral, "qwen experts": qwen_experts}


def batch(rows: int = 6, length: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Sequences of different lengths, padded, with labels that are ignored in the padding."""
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=draws)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=draws)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def by_whole(model: nn.Module, inputs: Mapping[str, Tensor], microbatches: int) -> Numbers:
    """The whole model over the same slices, each weighted by the labels that count in it."""
    model = copy.deepcopy(model)
    pieces = [
        dict(zip(inputs, parts, strict=True)) for parts in zip(*(each.tensor_split(microbatches) for each in inputs.values()), strict=True)
    ]
    counts = [int((piece["labels"][:, 1:] != -100).sum()) for piece in pieces]
    total, losses = torch.zeros(()), []
    for piece, count in zip(pieces, counts, strict=True):
        loss = model(**piece, use_cache=False).loss
        scale = count / sum(counts)
        if scale:
            (loss * scale).backward()
            total = total + loss.detach() * scale
        losses.append(loss.detach())
    return Numbers(total, losses, gradients(model))


def by_stages(model: nn.Module, inputs: Mapping[str, Tensor], schedule: str, microbatches: int, ranks: int = 2, **options: Any) -> Numbers:
    """One step on virtual ranks that share a copy of the model."""
    model = copy.deepcopy(model)
    results = launch(lambda: Pipeline(model, schedule=schedule, microbatches=microbatches, **options).step(inputs), ranks)
    assert_same_results(results)
    return Numbers(results[0].loss, results[0].losses, gradients(model))
