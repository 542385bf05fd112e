"""The profile of a transformer from its size alone.

With b samples a microbatch, s tokens each, T = bs; h the width, k that of all keys (less than h where several heads share them),
g the width of the feed-forward part and n its matrices (3 where it is gated, else 2), V the vocabulary, e the bytes of a number. A matrix
product counts 2 operations for each of its terms; everything else (norms, additions, look-ups) is taken to be free.

    linear maps    2T (2h^2 + 2hk + n hg)         attention    4bs^2 h, back again 2.5 times that with flash, else 2 times
    F = linear + attention,  I = linear + attention back,  W = linear;  the head 2ThV each

    held to I      e T (5h + h + 2k) for norms' inputs, maps' inputs, queries, keys, values and the attention's result, and
                   e T 2g, gated 4g, around the activation function; flash 4 bytes a head and token, else e b heads s^2
    stashed for W  e T (3h + g) for the maps' inputs and e T (3h + 2k + g), gated 2g, for the gradients of their outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from penstock.errors import CostsError, nearest
from penstock.ir.costs import parse_size
from penstock.planner.profile import Layer, Profile

_SIZES = ("flops", "bandwidth", "latency", "overhead", "bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer: an embedding, `layers` equal blocks, and a head. Times are in seconds, sizes in bytes.

    >>> len(Transformer(layers=2, hidden=64, heads=4, sequence=128, vocabulary=1000, flops=1e12).profile())
    4
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    flops: float
    """Operations a second that the device really reaches."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as of queries unless given."""
    ffn: int | None = None
    """The width of the feed-forward part; 4 times the hidden one unless given."""
    gated: bool = False
    """Whether the feed-forward part has a gate, and so a third matrix."""
    flash: bool = True
    """Whether attention keeps its statistics only, and computes its scores again in the backward."""
    microbatch: int | tuple[int, ...] = 1
    """Samples a microbatch; several numbers for several sizes to choose from."""
    bytes: float = 2.0
    """Of a number: parameters, activations and messages."""
    gradient_bytes: float = 4.0
    """Of a parameter's gradient."""
    optimizer_bytes: float = 12.0
    """That the optimizer keeps for a parameter: a copy and two moments of 4 bytes each."""
    overhead: float = 0.0
    """Seconds that a layer takes for each F, I and W however small the microbatch is."""
    latency: float = 0.0
    bandwidth: float | None = None
    """Bytes a second of a link between two ranks."""

    def __post_init__(self) -> None:
        sizes = self.microbatch if isinstance(self.microbatch, (tuple, list)) else (self.microbatch,)
        object.__setattr__(self, "microbatch", tuple(sizes))
        counts = ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn")
        for name, value in [*((name, getattr(self, name)) for name in counts), *(("microbatch", size) for size in sizes)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise CostsError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in _SIZES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not sizes or not self.flops:
            raise CostsError(f"flops={self.flops:g}, microbatch={list(sizes)}: both are needed, and flops must be more than 0")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise CostsError(f"hidden={self.hidden} cannot be shared among heads={self.heads}: it must be a multiple")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise CostsError(f"heads={self.heads} cannot share kv_heads={self.kv_heads}: it must be a multiple")

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Transformer:
        """From fields by name; a name that there is not gets the nearest ones."""
        known = {each.name: each for each in fields(cls)}
        for name in given:
            if name not in known:
                raise CostsError(f"a transformer has no field {name!r}: {nearest(name, known)}")
        missing = [name for name, each in known.items() if each.default is MISSING and name not in given]
        if missing:
            raise CostsError(f"a transformer needs {', '.join(missing)}")
        return cls(**given)

    @property
    def _keys(self) -> int:
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def _ffn(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return self.layers * self._block_parameters + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def _block_parameters(self) -> int:
        maps = 2 * self.hidden * (self.hidden + self._keys) + (3 if self.gated else 2) * self.hidden * self._ffn
        return maps + 2 * self.hidden

    def profile(self) -> Profile:
        """Its profile, with a variant for each further microbatch size."""
        first, *others = (self._of(size) for size in self.microbatch)  # type: ignore[union-attr]
        source = f"computed for a transformer of {self.parameters / 1e9:.3g}G parameters at {self.flops:.3g} operations a second"
        links = replace(first, latency=self.latency, bandwidth=self.bandwidth, variants=others)
        return replace(links, time_unit="s", size_unit="B", source=source)

    def _of(self, size: int) -> Profile:
        block = self._block(size)
        layers = [self._embedding(size), *[block] * self.layers, self._head(size)]
        named = [layer if layer.name else replace(layer, name=f"block {place - 1}") for place, layer in enumerate(layers)]
        return Profile(named, microbatch=size, input=8.0 * size * self.sequence)

    def _layer(self, operations: tuple[float, float, float], parameters: int, name: str, **held: float) -> Layer:
        f, i, w = (count / self.flops + self.overhead for count in operations)
        kept = {
            "parameters": parameters * self.bytes,
            "gradients": parameters * self.gradient_bytes,
            "optimizer": parameters * self.optimizer_bytes,
        }
        return Layer(name=name, f=f, i=i, w=w, **kept, **held)

    def _embedding(self, size: int) -> Layer:
        tokens = size * self.sequence
        out = self.bytes * tokens * self.hidden
        held = {"activation": 8.0 * tokens, "weight_stash": 8.0 * tokens + out, "output": out}
        return self._layer((0, 0, 0), self.vocabulary * self.hidden, "embedding", **held)

    def _block(self, size: int) -> Layer:
        tokens, hidden, keys, ffn = size * self.sequence, self.hidden, self._keys, self._ffn
        linear = 2 * tokens * (2 * hidden * (hidden + keys) + (3 if self.gated else 2) * hidden * ffn)
        attention = 4 * tokens * self.sequence * hidden
        back = 2.5 if self.flash else 2.0
        statistics = 4.0 * tokens * self.heads if self.flash else self.bytes * tokens * self.sequence * self.heads
        held = {
            "activation": self.bytes * tokens * (6 * hidden + 2 * keys + (4 if self.gated else 2) * ffn) + statistics,
            "weight_stash": self.bytes * tokens * (6 * hidden + 2 * keys + (3 if self.gated else 2) * ffn),
            "output": self.bytes * tokens * hidden,
        }
        return self._layer((linear + attention, linear + back * attention, linear), self._block_parameters, "", **held)

    def _head(self, size: int) -> Layer:
        tokens = size * self.sequence
        product = 2 * tokens * self.hidden * self.vocabulary
        logits = self.bytes * tokens * self.vocabulary
        maps_input = self.bytes * tokens * self.hidden
        held = {"activation": 2 * maps_input + logits, "weight_stash": maps_input + logits, "output": logits}
        return self._layer((product, product, product), self.vocabulary * self.hidden + self.hidden, "head", **held)


def _number(name: str, value: Any) -> float:
    try:
        return parse_size(value)
    except CostsError as error:
        raise CostsError(f"{name}: {error}") from None
