"""The profile of a transformer from its size alone.

With b samples per microbatch, s tokens each, T = bs; h the width, a heads of d numbers each, k the width of all keys (less than ad where
several heads share them), g the width of the feed-forward part and n its matrices (3 where it is gated, else 2), V the vocabulary, e the
bytes of a number. A matrix product counts 2 operations for each of its terms; everything else (norms, additions, look-ups) is free.

    linear maps    2T (2h ad + 2hk + n hg)       attention    4bs^2 ad, and half of that if it is causal and flash skips what is masked;
                                                              back again 2.5 times that with flash, else 2 times
    F = linear + attention,  I = linear + attention back,  W = linear;  the head 2ThV each

    held to I      e T (4h + 2ad + 2k) for norms' inputs, maps' inputs, queries, keys, values and the attention's result, and
                   e T 2g, gated 4g, around the activation function; flash 4 bytes per head and token, else e b a s^2 for the softmax;
                   with dropout a mask of 1 byte per number twice per block (2 T h), and without flash also the mask and the result of the
                   dropped softmax, b a s^2 (1 + e). In 16 bits without flash that is Megatron's sbh (34 + 5 a s / h).
    stashed for W  e T (2h + ad + g) for the maps' inputs and e T (2h + ad + 2k + g), gated 2g, for the gradients of their outputs

With experts, each token passes `experts_per_token` of `experts` and all `shared_experts`, each gated like the dense part and `expert_ffn`
wide, after a router of h x experts. A device keeps its share of the experts, and tokens travel there and back by all-to-all, in F and in I.
With `key_rank`, keys and values are compressed to that many numbers per token and `rope` more for positions (multi-head latent attention,
as in DeepSeek-V3), queries to `query_rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from penstock.errors import CostsError, nearest
from penstock.ir.costs import parse_size
from penstock.planner.profile import Layer, Profile

_BANDWIDTHS = ("bandwidth", "expert_bandwidth", "data_bandwidth", "memory_bandwidth")
_SIZES = ("flops", "latency", "overhead", "bytes", "gradient_bytes", "optimizer_bytes", *_BANDWIDTHS)
_ATTENTION = ("heads", "kv_heads", "head_size", "query_rank", "key_rank")
_COUNTS = (*_ATTENTION, "layers", "hidden", "sequence", "vocabulary", "ffn", "expert_ffn", "experts_per_token", "expert_parallel", "data")
_OR_NONE = ("rope", "experts", "shared_experts", "dense_layers")


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
    causal: bool = True
    """Whether tokens attend only to those before them: flash attention skips the other half, without it all scores are computed."""
    dropout: bool | None = None
    """Whether dropout masks are held; as Megatron's formula has it by default, with them unless attention is flash."""
    head_size: int | None = None
    """Numbers per head of queries, keys and values; the hidden width over the heads unless given."""
    query_rank: int | None = None
    """What queries are compressed to per token, if they are."""
    key_rank: int | None = None
    """What keys and values are compressed to per token, if they are."""
    rope: int = 0
    """With `key_rank`, the numbers for positions that each head of the queries and one shared head of the keys have besides."""
    experts: int = 0
    """Routed experts of a block; none for a dense model."""
    experts_per_token: int = 1
    shared_experts: int = 0
    """Experts that every token passes."""
    expert_ffn: int | None = None
    """The width of one expert; that of the dense feed-forward part unless given."""
    dense_layers: int = 0
    """Blocks at the beginning that have a dense feed-forward part although others have experts."""
    expert_parallel: int = 1
    """Devices that share the experts of a block."""
    expert_bandwidth: float | None = None
    """Bytes per second of the all-to-all between these devices; unlimited unless given."""
    data: int = 1
    """Copies of the pipeline, whose gradients are summed after the last backward."""
    data_bandwidth: float | None = None
    """Bytes per second of the sum of gradients between the copies; unlimited unless given."""
    memory_bandwidth: float | None = None
    """Bytes per second of a device's own memory, which the optimizer's step is bound by; unlimited unless given."""
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
        least = [(name, getattr(self, name), 1) for name in _COUNTS] + [(name, getattr(self, name), 0) for name in _OR_NONE]
        for name, value, low in [*least, *(("microbatch", size, 1) for size in sizes)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
                raise CostsError(f"{name} must be a whole number of at least {low}, got {value!r}")
        for name in _SIZES:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
                if name in _BANDWIDTHS and not getattr(self, name):
                    raise CostsError(f"{name} must be more than 0, or left out for unlimited")
        if not sizes or not self.flops:
            raise CostsError(f"flops={self.flops:g}, microbatch={list(sizes)}: both are needed, and flops must be more than 0")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_size is None and self.hidden % self.heads:
            raise CostsError(f"hidden={self.hidden} cannot be shared among heads={self.heads}: it must be a multiple, or give head_size")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise CostsError(f"heads={self.heads} cannot share kv_heads={self.kv_heads}: it must be a multiple")
        if self.experts and self.experts_per_token > self.experts:
            raise CostsError(f"experts_per_token={self.experts_per_token} of experts={self.experts}: there are not so many")
        if self.experts % self.expert_parallel:
            raise CostsError(f"experts={self.experts} cannot be shared among expert_parallel={self.expert_parallel}: it must be a multiple")
        if (self.shared_experts or self.dense_layers) and not self.experts:
            raise CostsError("shared_experts and dense_layers are for a model with experts: give experts")
        if self.dense_layers > self.layers:
            raise CostsError(f"dense_layers={self.dense_layers} of layers={self.layers}: there are not so many")

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
    def _head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def _width(self) -> int:
        """Of all heads together."""
        return self._head * self.heads

    @property
    def _keys(self) -> int:
        return self._head * (self.kv_heads or self.heads)

    @property
    def _ffn(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _expert(self) -> int:
        """The parameters of one expert."""
        return self._matrices * self.hidden * (self.expert_ffn or self._ffn)

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        blocks = sum(self._block_parameters(place) for place in range(self.layers))
        return blocks + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def active_parameters(self) -> int:
        """How many of them one token passes."""
        idle = self.experts - self.experts_per_token if self.experts else 0
        return self.parameters - (self.layers - self.dense_layers) * idle * self._expert

    def _has_experts(self, place: int) -> bool:
        return self.experts > 0 and place >= self.dense_layers

    def _attention_maps(self) -> list[tuple[int, int]]:
        """The linear maps around attention, each by its two widths."""
        hidden, width = self.hidden, self._width
        queries = self.heads * (self._head + (self.rope if self.key_rank else 0))
        maps = [(hidden, queries)] if self.query_rank is None else [(hidden, self.query_rank), (self.query_rank, queries)]
        if self.key_rank is None:
            maps += [(hidden, self._keys), (hidden, self._keys)]
        else:
            maps += [(hidden, self.key_rank + self.rope), (self.key_rank, 2 * width)]
        return [*maps, (width, hidden)]

    def _block_parameters(self, place: int) -> int:
        """All of a block, on however many devices its experts are."""
        maps = sum(rows * columns for rows, columns in self._attention_maps())
        norms = 2 * self.hidden + (self.query_rank or 0) + (self.key_rank or 0)
        if not self._has_experts(place):
            return maps + norms + self._matrices * self.hidden * self._ffn
        return maps + norms + self.hidden * self.experts + (self.experts + self.shared_experts) * self._expert

    def _kept_parameters(self, place: int) -> int:
        """Those of a block that one device keeps."""
        elsewhere = self.experts - self.experts // self.expert_parallel if self._has_experts(place) else 0
        return self._block_parameters(place) - elsewhere * self._expert

    def profile(self) -> Profile:
        """Its profile, with a variant for each further microbatch size."""
        first, *others = (self._of(size) for size in self.microbatch)  # type: ignore[union-attr]
        source = f"computed for a transformer of {self.parameters / 1e9:.3g}G parameters at {self.flops:.3g} operations a second"
        links = replace(first, latency=self.latency, bandwidth=self.bandwidth, variants=others)
        return replace(links, time_unit="s", size_unit="B", source=source, estimated=True)

    def _of(self, size: int) -> Profile:
        layers = [self._embedding(size), *(self._block(size, place) for place in range(self.layers)), self._last(size)]
        named = [layer if layer.name else replace(layer, name=f"block {place - 1}") for place, layer in enumerate(layers)]
        return Profile(named, microbatch=size, input=8.0 * size * self.sequence)

    def _layer(self, operations: tuple[float, float, float], parameters: int, name: str, **held: float) -> Layer:
        f, i, w = (count / self.flops + self.overhead for count in operations)
        kept = {
            "parameters": parameters * self.bytes,
            "gradients": parameters * self.gradient_bytes,
            "optimizer": parameters * self.optimizer_bytes,
        }
        return Layer(name=name, f=f, i=i, w=w, reduction=self._reduction(parameters), update=self._update(parameters), **kept, **held)

    def _reduction(self, parameters: int) -> float:
        """Seconds to sum gradients over the copies: a ring passes 2 (d - 1) / d of them over each link."""
        if self.data_bandwidth is None or self.data == 1:
            return 0.0
        return 2 * (self.data - 1) / self.data * parameters * self.gradient_bytes / self.data_bandwidth

    def _update(self, parameters: int) -> float:
        """Seconds of the optimizer's step: gradients and its own state are read, the state and the parameters are written."""
        if self.memory_bandwidth is None:
            return 0.0
        return parameters * (self.gradient_bytes + 2 * self.optimizer_bytes + self.bytes) / self.memory_bandwidth

    def _embedding(self, size: int) -> Layer:
        tokens = size * self.sequence
        out = self.bytes * tokens * self.hidden
        held = {"activation": 8.0 * tokens, "weight_stash": 8.0 * tokens + out, "output": out}
        return self._layer((0, 0, 0), self.vocabulary * self.hidden, "embedding", **held)

    def _block(self, size: int, place: int) -> Layer:
        tokens, hidden, width = size * self.sequence, self.hidden, self._width
        maps = self._attention_maps()
        passed = self._passed_widths(place)
        linear = 2 * tokens * (sum(rows * columns for rows, columns in maps) + self._matrices * hidden * sum(passed))
        if self._has_experts(place):
            linear += 2 * tokens * hidden * self.experts
        attention = self._attention(tokens)
        inputs = {rows if rows != hidden else "hidden": rows for rows, _ in maps[:-1]}  # maps of the same input share it
        outputs = sum(columns for _, columns in maps)
        around = (4 if self.gated else 2) * sum(passed)
        if self._has_experts(place):
            around += 2 * self.experts_per_token * hidden  # what each routed expert is given, and what it gives back to be weighted
        # Norms' inputs and the second norm's output are 3h; then come the maps' inputs, queries, keys and values, and what attention makes.
        held = self.bytes * tokens * (3 * hidden + sum(inputs.values()) + outputs - hidden + width + around) + self._scores(tokens)
        stash = (
            self.bytes
            * tokens
            * (sum(inputs.values()) + width + outputs + 2 * len(passed) * hidden + (3 if self.gated else 2) * sum(passed))
        )
        operations = linear + attention, linear + (2.5 if self.flash else 2.0) * attention, linear
        layer = self._layer(
            operations, self._kept_parameters(place), "", activation=held, weight_stash=stash, output=self.bytes * tokens * hidden
        )
        exchanged = self._exchange(tokens) if self._has_experts(place) else 0.0
        return replace(layer, f=layer.f + exchanged, i=layer.i + exchanged)

    def _passed_widths(self, place: int) -> list[int]:
        """The widths of the feed-forward parts that one token passes in a block."""
        if not self._has_experts(place):
            return [self._ffn]
        return [self.expert_ffn or self._ffn] * (self.experts_per_token + self.shared_experts)

    def _attention(self, tokens: int) -> float:
        """The operations of both products of attention, forward: queries with keys, and scores with values."""
        sizes = 2 * self._head + (self.rope if self.key_rank else 0)
        whole = 2.0 * tokens * self.sequence * self.heads * sizes
        return whole / 2 if self.causal and self.flash else whole

    def _scores(self, tokens: int) -> float:
        """What is held of scores and dropout."""
        scores = tokens * self.sequence * self.heads
        dropped = not self.flash if self.dropout is None else self.dropout
        masks = 2.0 * tokens * self.hidden if dropped else 0.0
        if self.flash:
            return 4.0 * tokens * self.heads + masks
        return self.bytes * scores + masks + ((1 + self.bytes) * scores if dropped else 0.0)

    def _exchange(self, tokens: int) -> float:
        """Seconds of two all-to-alls: each token goes to its routed experts, of which most are elsewhere, and comes back."""
        if self.expert_bandwidth is None:
            return 0.0
        away = (self.expert_parallel - 1) / self.expert_parallel
        return 2 * away * tokens * self.experts_per_token * self.hidden * self.bytes / self.expert_bandwidth

    def _last(self, size: int) -> Layer:
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
