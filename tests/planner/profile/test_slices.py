"""Costs of slices: their form, the fit to measurements, profile files, and estimates of transformers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError
from penstock.planner.profile.slices import TERMS, Point, SliceCost, SliceCosts, fit_slice_cost, list_prefixes

POINTS = [(256, 0), (512, 0), (1024, 0), (256, 256), (256, 768), (512, 512)]
LAYER = ps.Layer(
    f=4.0,
    i=5.0,
    w=1.0,
    activation=100.0,
    output=10.0,
    slices=SliceCosts(
        f=SliceCost(fixed=0.5, token=0.001, pair=1e-5),
        i=SliceCost(token=0.002),
        w=SliceCost(token=0.001),
        activation=SliceCost(token=0.1, prefix=0.01),
        keys=0.02,
        key_gradients=0.04,
        error=0.03,
    ),
)


def random_cuts(chance: np.random.Generator, tokens: int, slices: int) -> list[int]:
    edges = np.sort(chance.choice(np.arange(1, tokens), slices - 1, replace=False))
    return np.diff(np.concatenate(([0], edges, [tokens]))).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_the_work_of_a_sequence_depends_on_the_number_of_its_slices_alone(seed):
    chance = np.random.default_rng(seed)
    cost = SliceCost(*chance.uniform(0, 1, 3).tolist())
    lengths = random_cuts(chance, 100, slices=5)
    total = sum(cost.at(length, prefix) for length, prefix in zip(lengths, list_prefixes(lengths), strict=True))
    assert total == pytest.approx(cost.at(100, 0) + 4 * cost.fixed)


@pytest.mark.parametrize("terms", list(product((0.0, 1.0), repeat=3)))
def test_a_fit_finds_the_terms_that_the_measurements_come_from(terms):
    true = SliceCost(fixed=20e-6 * terms[0], token=1e-8 * terms[1], pair=1e-11 * terms[2])
    fitted, error = fit_slice_cost(Point(*point, true.at(*point)) for point in POINTS)
    assert error < 1e-9
    for length, prefix in [(100, 5000), (4096, 0)]:
        assert fitted.at(length, prefix) == pytest.approx(true.at(length, prefix), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_terms_of_at_least_zero_come_nearer_to_noisy_measurements(seed):
    """Projected gradient steps from the fit and from random places never get below its squares."""
    chance = np.random.default_rng(seed)
    values = chance.uniform(0.2, 2.0, len(POINTS))
    fitted, error = fit_slice_cost(Point(*point, value) for point, value in zip(POINTS, values.tolist(), strict=True))
    assert min(fitted.fixed, fitted.token, fitted.pair) >= 0
    length, prefix = np.array(POINTS, dtype=float).T
    matrix = np.column_stack([np.ones(len(values)), length / 1e3, length * (prefix + length / 2) / 1e6]) / values[:, None]
    own = np.array([fitted.fixed, fitted.token * 1e3, fitted.pair * 1e6])
    squares = ((matrix @ own - 1) ** 2).sum()
    assert error == pytest.approx(np.abs(matrix @ own - 1).max())
    step = 1 / np.linalg.norm(matrix, 2) ** 2
    for start in (own, chance.uniform(0, 1, 3), np.zeros(3)):
        other = start
        for _ in range(2000):
            other = np.maximum(other - step * matrix.T @ (matrix @ other - 1), 0.0)
        assert ((matrix @ other - 1) ** 2).sum() >= squares - 1e-9


def test_memory_that_grows_with_the_prefix_is_found():
    true = SliceCost(token=96.0, prefix=16.0)
    fitted, error = fit_slice_cost((Point(*point, true.at(*point)) for point in POINTS), TERMS)
    assert (fitted.token, fitted.prefix, error) == pytest.approx((96.0, 16.0, 0.0))


def test_nothing_can_be_fitted_to_nothing():
    with pytest.raises(CostsError, match="no measurements"):
        fit_slice_cost([])


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_slices_are_saved_with_a_profile(tmp_path, suffix):
    profile = ps.Profile([LAYER, ps.Layer(f=1.0, i=1.0, w=1.0)], tokens=1024, time_unit="s")
    profile.save(tmp_path / f"p.{suffix}")
    assert ps.Profile.load(tmp_path / f"p.{suffix}") == profile
    assert profile.lacks_slices == "it does not say what a slice takes on layer 1"


def test_a_profile_without_slices_is_written_as_before():
    written = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)]).to_json()
    assert written == {"layers": [{"f": 1.0, "i": 1.0, "w": 1.0}]}
    assert ps.Profile.from_json(written).lacks_slices == "it does not say how many tokens a sequence has"


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ({"f": {}, "i": {}}, "slices of a layer: 'w' is missing"),
        ({"f": {}, "i": {}, "w": {"tokens": 1}}, "there is no field 'tokens'.*token"),
        ({"f": {}, "i": {}, "w": {"token": -1}}, "w of a slice: token"),
        ({"f": {}, "i": {}, "w": 3.0}, "w of a slice: the data must be an object"),
        ({"f": {}, "i": {}, "w": {}, "forward": {}}, "there is no field 'forward'"),
        (3, "must be an object"),
    ],
)
def test_wrong_slices_are_refused(slices, message):
    with pytest.raises(CostsError, match=message):
        ps.Layer(f=1.0, i=1.0, w=1.0, slices=slices)


def test_the_slices_of_a_profile_are_profiles():
    profile = ps.Profile([LAYER] * 2, tokens=1000, input=50.0)
    first, second = profile.cut_sequence((600, 400))
    assert first.layers[0].f == pytest.approx(0.5 + 0.6 + 1e-5 * 600 * 300)
    assert second.layers[0].f == pytest.approx(0.5 + 0.4 + 1e-5 * 400 * 800)
    assert (second.layers[0].activation, second.layers[0].output) == pytest.approx((46.0, 4.0))
    assert (second.layers[0].kept, second.layers[0].kept_gradients) == pytest.approx((8.0, 16.0))
    assert (first.input, second.input) == pytest.approx((30.0, 20.0))
    assert profile.cut_sequence(()) == (profile,)
    with pytest.raises(CostsError, match="slices of 600, 300 tokens do not make up a sequence of 1000"):
        profile.cut_sequence((600, 300))
    with pytest.raises(CostsError, match="cannot be cut into slices on this profile: it does not say how many tokens"):
        ps.Profile([LAYER]).cut_sequence((600, 400))


def test_a_larger_microbatch_takes_more_per_slice():
    profile = ps.Profile([LAYER], tokens=1000).at(3)
    (whole,) = profile.cut_sequence((1000,))
    (one,) = ps.Profile([LAYER], tokens=1000).cut_sequence((1000,))
    for name in ("f", "activation", "kept", "kept_gradients"):
        assert getattr(whole.layers[0], name) == pytest.approx(3 * getattr(one.layers[0], name))


SIZES = {"layers": 3, "hidden": 512, "heads": 8, "sequence": 4096, "vocabulary": 1000, "flops": 1e12}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kv_heads": 2, "gated": True, "overhead": 1e-4},
        {"experts": 8, "experts_per_token": 2, "expert_parallel": 2, "expert_bandwidth": 1e9},
        {"key_rank": 64, "query_rank": 96, "rope": 16, "microbatch": 3},
    ],
)
def test_a_transformer_as_one_slice_takes_what_its_sequence_takes(more):
    profile = ps.Profile.transformer(**SIZES, **more)
    (whole,) = profile.cut_sequence((4096,))
    for layer, sliced in zip(profile.layers, whole.layers, strict=True):
        assert (sliced.f, sliced.i, sliced.w) == pytest.approx((layer.f, layer.i, layer.w))
        assert (sliced.weight_stash, sliced.output) == pytest.approx((layer.weight_stash, layer.output))
        positions = 2 * 4096 * profile.microbatch * SIZES["heads"] * more.get("rope", 0)
        apart = positions if "block" in layer.name else 0.0  # copied into the key of every head
        assert sliced.activation + sliced.kept == pytest.approx(layer.activation + apart)


def test_the_attention_of_a_transformer_grows_with_the_prefix():
    """Queries of n tokens meet p keys before them and half of n on average: 2 operations for each number of queries and values."""
    profile = ps.Profile.transformer(**SIZES, kv_heads=2)
    early, late = profile.cut_sequence((1024, 3072))[0].layers[1], profile.cut_sequence((3072, 1024))[1].layers[1]
    more = 1024 * 3072 * 2 * 2 * 512 / 1e12
    assert late.f - early.f == pytest.approx(more)
    assert late.i - early.i == pytest.approx(2.5 * more)
    assert late.w == pytest.approx(early.w)
    assert late.activation == pytest.approx(early.activation)
    assert late.kept == pytest.approx(2 * 1024 * 2 * (512 // 8) * 2)  # keys and values of 2 heads, 2 bytes each
    assert late.kept_gradients == pytest.approx(2 * late.kept)  # summed in 4 bytes each


@pytest.mark.parametrize(("size", "summed"), [(2.0, 4.0), (4.0, 4.0), (8.0, 8.0)])
def test_gradients_of_keys_are_summed_in_at_least_32_bits(size, summed):
    block = ps.Profile.transformer(**SIZES, bytes=size).layers[1].slices
    assert block is not None
    assert (block.keys, block.key_gradients) == (2 * 512 * size, 2 * 512 * summed)


@pytest.mark.parametrize("more", [{"causal": False}, {"flash": False}])
def test_attention_that_looks_ahead_or_keeps_scores_has_no_slices(more):
    assert ps.Profile.transformer(**SIZES, **more).lacks_slices
