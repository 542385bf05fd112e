"""Layers and profiles: values, files, other microbatch sizes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, FileFormatError

numbers = st.floats(0, 1e15) | st.integers(0, 10**6).map(float)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)
layers = st.builds(
    ps.Layer,
    name=names,
    **dict.fromkeys(("f", "i", "w", "activation", "weight_stash", "output", "parameters", "gradients", "optimizer"), numbers),
)


@st.composite
def profiles(draw: st.DrawFn) -> ps.Profile:
    count = draw(st.integers(1, 4))

    def some() -> list[ps.Layer]:
        return draw(st.lists(layers, min_size=count, max_size=count))

    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True))
    variants = [ps.Profile(some(), microbatch=size, input=draw(numbers)) for size in sizes[1:]]
    return ps.Profile(
        some(),
        latency=draw(numbers),
        bandwidth=draw(st.none() | st.floats(1e-3, 1e12)),
        microbatch=sizes[0],
        input=draw(numbers),
        time_unit=draw(st.sampled_from(["", "s"])),
        size_unit=draw(st.sampled_from(["", "B"])),
        source=draw(names),
        keeps_output=draw(st.booleans()),
        variants=variants,
    )


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_saved_profile_loads_unchanged(tmp_path_factory, suffix):
    path = tmp_path_factory.mktemp("profiles") / f"p.{suffix}"

    @given(profiles())
    def check(profile: ps.Profile) -> None:
        profile.save(path)
        assert ps.Profile.load(path) == profile

    check()


def test_sizes_may_be_text():
    layer = ps.Layer(f=1, i=2, w=3, activation="1.5KiB", parameters="2MB", optimizer=3)
    assert (layer.activation, layer.parameters, layer.optimizer) == (1536.0, 2e6, 3.0)
    assert (layer.time, layer.static) == (6.0, 2e6 + 3.0)
    assert ps.Profile([layer], input="1KB", bandwidth="1GB").bandwidth == 1e9


def test_latencies_may_have_a_unit():
    layers = [ps.Layer(f=1, i=1, w=1)]
    profile = ps.Profile(layers, time_unit="ms", latency="20us", host_latency="1s", bandwidth="12.5GB")
    assert (profile.latency, profile.host_latency, profile.bandwidth) == (0.02, 1000.0, 12.5e9)
    for wrong, reason in (
        ({"latency": "20us"}, "latency: '20us' has a unit, but the other times have none"),
        ({"host_latency": "20KB"}, "host_latency: '20KB' is not a time"),
        ({"bandwidth": "100Gbit"}, "bandwidth: '100Gbit' is not a bandwidth"),
    ):
        with pytest.raises(CostsError, match=reason):
            ps.Profile(layers, **wrong)


def test_equal_layers_in_a_row_may_be_written_once(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('latency = 0.5\n[[layers]]\nf = 1\ni = 1\nw = 0.5\ncount = 3\nactivation = "1KiB"\n[[layers]]\nf = 2\ni = 2\nw = 1\n')
    block, head = ps.Layer(f=1, i=1, w=0.5, activation=1024), ps.Layer(f=2, i=2, w=1)
    assert ps.Profile.load(path) == ps.Profile([block, block, block, head], latency=0.5)


def test_measured_sizes_are_used_as_they_are_and_others_scaled_from_the_nearest():
    one = ps.Layer(f=1, i=1, w=1, activation=10, weight_stash=5, output=2, parameters=7, gradients=7, optimizer=14)
    four = ps.Layer(f=3, i=2, w=2, activation=40, weight_stash=20, output=8, parameters=7, gradients=7, optimizer=14)
    profile = ps.Profile([one], latency=0.5, bandwidth=9, time_unit="s", input=3, variants=[ps.Profile([four], microbatch=4, input=12)])
    assert profile.sizes == (1, 4)
    at_four = profile.at(4)
    assert (at_four.layers, at_four.input, at_four.microbatch) == ((four,), 12, 4)
    assert (at_four.latency, at_four.bandwidth, at_four.time_unit, at_four.variants) == (0.5, 9, "s", ())
    eight = profile.at(8)
    assert eight.layers[0] == ps.Layer(
        f=6, i=4, w=4, activation=80, weight_stash=40, output=16, parameters=7, gradients=7, optimizer=14
    )  # twice the four, whose parameters stay
    assert eight.input == 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer": []}, "a profile: there is no field 'layer': did you mean 'layers'"),
        ({"layers": []}, "at least one layer"),
        ({"layers": {"f": 1}}, "layers must be a list"),
        ({"layers": [{"f": 1, "i": 1}]}, "layer 0: a layer: 'w' is missing"),
        (
            {"layers": [{"f": 1, "i": 1, "w": 1, "activatoin": 1}]},
            "layer 0: a layer: there is no field 'activatoin': did you mean 'activation'",
        ),
        ({"layers": [{"f": -1, "i": 1, "w": 1}]}, "layer 0: f: a size must be a finite number of at least 0"),
        ({"layers": [{"f": "1ms", "i": 1, "w": 1}]}, "layer 0: f must be a number, got '1ms'"),
        ({"layers": [{"f": 1, "i": 1, "w": 1, "output": "3Gb"}]}, "layer 0: output: '3Gb' is not a size"),
        ({"layers": [{"f": 1, "i": 1, "w": 1, "count": 0}]}, "layer 0: count must be a whole number of at least 1"),
        ({"layers": [3]}, "layer 0: a layer: the data must be an object, got a whole number"),
        ({"bandwidth": 0}, "bandwidth must be more than 0"),
        ({"microbatch": 1.5}, "microbatch must be a whole number"),
        ({"source": 3}, "source must be text"),
        ({"keeps_output": 3}, "keeps_output must be true or false"),
        ({"variants": [{"microbatch": 1, "layers": [{"f": 1, "i": 1, "w": 1}]}]}, "measure each size once"),
        ({"variants": [{"microbatch": 2, "layers": [{"f": 1, "i": 1, "w": 1, "count": 2}]}]}, "has 2 layers, the profile 1"),
        ({"variants": [{"latency": 2, "layers": []}]}, "a variant: there is no field 'latency'"),
        ({"variants": 2}, "variants must be a list"),
    ],
)
def test_mistakes_in_a_file_are_reported(tmp_path, change, said):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"layers": [{"f": 1, "i": 1, "w": 1}], **change}))
    with pytest.raises(FileFormatError) as refused:
        ps.Profile.load(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"), [("p.json", "{"), ("p.toml", "latency = = 1"), ("p.json", "[1]"), ("p.toml", "\xff"), ("p.txt", "")]
)
def test_unknown_file_formats_are_refused(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileFormatError, match=name):
        ps.Profile.load(path)


def test_a_profile_of_something_else():
    with pytest.raises(CostsError, match=r"each a penstock\.Layer"):
        ps.Profile([1])  # type: ignore[list-item]
    with pytest.raises(CostsError, match="name is text"):
        ps.Layer(name=3, f=1, i=1, w=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: ps.Profile(None),
        ps.Profile,
        lambda layer: ps.Profile([layer], variants=[1]),
        lambda layer: ps.Profile([layer], variants=1),
        lambda layer: ps.Profile([layer]).at(0),
    ],
)
def test_layers_that_are_not_a_list_are_reported(make):
    with pytest.raises(CostsError, match=r"layers|variants|microbatch"):
        make(ps.Layer(f=1, i=1, w=1))
