"""What each layer of a model takes and holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from penstock.errors import CostsError, FileFormatError, nearest
from penstock.ir.costs import Costs, parse_size
from penstock.ir.reading import read_settings, suffix_of
from penstock.planner.profile_files import toml_text

TIMES = ("f", "i", "w")
ONCE = ("reduction", "update")
"""Times of a whole step, however many microbatches it has."""
PER_MICROBATCH = ("f", "i", "w", "activation", "weight_stash", "workspace", "output")
"""What grows with the microbatch; parameters and what belongs to them do not."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: what it takes and holds for one microbatch, and what it keeps throughout.

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
    """Needed beyond what is held while one of its actions runs."""
    output: float = 0.0
    """What is sent on where the model is cut after this layer, and the gradient that comes back for it."""
    parameters: float = 0.0
    gradients: float = 0.0
    """The gradients of the parameters, which are summed over the microbatches."""
    optimizer: float = 0.0
    """What the optimizer keeps for the parameters."""
    reduction: float = 0.0
    """The time to sum the gradients over copies of the pipeline, once all microbatches are through."""
    update: float = 0.0
    """The time of the optimizer's step."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise CostsError(f"a layer's name is text, got {self.name!r}")
        for each in fields(self)[1:]:
            object.__setattr__(self, each.name, _size(each.name, getattr(self, each.name), text=each.name not in TIMES + ONCE))

    @property
    def time(self) -> float:
        """Forward and both backwards."""
        return self.f + self.i + self.w

    @property
    def static(self) -> float:
        """What a rank with this layer holds all the time."""
        return self.parameters + self.gradients + self.optimizer

    def scaled(self, factor: float) -> Layer:
        """The layer for a microbatch so many times as large, taken to be in proportion."""
        return replace(self, **{name: getattr(self, name) * factor for name in PER_MICROBATCH})

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}

    @classmethod
    def from_json(cls, data: Any) -> Layer:
        return cls(**_known(data, "a layer", [each.name for each in fields(cls)], needed=TIMES))


@dataclass(frozen=True)
class Profile:
    """The layers of a model in their order, the links between ranks, and the microbatch size that all numbers are for.

    Units are the caller's, one for time and one for size; sizes may be written like "40MiB", in bytes then. `variants` are
    the same layers measured at other microbatch sizes.

    >>> Profile([Layer(f=1.0, i=1.0, w=1.0)] * 4).time
    12.0
    """

    layers: Sequence[Layer]
    latency: float = 0.0
    """What a message takes however small it is."""
    bandwidth: float | None = None
    """Size a time that a link carries; unlimited unless given."""
    microbatch: int = 1
    """How many samples a microbatch has."""
    input: float = 0.0
    """The size of a microbatch as the first layer gets it."""
    time_unit: str = ""
    """The unit of times, for reports: s, ms, us or ns."""
    size_unit: str = ""
    """The unit of sizes, for reports: B where they are bytes."""
    source: str = ""
    """Where the numbers are from."""
    keeps_output: bool = False
    """Whether a stage also holds its output from F to I, as ours do; a layer's activation does not count it then."""
    variants: Sequence[Profile] = ()
    overlap: float = 1.0
    """What actions that run together take, as a share of what they take one after the other."""
    contention: str = "independent"
    """Which messages share a link, as in `penstock.Costs`."""
    estimated: bool = False
    """Whether the numbers are computed rather than measured, so that a plan leaves some memory free."""

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
        Costs(overlap=self.overlap, contention=self.contention)  # refuses what costs cannot have
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
        """A transformer by its size, from formulas: the fields of `penstock.planner.transformer.Transformer`."""
        from penstock.planner.transformer import Transformer

        return Transformer.from_fields(fields).profile()

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The microbatch sizes that there are numbers for."""
        return (self.microbatch, *(variant.microbatch for variant in self.variants))

    @property
    def time(self) -> float:
        """What one microbatch takes on one device."""
        return sum(layer.time for layer in self.layers)

    def at(self, microbatch: int) -> Profile:
        """The profile for another microbatch size: as measured if it was, else in proportion to the nearest size that was."""
        _check_count("microbatch", microbatch)
        own = [replace(self, variants=()), *self.variants]
        near = min(own, key=lambda each: max(each.microbatch / microbatch, microbatch / each.microbatch))
        factor = microbatch / near.microbatch
        if factor != 1:
            near = replace(near, layers=[layer.scaled(factor) for layer in near.layers], input=near.input * factor)
        return replace(self, layers=near.layers, input=near.input, microbatch=microbatch, variants=())

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        said: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}
        said["layers"] = [layer.to_json() for layer in self.layers]
        if self.variants:
            said["variants"] = [_variant(variant) for variant in self.variants]
        return said

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The reverse of `to_json`; a layer may have a `count`, for so many like it in a row."""
        given = dict(_known(data, "a profile", [each.name for each in fields(cls)], needed=("layers",)))
        given["layers"] = list(_layers(given["layers"]))
        variants = given.pop("variants", [])
        if not isinstance(variants, list):
            raise CostsError(f"variants must be a list, got {variants!r}")
        return cls(**given, variants=[_from_variant(variant) for variant in variants])

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` or `.toml` file."""
        from penstock.ir.csv_form import write_whole

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


def _variant(variant: Profile) -> dict[str, Any]:
    data = variant.to_json()
    return {name: data[name] for name in ("microbatch", "input", "layers") if name in data}


def _from_variant(data: Any) -> Profile:
    given = dict(_known(data, "a variant", ["microbatch", "input", "layers"], needed=("layers",)))
    return Profile(**{**given, "layers": list(_layers(given["layers"]))})


def _layers(data: Any) -> Iterable[Layer]:
    if not isinstance(data, list):
        raise CostsError(f"layers must be a list, got {data!r}")
    for place, each in enumerate(data):
        given = dict(each) if isinstance(each, dict) else each
        count = given.pop("count", 1) if isinstance(given, dict) else 1
        try:
            _check_count("count", count)
            layer = Layer.from_json(given)
        except CostsError as error:
            raise CostsError(f"layer {place}: {error}") from None
        yield from [layer] * count


def _known(data: Any, what: str, names: Sequence[str], needed: Sequence[str]) -> dict[str, Any]:
    """A table with no other names than these, and all that are needed."""
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
    try:
        return parse_size(value)
    except CostsError as error:
        raise CostsError(f"{name}: {error}") from None
