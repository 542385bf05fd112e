"""Models of transformers' on slices of their sequences: the loss and every gradient of the whole model, without a change to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import penstock as ps
from models.tiny import COMMON, ROUTERS, VOCABULARY, gpt2, llama, mixtral, qwen, qwen_experts
from penstock.errors import PenstockError, PlacementError
from penstock.ir.kind import Kind
from penstock.runtime import HuggingFace, Pipeline, launch
from penstock.runtime.model.hugging_face.slices import DOCUMENTS, SliceInputs
from runtime.sequences import assert_within

TOKENS = 13
EXACT, ROUNDING = 1e-12, 1e-5


def mistral(**given: Any) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**COMMON | {"sliding_window": 4} | given))


def gemma(**given: Any) -> GemmaForCausalLM:
    return GemmaForCausalLM(GemmaConfig(**COMMON | {"head_dim": 8} | given))


def gemma2(**given: Any) -> Gemma2ForCausalLM:
    """Layers with a sliding window and without, in turn, and scores with a cap, so that attention is eager."""
    return Gemma2ForCausalLM(Gemma2Config(**COMMON | {"head_dim": 8, "sliding_window": 4} | given))


def gemma3(**given: Any) -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON | {"head_dim": 8, "sliding_window": 4, "layer_types": LAYERS} | given))


def deepseek(**given: Any) -> DeepseekV3ForCausalLM:
    """Multi-head latent attention, whose cache holds the expanded keys, and experts from the second layer on."""
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**COMMON | ranks | experts | {"num_experts_per_tok": 2, "moe_intermediate_size": 12} | given)
    )


def gpt_oss(**given: Any) -> GptOssForCausalLM:
    """A sink in every head, and layers with a sliding window and without, in turn."""
    rope = {"rope_type": "default", "rope_theta": 100.0}
    own = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4, "layer_types": LAYERS, "rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**COMMON | ROUTERS | own | given))


def gpt_neox(**given: Any) -> GPTNeoXForCausalLM:
    names = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**names | given))


def scaled(kind: str, **given: Any) -> Callable[[], nn.Module]:
    """A Llama whose rotary table is scaled in some way, for sequences beyond what it was made for."""
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 100.0, **given}
    longest = {"max_position_embeddings": 8} if kind == "dynamic" else {}
    return lambda: llama(rope_parameters=rope, **longest)


LAYERS = ["sliding_attention", "full_attention"] * 2
MADE_FOR = {"original_max_position_embeddings": 8}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen3": qwen,
    "mistral": mistral,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "mixtral": mixtral,
    "gpt2": gpt2,
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "deepseek-v3": deepseek,
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON)),
    "qwen3-moe": qwen_experts,
    "gpt-oss": gpt_oss,
    "phi-3": lambda: Phi3ForCausalLM(Phi3Config(**COMMON)),
    "olmo-2": lambda: Olmo2ForCausalLM(Olmo2Config(**COMMON)),
    "gpt-neox": gpt_neox,
}
SCALED = {
    "linear": scaled("linear"),
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn", **MADE_FOR),
    "llama3": scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **MADE_FOR),
    "longrope": scaled("longrope", short_factor=[1.0] * 4, long_factor=[2.0, 3.0, 4.0, 5.0], **MADE_FOR),
}


def batches() -> dict[str, dict[str, Tensor]]:
    """Tokens alone, with padding on both sides, and with documents packed into rows."""
    tokens = torch.randint(3, VOCABULARY, (4, TOKENS))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, :5], labels[1, 9:], labels[2, 3:7] = -100, -100, -100
    mask[1, 9:], mask[0, :2] = 0, 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1]] * 2 + [[0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] * 2)
    plain = {"input_ids": tokens, "labels": labels}
    return {"plain": plain, "padded": plain | {"attention_mask": mask}, "packed": plain | {"position_ids": positions}}


def by_whole(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, nn.Module]:
    """Two microbatches by transformers itself, weighted by their labels."""
    model = copy.deepcopy(model)
    counts = [(labels[:, 1:] != -100).sum() for labels in batch["labels"].split(2)]
    total = 0.0
    for k, count in enumerate(counts):
        loss = model(**{name: value[2 * k : 2 * k + 2] for name, value in batch.items()}, use_cache=False).loss * count / sum(counts)
        loss.backward()
        total += float(loss.detach())
    return total, model


def by_slices(
    model: nn.Module, batch: Any, slices: int, name: str = "seq-zb-h1", target: Tensor | None = None, **options: Any
) -> tuple[float, nn.Module]:
    model, schedule = copy.deepcopy(model), ps.schedule(name, ranks=2, microbatches=2, slices=slices)

    def train() -> float:
        result = Pipeline(model, schedule, **options).step(batch, **({} if target is None else {"target": target}))
        return float(result.loss)  # type: ignore[arg-type]

    return launch(train, 2)[0], model


def check(make: Callable[[], nn.Module], batch: dict[str, Tensor], slices: int, **options: Any) -> None:
    model = make().train()
    compare(model, batch, by_whole(model, batch), slices, **options)


def compare(model: nn.Module, batch: dict[str, Tensor], whole: tuple[float, nn.Module], slices: int, **options: Any) -> None:
    """A step on slices has the loss and the gradients of the whole model."""
    loss, expected = whole
    total, sliced = by_slices(model, batch, slices, **options)
    assert total == pytest.approx(loss, rel=ROUNDING)
    assert_within(sliced, expected, ROUNDING)


UNEQUAL = {2: [1, 12], 3: [2, 8, 3], 4: [6, 1, 1, 5], 7: [1, 2, 3, 1, 4, 1, 1]}
"""Lengths of slices, by their number."""


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, kind: str) -> None:
    check(FAMILIES[name], batches()[kind], slices=3)


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_and_lengths_of_slices(name: str) -> None:
    model, batch = FAMILIES[name]().train(), batches()["padded"]
    whole = by_whole(model, batch)
    for slices in (1, 2, 4, 7):
        compare(model, batch, whole, slices)
    for slices in (3, 7):
        compare(model, batch, whole, slices, slice_lengths=UNEQUAL[slices])


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    for kind in ("padded", "packed") if name != "gpt-oss" else ("plain", "padded"):
        check(OTHERS[name], batches()[kind], 3, slice_lengths=UNEQUAL[3])


def test_packed_documents_of_models_that_mix_them_are_refused() -> None:
    """Transformers does not give the masks of some models the positions, so their documents see each other in whole sequences."""
    batch = batches()["packed"]
    with pytest.raises(PenstockError, match="GptOssForCausalLM lets tokens see earlier documents: give an attention_mask of four"):
        by_slices(gpt_oss(), batch, 2)
    documents = (batch["position_ids"] == 0).cumsum(-1)
    apart = (documents[:, :, None] == documents[:, None, :]) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    options = {"layer_types": ["full_attention"] * 4, "output_router_logits": False}
    check(lambda: gpt_oss(**options), batch | {"attention_mask": as_bias(apart)}, 3)


def as_bias(mask: Tensor) -> Tensor:
    """A mask of four dimensions as eager attention adds it."""
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min).unsqueeze(1)


@pytest.mark.parametrize("name", SCALED)
def test_rotary_scaling(name: str) -> None:
    """Also tables that depend on the length of the sequence, which a slice does not have."""
    for kind in ("plain", "packed"):
        check(SCALED[name], batches()[kind], slices=3)


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "gpt2"])
def test_unequal_lengths_and_recomputation(name: str) -> None:
    check(FAMILIES[name], batches()["packed"], 3, slice_lengths=[7, 5, 1], recompute=True)
    if name in ("llama", "gpt2"):
        units = len(HuggingFace().units(FAMILIES[name]()))
        flags = [0 < unit < units - 1 and unit % 2 == 1 for unit in range(units)]
        check(FAMILIES[name], batches()["packed"], 3, slice_lengths=[7, 5, 1], recompute=flags)


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral"])
def test_moves_to_the_host(name: str) -> None:
    """The same numbers to the last bit: keys and values stay, everything else of a slice leaves."""
    model, batch = FAMILIES[name]().train(), batches()["padded"]
    assert ps.lower(ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3), offload=100).rows.is_kind(Kind.OFFLOAD).any()
    (loss, moved), (expected, plain) = (by_slices(model, batch, 3, offload=offload) for offload in (True, None))
    assert loss == expected
    assert_within(moved, plain, 0.0)


@pytest.mark.parametrize("name", ["slimpipe", "zbv", "seq1f1b"])
def test_schedules(name: str) -> None:
    check(mistral, batches()["padded"], 2, name=name)


def test_eager_attention() -> None:
    for kind in ("padded", "packed"):
        check(lambda: mistral(attn_implementation="eager"), batches()[kind], slices=3)


def test_embeddings_as_inputs() -> None:
    model, batch = llama().train(), batches()["padded"]
    embeddings = torch.randn(4, TOKENS, 16)
    inputs = {name: value for name, value in batch.items() if name != "input_ids"} | {"inputs_embeds": embeddings}
    loss, wanted = by_whole(model, inputs)
    total, found = by_slices(model, inputs, 3)
    assert total == pytest.approx(loss, rel=ROUNDING)
    assert_within(found, wanted, ROUNDING)


def test_adapters() -> None:
    """Of PEFT, with everything else frozen: keys of the first layer need a gradient through the adapter alone."""
    config = LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    check(lambda: get_peft_model(mistral(), config), batches()["packed"], slices=3)


def test_attention_of_one_s_own_without_a_mask() -> None:
    """As kernels have it that align causal attention at the last query: transformers makes no mask for it."""

    def lower_right(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        bias: Any = causal_lower_right(query.shape[2], key.shape[2])
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register("lower_right", lower_right)
    check(lambda: llama(attn_implementation="lower_right"), batches()["plain"], slices=3)
    with pytest.raises(PenstockError, match="packed documents with attn_implementation='lower_right'"):
        by_slices(llama(attn_implementation="lower_right"), batches()["packed"], 2)


def test_masks_of_four_dimensions_are_cut() -> None:
    """A mask of one's own, in which the first two tokens are hidden from all others."""
    batch = batches()["plain"]
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    mask[2:, :2] = False
    check(llama, batch | {"attention_mask": mask.expand(4, 1, -1, -1).contiguous()}, slices=3)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
def test_compiled_stages() -> None:
    check(llama, batches()["plain"], 2, name="seq1f1b", compile={"backend": "aot_eager"})


def test_gradients_in_double_precision() -> None:
    """With transformers' casts to float32 widened as well, and labels that are shifted by the caller."""
    batch = batches()["packed"]
    tokens, labels = batch["input_ids"], batch["input_ids"].roll(-1, 1)
    inputs = {"input_ids": tokens, "position_ids": batch["position_ids"]}

    def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten())

    with _in_doubles():
        for name in ("llama", "qwen3", "mistral", "gemma", "mixtral", "gpt2"):
            model = FAMILIES[name]().double().train()
            model.config.output_router_logits = False
            model.set_experts_implementation("eager")
            wanted = copy.deepcopy(model)
            loss_fn(wanted(**inputs, use_cache=False).logits, labels).backward()
            for slices, lengths in [*((count, None) for count in (1, 2, 3, 4, 7)), (4, UNEQUAL[4])]:
                _, found = by_slices(model, inputs, slices, target=labels, loss_fn=loss_fn, slice_lengths=lengths)
                assert_within(found, wanted, EXACT)


@contextmanager
def _in_doubles() -> Iterator[None]:
    """Let code that asks for 32-bit numbers get 64-bit ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def test_evaluation_and_inference() -> None:
    model, batch = mistral(), batches()["padded"]
    scores = copy.deepcopy(model).eval()(**batch, use_cache=False)

    def run() -> tuple[Any, Any]:
        pipe = Pipeline(model, ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3))
        return pipe.eval_step(batch).loss, pipe.infer(batch)

    for loss, logits in launch(run, 2):
        torch.testing.assert_close(loss, scores.loss, rtol=ROUNDING, atol=0)
        seen = batch["attention_mask"].bool()
        torch.testing.assert_close(logits[seen], scores.logits[seen], rtol=ROUNDING, atol=1e-6)


def test_parity() -> None:
    model, batch = mixtral().train(), batches()["padded"]
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3)
    for parity in launch(lambda: Pipeline(model, schedule).parity(batch), 2):
        assert parity.loop.worst <= ROUNDING


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, match: str, error: type[Exception] = PlacementError, **more: Any) -> None:
    with pytest.raises(error, match=match):
        by_slices(model, batches()["plain"] | more, 2)


def test_state_space_models_are_refused() -> None:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, state_size=4)
    by_version = "takes no past_key_values, as state-space models do not|'linear_attention', whose state is not kept from slice to slice"
    refused(MambaForCausalLM(config), by_version)  # newer versions of transformers name the type of its layers


def test_linear_attention_is_refused() -> None:
    own = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2}
    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(**COMMON | own | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2})
    )
    refused(model, "has layers of type 'linear_attention', whose state is not kept from slice to slice")


def test_bidirectional_attention_is_refused() -> None:
    refused(gemma(use_bidirectional_attention=True), "attends to later tokens in .*self_attn, which a slice cannot see")


def test_gradient_checkpointing_of_the_model_is_refused() -> None:
    model = llama().train()
    model.activation_checkpointing_enable()
    refused(model, "has kept its keys and values 0 times .* give the pipeline recompute=True instead", PenstockError)


def test_inputs_that_cannot_be_cut_are_refused() -> None:
    refused(
        llama(), r"the input 'cu_seq_lens' of shape \[2\] cannot be cut into slices of 13 tokens", PenstockError, cu_seq_lens=torch.ones(4)
    )


def test_masks_need_an_attention_that_takes_them() -> None:
    """Others are given no mask by transformers, or one that documents cannot be added to."""
    hidden = torch.zeros(2, 4, 16)
    with pytest.raises(PenstockError, match="packed documents with attn_implementation='flex_attention': slices need 'sdpa' or 'eager'"):
        SliceInputs.take({DOCUMENTS: torch.zeros(2, 4)}, hidden, "flex_attention")
