"""The profile of a transformer from its size alone.

With b samples per microbatch, s tokens each, T = bs; h the width, a heads of d numbers each, k the width of all keys (less than ad where
several heads share them), g the width of the feed-forward part and n its matrices (3 if it is gated, else 2), V the vocabulary, e the
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

A slice of n tokens after p others takes n/s of the linear maps and (2 p n + n^2) / s^2 of the attention, in I as in F; W has no attention.
It holds n/s of the activation. Keys and values, e b n 2k of that (with `key_rank` those of all heads, and the positions with each key), are
kept until the backward of the first slice; the gradients that later slices add to them take 4 b n 2k more, or e b n 2k if e is more than 4.
This needs causal attention and flash: other attention looks ahead, or holds scores that grow with the prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from penstock.errors import CostsError
from penstock.ir.formats.reading import check_record
from penstock.planner.profile.profile import Layer, Profile
from penstock.planner.profile.slices import SUM_BYTES, SliceCost, SliceCosts
from penstock.text.units import check_count, check_number, parse_rate, parse_size, parse_time, shorten

_BANDWIDTHS = ("bandwidth", "expert_bandwidth", "data_bandwidth", "memory_bandwidth")
_RATE = "the number of operations per second that a device reaches in practice: write a number above 0, like flops=400e12"
_TIMES = ("latency", "overhead")
_SIZES = ("bytes", "gradient_bytes", "optimizer_bytes")
_ATTENTION = ("heads", "kv_heads", "head_size", "query_rank", "key_rank")
_COUNTS = (*_ATTENTION, "layers", "hidden", "sequence", "vocabulary", "ffn", "expert_ffn", "experts_per_token", "expert_parallel", "data")
_OR_NONE = ("rope", "experts", "shared_experts", "dense_layers")
_FLAGS = ("gated", "flash", "causal", "dropout")


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
    """Operations per second that the device reaches in practice."""
    kv_heads: int | None = None
    """Heads of keys and values; as many as query heads by default."""
    ffn: int | None = None
    """Width of the feed-forward part; 4 times `hidden` by default."""
    gated: bool = False
    """Whether the feed-forward part is gated, with a third matrix."""
    flash: bool = True
    """Whether attention keeps only its statistics and recomputes the scores in the backward."""
    causal: bool = True
    """Whether tokens attend only to those before them: flash attention then skips the masked half."""
    dropout: bool | None = None
    """Whether dropout masks are held; by default as in Megatron's formula: only without flash attention."""
    head_size: int | None = None
    """Numbers per head of queries, keys and values; `hidden / heads` by default."""
    query_rank: int | None = None
    """Numbers per token that queries are compressed to; not compressed by default."""
    key_rank: int | None = None
    """Numbers per token that keys and values are compressed to; not compressed by default."""
    rope: int = 0
    """With `key_rank`, the extra position numbers of each query head and of the one shared key head."""
    experts: int = 0
    """Routed experts per block; 0 for a dense model."""
    experts_per_token: int = 1
    shared_experts: int = 0
    """Experts that every token passes."""
    expert_ffn: int | None = None
    """The width of one expert; `ffn` by default."""
    dense_layers: int = 0
    """Leading blocks with a dense feed-forward part in a model with experts."""
    expert_parallel: int = 1
    """Devices that share the experts of a block."""
    expert_bandwidth: float | None = None
    """Bytes per second of the all-to-all between these devices; unlimited by default."""
    data: int = 1
    """Data-parallel replicas of the pipeline, whose gradients are reduced after the last backward."""
    data_bandwidth: float | None = None
    """Bytes per second of the gradient reduction between replicas; unlimited by default."""
    memory_bandwidth: float | None = None
    """Bytes per second of device memory, which bounds the optimizer step; unlimited by default."""
    microbatch: int | tuple[int, ...] = 1
    """Samples per microbatch; a tuple gives several sizes to choose from."""
    bytes: float = 2.0
    """Bytes per parameter, activation and message element."""
    gradient_bytes: float = 4.0
    """Bytes per gradient element."""
    optimizer_bytes: float = 12.0
    """Bytes of optimizer state per parameter: by default a copy and two moments of 4 bytes each."""
    overhead: float = 0.0
    """Seconds that every F, I and W of a layer takes, independent of the microbatch size; or text with a unit, such as "5us"."""
    latency: float = 0.0
    """Seconds of a message of size 0; or text with a unit, such as "5us"."""
    bandwidth: float | None = None
    """Bytes per second of a link between two ranks."""

    def __post_init__(self) -> None:
        sizes = self.microbatch if isinstance(self.microbatch, (tuple, list)) else (self.microbatch,)
        object.__setattr__(self, "microbatch", tuple(sizes))
        least = [(name, getattr(self, name), 1) for name in _COUNTS] + [(name, getattr(self, name), 0) for name in _OR_NONE]
        optional = {field.name for field in fields(self) if field.default is None}
        for name, value, low in [*least, *(("microbatch", size, 1) for size in sizes)]:
            if value is not None or name not in optional:
                check_count(name, value, low)
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in optional):
                raise CostsError(f"{name} must be true or false, got {shorten(value)}")
        for name in _SIZES:
            object.__setattr__(self, name, parse_size(getattr(self, name), name))
        for name in _TIMES:
            object.__setattr__(self, name, parse_time(getattr(self, name), name))
        for name in _BANDWIDTHS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_rate(getattr(self, name), name))
                if not getattr(self, name):
                    raise CostsError(f"{name} must be more than 0, or left out for unlimited")
        if not sizes:
            raise CostsError("microbatch is empty: give the samples per microbatch, or several sizes to choose from")
        try:
            object.__setattr__(self, "flops", check_number("flops", self.flops))
        except CostsError:
            raise CostsError(f"flops={self.flops}: flops is {_RATE}") from None
        if not self.flops:
            raise CostsError(f"flops=0: flops is {_RATE}")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_size is None and self.hidden % self.heads:
            raise CostsError(f"hidden={self.hidden} cannot be shared among heads={self.heads}: make it a multiple, or give head_size")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise CostsError(f"heads={self.heads} cannot share kv_heads={self.kv_heads}: it must be a multiple")
        if self.experts and self.experts_per_token > self.experts:
            raise CostsError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        if self.experts % self.expert_parallel:
            raise CostsError(f"experts={self.experts} cannot be shared among expert_parallel={self.expert_parallel}: it must be a multiple")
        if (self.shared_experts or self.dense_layers) and not self.experts:
            raise CostsError("shared_experts and dense_layers need a model with experts: give experts")
        if self.dense_layers > self.layers:
            raise CostsError(f"dense_layers={self.dense_layers} is more than layers={self.layers}")

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Transformer:
        """Build from field values by name; an unknown name is refused with the nearest known ones."""
        try:
            checked = check_record(dict(values), cls, "a transformer", error=CostsError)
        except CostsError as error:
            raise (error if "flops" in values else CostsError(f"{error}; flops is {_RATE}")) from None
        return cls(**checked)

    @property
    def _can_be_sliced(self) -> bool:
        """Whether slices of a sequence can be computed one after the other, with memory that grows with their tokens alone."""
        return self.causal and self.flash

    @property
    def _head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def _ffn(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _expert(self) -> int:
        """Parameters of one expert."""
        return self._matrices * self.hidden * (self.expert_ffn or self._ffn)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        blocks = sum(self._block_parameters(place) for place in range(self.layers))
        return blocks + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through."""
        idle = self.experts - self.experts_per_token if self.experts else 0
        return self.parameters - (self.layers - self.dense_layers) * idle * self._expert

    def _has_experts(self, place: int) -> bool:
        return self.experts > 0 and place >= self.dense_layers

    def _list_attention_maps(self) -> list[tuple[int, int]]:
        """The linear maps around attention, as (rows, columns)."""
        hidden, width, keys = self.hidden, self._head * self.heads, self._head * (self.kv_heads or self.heads)
        queries = self.heads * (self._head + (self.rope if self.key_rank else 0))
        maps = [(hidden, queries)] if self.query_rank is None else [(hidden, self.query_rank), (self.query_rank, queries)]
        if self.key_rank is None:
            maps += [(hidden, keys), (hidden, keys)]
        else:
            maps += [(hidden, self.key_rank + self.rope), (self.key_rank, 2 * width)]
        return [*maps, (width, hidden)]

    def _block_parameters(self, place: int) -> int:
        """Parameters of a block, over all devices that share its experts."""
        maps = sum(rows * columns for rows, columns in self._list_attention_maps())
        norms = 2 * self.hidden + (self.query_rank or 0) + (self.key_rank or 0)
        if not self._has_experts(place):
            return maps + norms + self._matrices * self.hidden * self._ffn
        return maps + norms + self.hidden * self.experts + (self.experts + self.shared_experts) * self._expert

    def _count_kept_parameters(self, place: int) -> int:
        """Parameters of a block that one device keeps."""
        elsewhere = self.experts - self.experts // self.expert_parallel if self._has_experts(place) else 0
        return self._block_parameters(place) - elsewhere * self._expert

    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of a dense block, as optimizers that work on whole matrices see them."""
        return [*self._list_attention_maps(), *[(self.hidden, self._ffn)] * (self._matrices - 1), (self._ffn, self.hidden)]

    @property
    def feed_forward(self) -> int:
        """The width of a dense feed-forward part."""
        return self._ffn

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Numbers per token of all query heads, and of all key heads."""
        return self._head * self.heads, self._head * (self.kv_heads or self.heads)

    def profile(self) -> Profile:
        """The estimated profile, with one variant per further microbatch size."""
        first, *others = (self._profile_at(size) for size in self.microbatch)  # type: ignore[union-attr]
        source = f"computed for a transformer of {self.parameters / 1e9:.3g}G parameters at {self.flops:.3g} operations per second"
        links = replace(first, latency=self.latency, bandwidth=self.bandwidth, variants=others)
        tokens = self.sequence if self._can_be_sliced else None
        return replace(links, time_unit="s", size_unit="B", source=source, estimated=True, tokens=tokens)

    def _profile_at(self, size: int) -> Profile:
        layers = [self._build_embedding(size), *(self._block(size, place) for place in range(self.layers)), self._build_last(size)]
        return Profile(layers, microbatch=size, input=8.0 * size * self.sequence)

    def _build_layer(self, operations: tuple[float, float, float], parameters: int, name: str, **held: float) -> Layer:
        f, i, w = (count / self.flops + self.overhead for count in operations)
        slices = self._build_slice_costs((f, i, w), held) if self._can_be_sliced else None
        kept = {
            "parameters": parameters * self.bytes,
            "gradients": parameters * self.gradient_bytes,
            "optimizer": parameters * self.optimizer_bytes,
        }
        once = {"reduction": self._time_reduction(parameters), "update": self._update(parameters)}
        return Layer(name=name, f=f, i=i, w=w, slices=slices, **once, **kept, **held)

    def _build_slice_costs(self, times: tuple[float, float, float], held: Mapping[str, float]) -> SliceCosts:
        """A slice of a layer without attention: its tokens' share, after the overhead."""
        f, i, w = (SliceCost(self.overhead, (time - self.overhead) / self.sequence) for time in times)
        sizes: dict[str, Any] = {name: SliceCost(token=held[name] / self.sequence) for name in ("activation", "weight_stash")}
        return SliceCosts(f=f, i=i, w=w, **sizes)

    def _time_reduction(self, parameters: int) -> float:
        """Seconds of a ring all-reduce of the gradients: 2 (d - 1) / d of them pass each link."""
        if self.data_bandwidth is None or self.data == 1:
            return 0.0
        return 2 * (self.data - 1) / self.data * parameters * self.gradient_bytes / self.data_bandwidth

    def _update(self, parameters: int) -> float:
        """Seconds of the optimizer step: it reads gradients and state, and writes state and parameters."""
        if self.memory_bandwidth is None:
            return 0.0
        return parameters * (self.gradient_bytes + 2 * self.optimizer_bytes + self.bytes) / self.memory_bandwidth

    def _build_embedding(self, size: int) -> Layer:
        tokens = size * self.sequence
        out = self.bytes * tokens * self.hidden
        held = {"activation": 8.0 * tokens, "weight_stash": 8.0 * tokens + out, "output": out}
        return self._build_layer((0, 0, 0), self.vocabulary * self.hidden, "embedding", **held)

    def _block(self, size: int, place: int) -> Layer:
        tokens, hidden, width = size * self.sequence, self.hidden, self._head * self.heads
        maps = self._list_attention_maps()
        passed = self._list_passed_widths(place)
        linear = 2 * tokens * (sum(rows * columns for rows, columns in maps) + self._matrices * hidden * sum(passed))
        if self._has_experts(place):
            linear += 2 * tokens * hidden * self.experts
        attention = self._count_attention(tokens)
        inputs = {rows if rows != hidden else "hidden": rows for rows, _ in maps[:-1]}  # maps of the same input share it
        outputs = sum(columns for _, columns in maps)
        around = (4 if self.gated else 2) * sum(passed)
        if self._has_experts(place):
            around += 2 * self.experts_per_token * hidden  # the input of each routed expert, and its output before weighting
        # 3h for the norms' inputs and the second norm's output, then the maps' inputs, queries, keys and values, and the attention output.
        held = self.bytes * tokens * (3 * hidden + sum(inputs.values()) + outputs - hidden + width + around) + self._scores(tokens)
        stashed = sum(inputs.values()) + width + outputs + 2 * len(passed) * hidden + (3 if self.gated else 2) * sum(passed)
        memory = {"activation": held, "weight_stash": self.bytes * tokens * stashed, "output": self.bytes * tokens * hidden}
        operations = linear + attention, linear + (2.5 if self.flash else 2.0) * attention, linear
        layer = self._build_layer(operations, self._count_kept_parameters(place), f"block {place}", **memory)
        exchanged = self._exchange(tokens) if self._has_experts(place) else 0.0
        slices = layer.slices and self._add_attention(layer.slices, size, attention, exchanged)
        return replace(layer, f=layer.f + exchanged, i=layer.i + exchanged, slices=slices)

    def _add_attention(self, slices: SliceCosts, size: int, attention: float, exchanged: float) -> SliceCosts:
        """Turn the attention's part of a slice, so far a share per token, into one per pair of tokens, and add the exchange of experts.

        The sequence has half the square of its tokens as pairs. Keys and values, so far part of the activation, are counted apart from it.
        """
        whole, exchange = attention / self.flops, SliceCost(token=exchanged / self.sequence)

        def move(cost: SliceCost, passes: float) -> SliceCost:
            token = max(cost.token - passes * whole / self.sequence, 0.0)
            return replace(cost, token=token, pair=2 * passes * whole / self.sequence**2) + exchange

        within = size * 2 * self._head * (self.heads if self.key_rank else self.kv_heads or self.heads)
        numbers = within + (size * self.heads * self.rope if self.key_rank else 0)  # positions are copied into the key of every head
        activation = replace(slices.activation, token=slices.activation.token - self.bytes * within)
        sizes: dict[str, Any] = {"keys": self.bytes * numbers, "key_gradients": max(self.bytes, SUM_BYTES) * numbers}
        return replace(slices, f=move(slices.f, 1.0), i=move(slices.i, 2.5), activation=activation, **sizes)

    def _list_passed_widths(self, place: int) -> list[int]:
        """Widths of the feed-forward parts that one token passes in a block."""
        if not self._has_experts(place):
            return [self._ffn]
        return [self.expert_ffn or self._ffn] * (self.experts_per_token + self.shared_experts)

    def _count_attention(self, tokens: int) -> float:
        """Forward operations of both attention products: queries with keys, and scores with values."""
        sizes = 2 * self._head + (self.rope if self.key_rank else 0)
        whole = 2.0 * tokens * self.sequence * self.heads * sizes
        return whole / 2 if self.causal and self.flash else whole

    def _scores(self, tokens: int) -> float:
        """Bytes held for scores and dropout masks."""
        scores = tokens * self.sequence * self.heads
        dropped = not self.flash if self.dropout is None else self.dropout
        masks = 2.0 * tokens * self.hidden if dropped else 0.0
        if self.flash:
            return 4.0 * tokens * self.heads + masks
        return self.bytes * scores + masks + ((1 + self.bytes) * scores if dropped else 0.0)

    def _exchange(self, tokens: int) -> float:
        """Seconds of two all-to-alls: each token goes to its routed experts and comes back."""
        if self.expert_bandwidth is None:
            return 0.0
        away = (self.expert_parallel - 1) / self.expert_parallel
        return 2 * away * tokens * self.experts_per_token * self.hidden * self.bytes / self.expert_bandwidth

    def _build_last(self, size: int) -> Layer:
        tokens = size * self.sequence
        product = 2 * tokens * self.hidden * self.vocabulary
        logits = self.bytes * tokens * self.vocabulary
        maps_input = self.bytes * tokens * self.hidden
        held = {"activation": 2 * maps_input + logits, "weight_stash": maps_input + logits, "output": logits}
        return self._build_layer((product, product, product), self.vocabulary * self.hidden + self.hidden, "head", **held)
