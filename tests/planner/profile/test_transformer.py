"""The profile of a transformer against counts by hand."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import CostsError
from penstock.planner.profile.transformer import Transformer

SMALL = {"layers": 3, "hidden": 64, "heads": 8, "sequence": 32, "vocabulary": 100, "flops": 1e6}


def operations(products: list[tuple[int, int, int]]) -> int:
    """Of matrix products, each by its three sizes."""
    return sum(2 * a * b * c for a, b, c in products)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [  # as their authors' checkpoints have
        ({"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "gated": True, "vocabulary": 32000}, 6_738_415_616),
        ({"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "gated": True, "vocabulary": 32000}, 68_976_648_192),
    ],
)
def test_parameters_of_known_models(fields, wanted):
    model = Transformer(**fields, sequence=4096, flops=1e15)
    assert model.parameters == wanted
    profile = model.profile()
    assert sum(layer.parameters for layer in profile.layers) == 2 * wanted
    assert sum(layer.gradients for layer in profile.layers) == 4 * wanted
    assert sum(layer.optimizer for layer in profile.layers) == 12 * wanted


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("kv_heads", "gated", "flash"), [(None, False, True), (2, True, True), (4, True, False)])
def test_every_matrix_product_is_counted(size, kv_heads, gated, flash):
    tokens, head = size * 32, 64 // 8
    keys = head * (kv_heads or 8)
    maps = [(tokens, 64, 64), (tokens, 64, keys), (tokens, 64, keys), (tokens, 64, 64)]
    maps += [(tokens, 64, 256)] * (2 if gated else 1) + [(tokens, 256, 64)]
    attention = [(32, head, 32), (32, 32, head)] * size * 8
    profile = ps.Profile.transformer(**SMALL, kv_heads=kv_heads, gated=gated, flash=flash, microbatch=size, causal=False)
    block = profile.layers[1]
    assert block.f == pytest.approx(operations(maps + attention) / 1e6)
    # Each product of the forward has two in the backward; that of a weight and its input has one for each of I and W.
    again = operations([(32, head, 32)] * size * 8) if flash else 0
    assert block.i == pytest.approx((operations(maps) + 2 * operations(attention) + again) / 1e6)
    assert block.w == pytest.approx(operations(maps) / 1e6)
    head_layer = profile.layers[-1]
    assert head_layer.f == head_layer.i == head_layer.w == pytest.approx(operations([(tokens, 64, 100)]) / 1e6)
    assert [layer.name for layer in profile.layers] == ["embedding", "block 0", "block 1", "block 2", "head"]


def test_activations_are_those_of_the_known_formula():
    """Korthikanti et al. count sbh (34 + 5 a s / h) bytes, of which dropout holds 2 sbh and 3 a s^2 b: masks, and the scores once more."""
    s, b, h, a = 32, 2, 64, 8
    block = ps.Profile.transformer(**SMALL, microbatch=b, flash=False).layers[1]
    assert block.activation == s * b * h * (34 + 5 * a * s / h)
    without = ps.Profile.transformer(**SMALL, microbatch=b, flash=False, dropout=False).layers[1]
    assert without.activation == 34 * s * b * h - 2 * s * b * h + 2 * a * s * s * b
    flash = ps.Profile.transformer(**SMALL, microbatch=b).layers[1]
    assert flash.activation == 32 * s * b * h + 4 * a * s * b


LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "gated": True, "vocabulary": 32000, "flops": 1.0}


@pytest.mark.parametrize("sequence", [4096, 131072])
def test_causal_flash_attention_counts_only_unmasked_pairs(sequence):
    """FlashAttention's own count: 4 s^2 x head size x heads forward, 2.5 times that backward, both halved if a mask is causal.

    A backward is otherwise twice a forward, and 6 operations per parameter and token is what both take together.
    """
    model = Transformer(**LLAMA, sequence=sequence)
    block = model.profile().layers[1]
    maps = 2 * sequence * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 4 * sequence**2 * 128 * 32 / 2
    assert block.f == pytest.approx(maps + attention)
    assert block.i + block.w == pytest.approx(2 * maps + 2.5 * attention)
    whole = Transformer(**LLAMA, sequence=sequence, causal=False).profile().layers[1]
    assert whole.f - block.f == pytest.approx(attention)
    # Without flash the masked half is computed too.
    plain = Transformer(**LLAMA, sequence=sequence, flash=False).profile().layers[1]
    assert plain.f == pytest.approx(whole.f)


# Experts --------------------------------------------------------------------------------------------------------------

DEEPSEEK_V3 = {
    "layers": 61,
    "hidden": 7168,
    "heads": 128,
    "head_size": 128,
    "query_rank": 1536,
    "key_rank": 512,
    "rope": 64,
    "ffn": 18432,
    "gated": True,
    "experts": 256,
    "experts_per_token": 8,
    "shared_experts": 1,
    "expert_ffn": 2048,
    "dense_layers": 3,
    "vocabulary": 129280,
    "sequence": 4096,
    "flops": 1e15,
}
MIXTRAL = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True, "vocabulary": 32000, "sequence": 4096}
MIXTRAL |= {"flops": 1e15, "experts": 8, "experts_per_token": 2}


def test_parameters_of_known_models_with_experts():
    """The report on DeepSeek-V3 gives 671B parameters, 37B of them active; Mixtral 8x7B's checkpoint has 46,702,792,704."""
    deepseek = Transformer(**DEEPSEEK_V3)
    assert deepseek.parameters == pytest.approx(671e9, rel=1e-3)
    assert deepseek.active_parameters == pytest.approx(37e9, rel=0.02)
    mixtral = Transformer(**MIXTRAL)
    assert mixtral.parameters == 46_702_792_704
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=2e-3)


def test_a_token_costs_its_active_parameters():
    """Two operations for each parameter of a map that a token passes, beside attention and without the embedding's look-up."""
    model = Transformer(**MIXTRAL)
    maps = model.active_parameters - 32000 * 4096 - (2 * 32 + 1) * 4096
    attention = 32 * 4 * 4096**2 * 4096 / 2
    forward = sum(layer.f for layer in model.profile().layers)
    assert forward == pytest.approx((2 * 4096 * maps + attention) / 1e15)
    assert sum(layer.w for layer in model.profile().layers) == pytest.approx(2 * 4096 * maps / 1e15)


def test_experts_on_several_devices_travel_by_all_to_all():
    """A device keeps its share of the experts; of each token's copies all but that share leave it and return."""
    alone, shared = Transformer(**MIXTRAL), Transformer(**MIXTRAL, expert_parallel=4, expert_bandwidth=50e9)
    expert = 3 * 4096 * 14336
    first, second = alone.profile().layers[1], shared.profile().layers[1]
    assert first.parameters - second.parameters == 2 * 6 * expert
    sent = 4096 * 2 * 4096 * 2 * 3 / 4  # tokens, experts of each, width, bytes, and how many are elsewhere
    assert second.f - first.f == pytest.approx(2 * sent / 50e9)
    assert second.i - first.i == pytest.approx(2 * sent / 50e9)
    assert second.w == first.w
    assert shared.parameters == alone.parameters


def test_dense_blocks_come_first():
    profile = Transformer(**DEEPSEEK_V3).profile()
    dense, experts = profile.layers[3], profile.layers[4]
    assert dense.parameters == 2 * (187_107_328 + 3 * 7168 * 18432 + 2 * 7168)
    assert experts.parameters == 2 * (187_107_328 + 7168 * 256 + 257 * 3 * 7168 * 2048 + 2 * 7168)


# Once per step --------------------------------------------------------------------------------------------------------


def test_gradients_are_summed_and_the_optimizer_steps():
    """A ring passes 2 (d - 1) / d of the gradients; Adam reads gradients, a copy and two moments and writes all but the gradients."""
    model = Transformer(**{**LLAMA, "flops": 1e15}, sequence=4096, data=8, data_bandwidth=100e9, memory_bandwidth=3e12)
    block = model.profile().layers[1]
    count = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert block.reduction == pytest.approx(2 * 7 / 8 * 4 * count / 100e9)
    assert block.update == pytest.approx(count * (4 + 12 + 12 + 2) / 3e12)
    assert model.profile().at(2).layers[1].update == block.update


def test_the_stash_is_the_input_and_the_output_gradient_of_each_map():
    tokens, keys = 32, 16
    block = ps.Profile.transformer(**SMALL, kv_heads=2, gated=True, ffn=160).layers[1]
    maps = [(64, [64, keys, keys]), (64, [64]), (64, [160, 160]), (160, [64])]  # an input, and the outputs of the maps that share it
    assert block.weight_stash == 2 * tokens * sum(taken + sum(made) for taken, made in maps)
    assert block.output == 2 * tokens * 64


def test_times_may_have_a_unit():
    with_units = ps.Profile.transformer(**SMALL, latency="20us", overhead="5 us")
    assert with_units == ps.Profile.transformer(**SMALL, latency=2e-5, overhead=5e-6)
    with pytest.raises(CostsError, match="latency: '5KB' is not a time"):
        ps.Profile.transformer(**SMALL, latency="5KB")


def test_sizes_to_choose_from_and_links():
    profile = ps.Profile.transformer(**SMALL, microbatch=(1, 2, 8), overhead=0.5, latency=1e-6, bandwidth="50GB")
    assert profile.sizes == (1, 2, 8)
    assert (profile.latency, profile.bandwidth) == (1e-6, 50e9)
    one, eight = profile.at(1), profile.at(8)
    assert eight.layers[1].activation == 8 * one.layers[1].activation
    assert eight.layers[1].f - 0.5 == pytest.approx(8 * (one.layers[1].f - 0.5))
    assert one.layers[0].f == 0.5  # a look-up counts no operations
    assert (profile.time_unit, profile.size_unit) == ("s", "B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hiden": 64}, "there is no field 'hiden': did you mean 'hidden'"),
        ({"heads": 7}, "hidden=64 cannot be shared among heads=7"),
        ({"kv_heads": 3}, "heads=8 cannot share kv_heads=3"),
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"layers": None}, "layers must be a whole number of at least 1, got None"),
        ({"gated": "no"}, "gated must be true or false, got 'no'"),
        ({"dropout": 0.1}, "dropout must be true or false, got 0.1"),
        ({"microbatch": (1, 0)}, "microbatch must be a whole number"),
        ({"microbatch": ()}, "microbatch is empty"),
        ({"flops": 0}, "flops=0: flops is the number of operations per second .*: write a number above 0"),
        ({"bandwidth": "50Gbit"}, "bandwidth: '50Gbit' is not a bandwidth"),
        ({"microbatch": (2, 2)}, "measure each size once"),
        ({"experts": 2, "experts_per_token": 3}, "is more than experts=2"),
        ({"experts": 6, "expert_parallel": 4}, "must be a multiple"),
        ({"shared_experts": 1}, "give experts"),
        ({"rope": -1}, "rope must be a whole number of at least 0"),
        ({"memory_bandwidth": 0}, "memory_bandwidth must be more than 0"),
    ],
)
def test_mistakes_are_reported(change, said):
    with pytest.raises(CostsError, match=said):
        ps.Profile.transformer(**{**SMALL, **change})


def test_missing_fields_are_reported():
    with pytest.raises(CostsError, match="a transformer: 'sequence', 'vocabulary', 'flops' are missing"):
        ps.Profile.transformer(layers=2, hidden=8, heads=2)
