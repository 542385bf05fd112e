"""Layers, profiles, and profiles as JSON and TOML files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from penstock.errors import CostsError, FileFormatError
from penstock.ir.cluster import Device, Speeds
from penstock.ir.costs import Costs
from penstock.ir.formats.reading import check_record, read_settings, suffix_of
from penstock.ir.formats.toml_form import toml_value
from penstock.ir.rows import Floats
from penstock.planner.profile.slices import TERMS, SliceCost, SliceCosts, list_prefixes
from penstock.text.units import check_count, parse_rate, parse_size, parse_time

TIMES = ("f", "i", "w")
ONCE = ("reduction", "update")
"""Times that count once per step, however many microbatches there are."""
_OF_VARIANTS = ("microbatch", "input", "layers")
PER_MICROBATCH = ("f", "i", "w", "activation", "weight_stash", "workspace", "output", "kept", "kept_gradients")
"""Fields that grow with the microbatch size; those of the parameters do not."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: its times and memory per microbatch, and the memory of its parameters.

    >>> Layer(f=1.0, i=1.0, w=0.5, activation="1KiB").activation
    1024.0
    """

    name: str = ""
    f: float
    """Forward."""
    i: float
    """Backward for the input."""
    w: float
    """Backward for the weights."""
    activation: float = 0.0
    """Held from a microbatch's F to its I."""
    weight_stash: float = 0.0
    """Held from a microbatch's I to its W."""
    workspace: float = 0.0
    """Extra memory while one of its actions runs."""
    output: float = 0.0
    """The message to the next stage if the model is cut after this layer; the gradient that comes back is as large."""
    parameters: float = 0.0
    gradients: float = 0.0
    """Gradients of the parameters, accumulated over the microbatches."""
    optimizer: float = 0.0
    """Optimizer state of the parameters."""
    reduction: float = 0.0
    """Time to reduce the gradients over data-parallel replicas, after the last microbatch."""
    update: float = 0.0
    """Time of the optimizer step."""
    kept: float = 0.0
    """Held from a microbatch's F to its I besides the activation, also if the stage is recomputed or the activation moves to the host: of a
    slice, its keys and values."""
    kept_gradients: float = 0.0
    """Of a slice, the sum of the gradients of its keys and values."""
    slices: SliceCosts | None = None
    """The costs of a slice of the sequence, if they are known."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise CostsError(f"a layer's name is text, got {self.name!r}")
        slices: Any = self.slices  # also a table, as in files
        if slices is not None and not isinstance(slices, SliceCosts):
            object.__setattr__(self, "slices", SliceCosts.from_json(slices))
        for name, value in list(vars(self).items())[1:-1]:
            object.__setattr__(self, name, _parse_size(name, value, text=name not in TIMES + ONCE))

    @property
    def time(self) -> float:
        """Forward and both backward halves."""
        return self.f + self.i + self.w

    @property
    def static(self) -> float:
        """Memory that a rank with this layer holds all the time."""
        return self.parameters + self.gradients + self.optimizer

    def scaled(self, factor: float) -> Layer:
        """The layer at a microbatch size `factor` times as large, assuming proportional growth."""
        slices = None if self.slices is None else self.slices.scaled(factor)
        return replace(self, **{name: getattr(self, name) * factor for name in PER_MICROBATCH}, slices=slices)

    def at_speed(self, speeds: Speeds, place: int) -> Layer:
        """The layer, at this place in its model, on a device of these speeds."""
        f, i, w, optimizer = speeds.on_layer(place)
        slices = None if self.slices is None else self.slices.at_speed(f, i, w)
        return replace(self, f=self.f / f, i=self.i / i, w=self.w / w, update=self.update / optimizer, slices=slices)

    def slice_at(self, length: int, prefix: int, tokens: int) -> Layer:
        """The layer with the costs of a slice of a sequence of so many tokens in place of those of a microbatch."""
        assert self.slices is not None
        costs = {name: getattr(self.slices, name).at(length, prefix) for name in (*TIMES, "activation", "weight_stash", "workspace")}
        kept: dict[str, Any] = {"kept": self.slices.keys * length, "kept_gradients": self.slices.key_gradients * length}
        return replace(self, **costs, **kept, output=self.output * length / tokens, slices=None)

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        data = _list_changed(self)
        return data if self.slices is None else {**data, "slices": self.slices.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Layer:
        return cls(**check_record(data, cls, "a layer", error=CostsError))


@dataclass(frozen=True)
class Profile:
    """The layers of a model in order, the links between ranks, and the microbatch size that the numbers are for.

    The caller chooses one unit for times and one for sizes; a size written like "40MiB" is in bytes. `variants` are the same
    layers measured at other microbatch sizes.

    >>> Profile([Layer(f=1.0, i=1.0, w=1.0)] * 4).time
    12.0
    """

    layers: Sequence[Layer]
    latency: float = 0.0
    """Time of a message of size zero."""
    bandwidth: float | None = None
    """Size per time that a link carries; unlimited by default."""
    microbatch: int = 1
    """Samples per microbatch."""
    input: float = 0.0
    """Size of one microbatch as the first layer receives it."""
    time_unit: str = ""
    """The unit of times, for reports: s, ms, us or ns."""
    size_unit: str = ""
    """The unit of sizes, for reports: B for bytes."""
    source: str = ""
    """Where the numbers come from."""
    keeps_output: bool = False
    """Whether a stage also holds its output from F to I, as `penstock.runtime` does; a layer's activation then excludes it."""
    variants: Sequence[Profile] = ()
    overlap: float = 1.0
    """Time of two overlapped actions, as a share of the sum of their times."""
    contention: str = "independent"
    """The messages that share a link, as in `penstock.Costs`."""
    estimated: bool = False
    """Whether the numbers are computed rather than measured; a plan then leaves some memory free."""
    host_bandwidth: float | None = None
    """Size per time that a rank's link to host memory carries in each direction; unlimited by default."""
    host_latency: float = 0.0
    """Time of a copy of size zero to host memory or back."""
    host_link_shared: int = 1
    """How many neighbouring ranks share one link to host memory."""
    tokens: int | None = None
    """Tokens of a sequence, if it can be cut into slices."""
    shares: Sequence[Layer] = ()
    """Each rank's share of the embedding and of the head, if the vocabulary is spread over the ranks (`spread_ends`): the mean of all
    ranks, where these have different parts of the rows."""

    def __post_init__(self) -> None:
        for name in ("layers", "variants", "shares"):
            if not isinstance(getattr(self, name), Iterable):
                raise CostsError(f"{name} must be a list, got {type(getattr(self, name)).__name__}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise CostsError("a profile needs at least one layer, each a penstock.Layer")
        if self.shares and (len(self.shares) != 2 or not all(isinstance(share, Layer) for share in self.shares)):
            raise CostsError("shares are two layers: each rank's share of the embedding and of the head")
        self._check_words()
        for name in ("latency", "host_latency"):
            object.__setattr__(self, name, parse_time(getattr(self, name), name, self.time_unit))
        object.__setattr__(self, "input", _parse_size("input", self.input))
        for name in ("bandwidth", "host_bandwidth"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_rate(getattr(self, name), name))
                if not getattr(self, name):
                    raise CostsError(f"{name} must be more than 0, or left out for unlimited")
        check_count("microbatch", self.microbatch)
        if self.tokens is not None:
            check_count("tokens", self.tokens)
        Costs(overlap=self.overlap, contention=self.contention, host_link_shared=self.host_link_shared)  # checks them
        self._check_variants()

    def _check_words(self) -> None:
        texts, flags = ("time_unit", "size_unit", "source"), ("keeps_output", "estimated")
        for name, kind, words in [*((name, str, "text") for name in texts), *((name, bool, "true or false") for name in flags)]:
            if not isinstance(getattr(self, name), kind):
                raise CostsError(f"{name} must be {words}, got {getattr(self, name)!r}")

    def _check_variants(self) -> None:
        if not all(isinstance(variant, Profile) for variant in self.variants):
            raise CostsError("variants must each be a penstock.Profile")
        sizes = self.sizes
        for variant in self.variants:
            if len(variant.layers) != len(self.layers) or variant.variants:
                raise CostsError(
                    f"the variant for microbatches of {variant.microbatch} has {len(variant.layers)} layers, the profile "
                    f"{len(self.layers)}: a variant has the same layers, and no variants of its own"
                )
        if len(set(sizes)) < len(sizes):
            raise CostsError(f"variants for microbatches of {', '.join(map(str, sizes))}: measure each size once")

    @classmethod
    def transformer(cls, **fields: Any) -> Profile:
        """Estimate a transformer from its size; takes the fields of `penstock.planner.transformer.Transformer`."""
        from penstock.planner.profile.transformer import Transformer

        return Transformer.from_fields(fields).profile()

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The microbatch sizes with numbers of their own."""
        return (self.microbatch, *(variant.microbatch for variant in self.variants))

    @property
    def time(self) -> float:
        """Time of one microbatch on one device."""
        return sum(layer.time for layer in self.layers)

    @property
    def lacks_slices(self) -> str:
        """Why no slice of the sequence can be timed; empty if all can."""
        if self.tokens is None:
            return "it does not say how many tokens a sequence has"
        without = [layer.name or f"layer {place}" for place, layer in enumerate(self.layers) if layer.slices is None]
        return f"it does not say what a slice takes on {without[0]}" if without else ""

    @property
    def fit_error(self) -> float:
        """The errors of the times of slices on all layers, weighted by the layers' times."""
        return sum(layer.slices.error * layer.time for layer in self.layers if layer.slices is not None) / (self.time or 1.0)

    def cut_sequence(self, lengths: Sequence[int]) -> tuple[Profile, ...]:
        """The profile of each slice, as if it were a microbatch; without lengths, the profile itself."""
        if not lengths:
            return (self,)
        if self.tokens is None or self.lacks_slices:
            raise CostsError(f"sequences cannot be cut into slices on this profile: {self.lacks_slices}")
        if any(type(length) is not int or length < 1 for length in lengths) or sum(lengths) != self.tokens:
            raise CostsError(f"slices of {', '.join(map(str, lengths))} tokens do not make up a sequence of {self.tokens}")
        return tuple(self._find_slice(length, prefix) for length, prefix in zip(lengths, list_prefixes(lengths), strict=True))

    def _find_slice(self, length: int, prefix: int) -> Profile:
        assert self.tokens is not None
        if (length, prefix) not in self._slices:
            layers = [layer.slice_at(length, prefix, self.tokens) for layer in self.layers]
            own = replace(self, layers=layers, input=self.input * length / self.tokens, tokens=None, variants=())
            self._slices[length, prefix] = own
        return self._slices[length, prefix]

    def tabulate_slices(self, name: str, lengths: Sequence[int]) -> Floats:
        """A field of every layer (row) on every slice (column), as `cut_sequence` has it."""
        assert self.tokens is not None
        length, prefix = np.array(lengths, dtype=np.float64), np.array(list_prefixes(lengths), dtype=np.float64)
        if name == "output":
            return np.array([layer.output for layer in self.layers])[:, None] * length / self.tokens
        if name not in self._slice_terms:
            slices = [layer.slices for layer in self.layers]
            per_token = {"kept": "keys", "kept_gradients": "key_gradients"}.get(name)
            costs = [
                getattr(layer_slices, name) if per_token is None else SliceCost(token=getattr(layer_slices, per_token))
                for layer_slices in slices
                if layer_slices is not None
            ]
            self._slice_terms[name] = [np.array([getattr(cost, term) for cost in costs])[:, None] for term in TERMS]
        fixed, token, pair, before = self._slice_terms[name]
        return np.asarray(fixed + token * length + pair * (length * (prefix + length / 2)) + before * prefix)

    @cached_property
    def _slice_terms(self) -> dict[str, list[Floats]]:
        """The terms of the slice costs of all layers, by field, once they were asked for."""
        return {}

    @cached_property
    def _slices(self) -> dict[tuple[int, int], Profile]:
        """The slices that were asked for before, by length and prefix: a plan asks for each many times."""
        return {}

    def at(self, microbatch: int) -> Profile:
        """The profile at another microbatch size: as measured, or scaled from the nearest measured size."""
        check_count("microbatch", microbatch)
        measured = [replace(self, variants=()), *self.variants]
        nearest = min(measured, key=lambda profile: max(profile.microbatch / microbatch, microbatch / profile.microbatch))
        factor = microbatch / nearest.microbatch
        if factor != 1:
            layers, shares = ([layer.scaled(factor) for layer in listed] for listed in (nearest.layers, nearest.shares))
            nearest = replace(nearest, layers=layers, shares=shares, input=nearest.input * factor)
        return replace(self, layers=nearest.layers, shares=nearest.shares, input=nearest.input, microbatch=microbatch, variants=())

    # Devices ----------------------------------------------------------------------------------------------------------

    def on(self, device: Device) -> Profile:
        """The profile as it is on a device: all times divided by its speeds.

        >>> from penstock.ir.cluster import Device
        >>> Profile([Layer(f=1.0, i=1.0, w=1.0)] * 2).on(Device(speed={"f": 2, "i": 1, "w": 4})).time
        3.5
        """
        speeds = device.speeds
        if speeds.is_one:
            return self
        if speeds not in self._devices:
            self.check_speeds(device)
            ends = zip(self.shares, (0, len(self) - 1), strict=False)
            self._devices[speeds] = replace(
                self,
                layers=[layer.at_speed(speeds, place) for place, layer in enumerate(self.layers)],
                shares=[share.at_speed(speeds, place) for share, place in ends],
                variants=(),
            )
        return self._devices[speeds]

    @cached_property
    def _devices(self) -> dict[Speeds, Profile]:
        """The devices that were asked for before."""
        return {}

    def check_speeds(self, device: Device) -> None:
        """Refuse speeds per layer of another model."""
        if device.speeds.layers not in {None, len(self)}:
            raise CostsError(f"{device.name or 'a device'} has speeds for {device.speeds.layers} layers, but the model has {len(self)}")

    def compare_speeds(self, measured: Profile) -> dict[str, list[float]]:
        """The speeds of the device that the same layers were measured on, per kind and layer, for `Device(speed=...)`.

        A layer that takes no time in one of the two counts as equally fast.
        """
        if len(measured) != len(self) or measured.microbatch != self.microbatch:
            raise CostsError(
                f"profiles of {len(self)} layers for microbatches of {self.microbatch} and of {len(measured)} layers for microbatches of "
                f"{measured.microbatch} cannot be compared"
            )
        times = {
            name: [(getattr(one, name), getattr(other, name)) for one, other in zip(self.layers, measured.layers, strict=True)]
            for name in TIMES
        }
        return {name: [one / other if one and other else 1.0 for one, other in pairs] for name, pairs in times.items()}

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        data = _list_changed(self)
        data["layers"] = [layer.to_json() for layer in self.layers]
        if self.shares:
            data["shares"] = [layer.to_json() for layer in self.shares]
        if self.variants:
            variants = [variant.to_json() for variant in self.variants]
            data["variants"] = [{name: variant[name] for name in _OF_VARIANTS if name in variant} for variant in variants]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of `to_json`; a layer may have a `count`, for that many equal layers in a row."""
        values = dict(check_record(data, cls, "a profile", error=CostsError))
        values["layers"] = list(_layers_from_json(values["layers"]))
        if "shares" in values:
            values["shares"] = list(_layers_from_json(values["shares"]))
        variants = values.pop("variants", [])
        if not isinstance(variants, list):
            raise CostsError(f"variants must be a list, got {variants!r}")
        variants = list(variants)
        for place, variant in enumerate(variants):
            own = check_record(variant, cls, "a variant", error=CostsError, omit={field.name for field in fields(cls)} - set(_OF_VARIANTS))
            variants[place] = cls(**{**own, "layers": list(_layers_from_json(own["layers"]))})
        return cls(**values, variants=variants)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` or `.toml` file."""
        from penstock.ir.formats.csv_form import write_whole

        data = self.to_json()
        text = json.dumps(data, indent=1) + "\n" if suffix_of(path) == ".json" else write_toml(data)
        write_whole(path, text)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read a `.json` or `.toml` file."""
        data = read_settings(path)
        try:
            return cls.from_json(data)
        except CostsError as error:
            raise FileFormatError(os.fspath(path), str(error)) from None


def _list_changed(record: Layer | Profile) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if getattr(record, field.name) != field.default}


def _layers_from_json(data: Any) -> Iterable[Layer]:
    if not isinstance(data, list):
        raise CostsError(f"layers must be a list, got {data!r}")
    for place, entry in enumerate(data):
        values = dict(entry) if isinstance(entry, dict) else entry
        count = values.pop("count", 1) if isinstance(values, dict) else 1
        try:
            check_count("count", count)
            layer = Layer.from_json(values)
        except CostsError as error:
            raise CostsError(f"layer {place}: {error}") from None
        yield from [layer] * count


def _parse_size(name: str, value: Any, text: bool = True) -> float:
    if isinstance(value, str) and not text:
        raise CostsError(f"{name} must be a number, got {value!r}")
    return parse_size(value, name)


def write_toml(data: dict[str, Any]) -> str:
    """Plain values first, then lists of tables, which may hold such lists themselves."""
    return "\n".join(_write_toml_lines(data, "")) + "\n"


def _write_toml_lines(data: dict[str, Any], prefix: str) -> Iterator[str]:
    tables = {name: value for name, value in data.items() if isinstance(value, list)}
    for name, value in data.items():
        if name not in tables:
            yield f"{name} = {toml_value(value)}"
    for name, rows in tables.items():
        for row in rows:
            yield ""
            yield f"[[{prefix}{name}]]"
            yield from _write_toml_lines(row, f"{prefix}{name}.")
