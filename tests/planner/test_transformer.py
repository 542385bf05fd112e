"""The profile of a transformer against counts by hand."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import CostsError
from penstock.planner.transformer import Transformer

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
    profile = ps.Profile.transformer(**SMALL, kv_heads=kv_heads, gated=gated, flash=flash, microbatch=size)
    tokens, head = size * 32, 64 // 8
    keys = head * (kv_heads or 8)
    maps = [(tokens, 64, 64), (tokens, 64, keys), (tokens, 64, keys), (tokens, 64, 64)]
    maps += [(tokens, 64, 256)] * (2 if gated else 1) + [(tokens, 256, 64)]
    attention = [(32, head, 32), (32, 32, head)] * size * 8
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
    """Korthikanti et al. count 34 sbh + 5 a s^2 b bytes, of which dropout holds 2 sbh and 3 a s^2 b: its masks and the scores once more."""
    s, b, h, a = 32, 2, 64, 8
    block = ps.Profile.transformer(**SMALL, microbatch=b, flash=False).layers[1]
    assert block.activation == 34 * s * b * h - 2 * s * b * h + 2 * a * s * s * b
    flash = ps.Profile.transformer(**SMALL, microbatch=b).layers[1]
    assert flash.activation == 32 * s * b * h + 4 * a * s * b


def test_what_waits_for_w_is_each_map_s_input_and_its_output_s_gradient():
    tokens, keys = 32, 16
    block = ps.Profile.transformer(**SMALL, kv_heads=2, gated=True, ffn=160).layers[1]
    maps = [(64, [64, keys, keys]), (64, [64]), (64, [160, 160]), (160, [64])]  # an input, and the outputs of the maps that share it
    assert block.weight_stash == 2 * tokens * sum(taken + sum(made) for taken, made in maps)
    assert block.output == 2 * tokens * 64


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
        ({"hiden": 64}, "has no field 'hiden': did you mean 'hidden'"),
        ({"heads": 7}, "hidden=64 cannot be shared among heads=7"),
        ({"kv_heads": 3}, "heads=8 cannot share kv_heads=3"),
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"microbatch": (1, 0)}, "microbatch must be a whole number"),
        ({"microbatch": ()}, "both are needed"),
        ({"flops": 0}, "flops must be more than 0"),
        ({"bandwidth": "50Gbit"}, "bandwidth: '50Gbit' is not a size"),
        ({"microbatch": (2, 2)}, "measure each size once"),
    ],
)
def test_mistakes_are_named(change, said):
    with pytest.raises(CostsError, match=said):
        ps.Profile.transformer(**{**SMALL, **change})


def test_what_is_missing_is_named():
    with pytest.raises(CostsError, match="a transformer needs sequence, vocabulary, flops"):
        ps.Profile.transformer(layers=2, hidden=8, heads=2)
