"""Layers, profiles, and profiles as JSON and TOML files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from penstock.errors import CostsError, FileFormatError, nearest
from penstock.ir.costs import Costs
from penstock.ir.formats.reading import read_settings, suffix_of
from penstock.text.units import parse_size

TIMES = ("f", "i", "w")
ONCE = ("reduction", "update")
"""Times that count once per step, however many microbatches there are."""
PER_MICROBATCH = ("f", "i", "w", "activation", "weight_stash", "workspace", "output")
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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise CostsError(f"a layer's name is text, got {self.name!r}")
        for field in fields(self)[1:]:
            object.__setattr__(self, field.name, _size(field.name, getattr(self, field.name), text=field.name not in TIMES + ONCE))

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
        return replace(self, **{name: getattr(self, name) * factor for name in PER_MICROBATCH})

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}

    @classmethod
    def from_json(cls, data: Any) -> Layer:
        return cls(**_check_fields(data, "a layer", [field.name for field in fields(cls)], needed=TIMES))


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
    """Which messages share a link, as in `penstock.Costs`."""
    estimated: bool = False
    """Whether the numbers are computed rather than measured; a plan then leaves some memory free."""

    def __post_init__(self) -> None:
        for name in ("layers", "variants"):
            if not isinstance(getattr(self, name), Iterable):
                raise CostsError(f"{name} must be a list, got {type(getattr(self, name)).__name__}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise CostsError("a profile needs at least one layer, each a penstock.Layer")
        for name in ("latency", "input"):
            object.__setattr__(self, name, _size(name, getattr(self, name), text=name == "input"))
        if self.bandwidth is not None:
            object.__setattr__(self, "bandwidth", _size("bandwidth", self.bandwidth))
            if not self.bandwidth:
                raise CostsError("bandwidth must be more than 0, or left out for unlimited")
        _check_count("microbatch", self.microbatch)
        for name in ("time_unit", "size_unit", "source"):
            if not isinstance(getattr(self, name), str):
                raise CostsError(f"{name} must be text, got {getattr(self, name)!r}")
        for name in ("keeps_output", "estimated"):
            if not isinstance(getattr(self, name), bool):
                raise CostsError(f"{name} must be true or false, got {getattr(self, name)!r}")
        Costs(overlap=self.overlap, contention=self.contention)  # checks both
        self._check_variants()

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

    def at(self, microbatch: int) -> Profile:
        """The profile at another microbatch size: as measured, or scaled from the nearest measured size."""
        _check_count("microbatch", microbatch)
        measured = [replace(self, variants=()), *self.variants]
        nearest = min(measured, key=lambda profile: max(profile.microbatch / microbatch, microbatch / profile.microbatch))
        factor = microbatch / nearest.microbatch
        if factor != 1:
            nearest = replace(nearest, layers=[layer.scaled(factor) for layer in nearest.layers], input=nearest.input * factor)
        return replace(self, layers=nearest.layers, input=nearest.input, microbatch=microbatch, variants=())

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        data: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default
        }
        data["layers"] = [layer.to_json() for layer in self.layers]
        if self.variants:
            data["variants"] = [_variant_to_json(variant) for variant in self.variants]
        return data

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of `to_json`; a layer may have a `count`, for that many equal layers in a row."""
        values = dict(_check_fields(data, "a profile", [field.name for field in fields(cls)], needed=("layers",)))
        values["layers"] = list(_layers_from_json(values["layers"]))
        variants = values.pop("variants", [])
        if not isinstance(variants, list):
            raise CostsError(f"variants must be a list, got {variants!r}")
        return cls(**values, variants=[_variant_from_json(variant) for variant in variants])

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` or `.toml` file."""
        from penstock.ir.formats.csv_form import write_whole

        data = self.to_json()
        text = json.dumps(data, indent=1) + "\n" if suffix_of(path) == ".json" else toml_text(data)
        write_whole(path, text)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read a `.json` or `.toml` file."""
        data = read_settings(path)
        try:
            return cls.from_json(data)
        except CostsError as error:
            raise FileFormatError(os.fspath(path), str(error)) from None


def _variant_to_json(variant: Profile) -> dict[str, Any]:
    data = variant.to_json()
    return {name: data[name] for name in ("microbatch", "input", "layers") if name in data}


def _variant_from_json(data: Any) -> Profile:
    values = dict(_check_fields(data, "a variant", ["microbatch", "input", "layers"], needed=("layers",)))
    return Profile(**{**values, "layers": list(_layers_from_json(values["layers"]))})


def _layers_from_json(data: Any) -> Iterable[Layer]:
    if not isinstance(data, list):
        raise CostsError(f"layers must be a list, got {data!r}")
    for place, entry in enumerate(data):
        values = dict(entry) if isinstance(entry, dict) else entry
        count = values.pop("count", 1) if isinstance(values, dict) else 1
        try:
            _check_count("count", count)
            layer = Layer.from_json(values)
        except CostsError as error:
            raise CostsError(f"layer {place}: {error}") from None
        yield from [layer] * count


def _check_fields(data: Any, what: str, names: Sequence[str], needed: Sequence[str]) -> dict[str, Any]:
    """Refuse unknown fields and missing ones."""
    if not isinstance(data, dict):
        raise CostsError(f"{what} is a table of names and values, got {type(data).__name__}")
    for name in data:
        if name not in names:
            raise CostsError(f"{what} has no field {name!r}: {nearest(name, names)}")
    for name in needed:
        if name not in data:
            raise CostsError(f"{what} needs {name!r}")
    return data


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CostsError(f"{name} must be a whole number of at least 1, got {value!r}")


def _size(name: str, value: Any, text: bool = True) -> float:
    if isinstance(value, str) and not text:
        raise CostsError(f"{name} must be a number, got {value!r}")
    return parse_size(value, name)


def toml_text(data: dict[str, Any]) -> str:
    """Plain values first, then lists of tables, which may hold such lists themselves."""
    return "\n".join(_toml_lines(data, "")) + "\n"


def _toml_lines(data: dict[str, Any], prefix: str) -> Iterator[str]:
    tables = {name: value for name, value in data.items() if isinstance(value, list)}
    for name, value in data.items():
        if name not in tables:
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"
    for name, rows in tables.items():
        for row in rows:
            yield ""
            yield f"[[{prefix}{name}]]"
            yield from _toml_lines(row, f"{prefix}{name}.")
