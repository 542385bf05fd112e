"""Times and memory of a model's layers on one GPU in one configuration.

Operations and activations are those of `Transformer`, divided among the tensor and context ranks (between blocks, the sequence is shared
among the tensor ranks too). With e bytes per number, T tokens of a microbatch, h the width, ad and k the widths of queries and keys, g that
of the feed-forward part, t tensor and c context ranks, a block adds to that, on each GPU:

    memory traffic     F: eT (10h + 2ad + 4k + 2g, gated 3g) / tc, I: eT (10h + 2ad + 4k + 3g, gated 5g) / tc for norms, additions,
                       rotations and activation functions; with dropout 2Th / tc for masks; without flash 2eT ad / tc for transposing, and
                       for each score 8 bytes forward and 12 backward in 16 bits, with dropout 13 and 17
    tensor ranks       2 all-gathers and 2 reduce-scatters of eTh / c in F and in I each; that of W is hidden by its product
    context ranks      an all-gather of 2eTk / t in F, and in I one more with a reduce-scatter
    sharding           the collectives of `penstock.planner.job.sharding`

A head that is shared among the pipeline ranks takes its operations and traffic divided by them on each; an embedding too. The gathers over
the tensor ranks are not divided: each pipeline rank gathers the whole hidden states for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.job.configuration import Configuration
from penstock.planner.job.job import Job
from penstock.planner.job.sharding import shard_layer, time_update
from penstock.planner.profile import Layer, Profile
from penstock.planner.profile.profile import TIMES
from penstock.planner.profile.vocabulary import cut_share

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Muon's orthogonalisation, as published."""


@dataclass(frozen=True)
class LayerCosts:
    """The layers of a transformer in one configuration: a block, an embedding and a head, and profiles of them."""

    job: Job
    configuration: Configuration
    recompute_all: bool = False
    """Whether every block runs its forward again."""

    # Layers -----------------------------------------------------------------------------------------------------------

    @property
    def block(self) -> Layer:
        """One block."""
        return self.recomputed_block if self.recompute_all else self._kept_block

    @cached_property
    def _kept_block(self) -> Layer:
        """One block that keeps its activations."""
        job, chosen, shards = self.job, self.configuration, self._shards
        machines, counted = job.machines, self._counted[1]
        width, keys = job.transformer.attention_widths
        hidden, ffn, gated = job.transformer.hidden, job.transformer.feed_forward, job.transformer.gated
        number = self._tokens * job.transformer.bytes / shards
        moved = 10 * hidden + 2 * width + 4 * keys + (0 if job.transformer.flash else 2 * width)
        masks = 2.0 * self._tokens * hidden / shards if self._drops else 0.0
        matrices = machines.matmul_time(counted.w / shards)
        scores, scores_back = self._attention
        f = matrices + scores + machines.memory_time(number * (moved + (3 if gated else 2) * ffn) + masks) + self._exchange(1)
        i = matrices + scores_back + machines.memory_time(number * (moved + (5 if gated else 3) * ffn) + masks) + self._exchange(2)
        activation = counted.activation / shards
        if chosen.selective:
            activation -= self._kept_scores
            i += scores
        layer = self._build_layer(counted, (f, i, matrices), activation)
        return replace(layer, update=layer.update + self._time_orthogonalisation(counted.parameters / job.transformer.bytes))

    @cached_property
    def recomputed_block(self) -> Layer:
        """The block if its forward runs again before its backward: it keeps its input only."""
        block = self._kept_block
        return replace(block, i=block.i + block.f, activation=block.output, workspace=block.workspace + block.activation - block.output)

    @cached_property
    def embedding(self) -> Layer:
        """The embedding in its stage; without any work if it is shared among the pipeline ranks."""
        counted = self._counted[0]
        if self.configuration.shared_ends[0]:
            return Layer(name="embedding", f=0.0, i=0.0, w=0.0, output=counted.output / self._shards)
        passed = self._time_embedding()
        return self._build_layer(counted, (passed, passed, 0.0), counted.activation / self._shards, "embedding")

    @cached_property
    def head(self) -> Layer:
        """The head in its stage; without any work if it is shared among the pipeline ranks."""
        if self.configuration.shared_ends[1]:
            return Layer(name="head", f=0.0, i=0.0, w=0.0, output=self.block.output)
        return self._build_layer(self._counted[-1], self._time_head(), self._counted[-1].activation / self._shards, "head")

    @cached_property
    def shares(self) -> tuple[Layer, ...]:
        """Each pipeline rank's share of embedding and head, if one of them is shared; empty for one that is not."""
        if not any(self.configuration.shared_ends):
            return ()
        ranks = self.configuration.pipeline
        passed, (f, i, w) = self._time_embedding(ranks), self._time_head(ranks)
        return (
            self._build_share(0, (passed, passed), "share of the embedding"),
            self._build_share(1, (f + i, w), "share of the head"),
        )

    def _build_share(self, end: int, times: tuple[float, float], name: str) -> Layer:
        """A rank's share of the embedding (0) or of the head (1) with these times of S and T, which are its F and W."""
        if not self.configuration.shared_ends[end]:
            return Layer(name=name, f=0.0, i=0.0, w=0.0)
        counted = cut_share(self._counted[-end], self.configuration.pipeline)
        layer = self._build_layer(counted, (times[0], 0.0, times[1]), counted.activation / self._shards, name)
        return replace(layer, i=0.0)  # S gathers sharded rows once

    def _time_embedding(self, ranks: int = 1) -> float:
        """Seconds of one way through the embedding, or a rank's share of it."""
        moved = 2 * self._counted[0].output / self._shards / ranks
        return self.job.machines.memory_time(moved) + self._gather_hidden()

    def _time_head(self, ranks: int = 1) -> tuple[float, float, float]:
        """Seconds of F, I and W of the head, or of a rank's share of it."""
        machines, counted, number = self.job.machines, self._counted[-1], self.job.transformer.bytes
        product = machines.matmul_time(counted.w / self._shards / ranks)
        logits = counted.output / number / self._shards / ranks
        f = product + machines.memory_time(logits * (2 * number + 12)) + self._gather_hidden()
        i = product + machines.memory_time(logits * (4 + number)) + self._gather_hidden()
        return f, i, product

    @property
    def ends(self) -> tuple[int, int]:
        """Layers before and after the blocks, which are not recomputed."""
        return 1, 1

    @cached_property
    def _named_blocks(self) -> list[tuple[Layer, Layer]]:
        """Every block, kept and recomputed, with its name."""
        pair = self.block, self.recomputed_block
        return [
            (replace(pair[0], name=f"block {place}"), replace(pair[1], name=f"block {place} recomputed"))
            for place in range(self.job.layers)
        ]

    def count_layers(self) -> list[tuple[Layer, Layer, int]]:
        """The kinds of layers, as they are and recomputed as far as they can be, and how many there are of each."""
        return [(self.block, self.recomputed_block, self.job.layers), *((layer, layer, 1) for layer in (self.embedding, self.head))]

    def list_times(self, recomputed: Sequence[bool]) -> Floats:
        """The times of F, I and W (rows) of every layer (columns)."""
        first, kept, again, last = (
            np.array([[getattr(layer, name)] for name in TIMES]) for layer in (self.embedding, self.block, self.recomputed_block, self.head)
        )
        return np.hstack([first, np.where(np.array(recomputed, dtype=bool), again, kept), last])

    def profile(self, recomputed: Sequence[bool] | None = None) -> Profile:
        """The whole model, with these blocks recomputed; none by default."""
        chosen, machines = self.configuration, self.job.machines
        flags = recomputed or [False] * self.job.transformer.layers
        blocks = [(again if flag else kept) for (kept, again), flag in zip(self._named_blocks, flags, strict=True)]
        stride = chosen.tensor * chosen.context * chosen.data
        latency, bandwidth = machines.link(stride, chosen.pipeline)
        return Profile(
            [self.embedding, *blocks, self.head],
            shares=self.shares,
            latency=latency,
            bandwidth=bandwidth,
            microbatch=chosen.microbatch,
            input=8.0 * self._tokens / chosen.context,
            time_unit="s",
            size_unit="B",
            source=f"computed for {chosen.describe()}",
            estimated=True,
        )

    # Parts of a layer -------------------------------------------------------------------------------------------------

    @property
    def _shards(self) -> int:
        """GPUs that share the work on a microbatch in a stage."""
        return self.configuration.tensor * self.configuration.context

    @property
    def _tokens(self) -> int:
        return self.configuration.microbatch * self.job.transformer.sequence

    @property
    def _drops(self) -> bool:
        transformer = self.job.transformer
        return not transformer.flash if transformer.dropout is None else transformer.dropout

    @cached_property
    def _counted(self) -> tuple[Layer, Layer, Layer]:
        """Embedding, block and head of the whole model: times are operations, sizes are bytes."""
        layers = replace(self.job.transformer, layers=1, microbatch=(self.configuration.microbatch,)).profile().layers
        return layers[0], layers[1], layers[2]

    @property
    def _kept_scores(self) -> float:
        """Bytes that attention without flash keeps for scores."""
        flash = replace(self.job.transformer, layers=1, microbatch=(self.configuration.microbatch,), flash=True, dropout=self._drops)
        return (self._counted[1].activation - flash.profile().layers[1].activation) / self._shards

    @property
    def _attention(self) -> tuple[float, float]:
        """Seconds of attention, forward and back."""
        transformer, machines, counted = self.job.transformer, self.job.machines, self._counted[1]
        forward, back = (counted.f - counted.w) / self._shards, (counted.i - counted.w) / self._shards
        if transformer.flash:
            return machines.attention_time(forward), machines.attention_time(back)
        scores, number = self._tokens * transformer.sequence * transformer.heads / self._shards, transformer.bytes
        passed, passed_back = (6 * number + 1, 8 * number + 1) if self._drops else (4 * number, 6 * number)
        forward_time = machines.matmul_time(forward) + machines.memory_time(scores * passed)
        return forward_time, machines.matmul_time(back) + machines.memory_time(scores * passed_back)

    def _gather_hidden(self) -> float:
        """Seconds of one all-gather or reduce-scatter of the hidden states over the tensor ranks."""
        size = self.job.transformer.bytes * self._tokens * self.job.transformer.hidden / self.configuration.context
        return self.job.machines.gather_time(size, self.configuration.tensor)

    def _exchange(self, times: int) -> float:
        """Seconds of a block's collectives: those of tensor ranks once, those of context ranks so many times."""
        chosen = self.configuration
        keys = 2 * self.job.transformer.bytes * self._tokens * self.job.transformer.attention_widths[1] / chosen.tensor
        return 4 * self._gather_hidden() + times * self.job.machines.gather_time(keys, chosen.context, stride=chosen.tensor)

    def _build_layer(self, counted: Layer, times: tuple[float, float, float], activation: float, name: str = "") -> Layer:
        """A layer with these times of F, I and W, with its memory, reduction and update, and the collectives of its sharding."""
        f, i, w = times
        tensor, machines = self.configuration.tensor, self.job.machines
        layer = Layer(
            name=name,
            f=f,
            i=i,
            w=w,
            activation=activation,
            weight_stash=counted.weight_stash / self._shards,
            output=counted.output / self._shards,
            parameters=counted.parameters / tensor,
            gradients=counted.gradients / tensor,
            optimizer=counted.optimizer / tensor,
        )
        return shard_layer(replace(layer, update=time_update(layer, machines)), self.configuration, machines)

    # The optimizer ----------------------------------------------------------------------------------------------------

    def _time_orthogonalisation(self, parameters: float) -> float:
        """Seconds that Muon takes for a block beyond its update: each matrix is made orthogonal by one of the GPUs that share it."""
        if self.job.optimizer != "muon":
            return 0.0
        chosen, model = self.configuration, self.job.transformer
        matrices = [sorted(shape) for shape in model.matrices()]
        operations = NEWTON_SCHULZ_STEPS * sum(4 * low**2 * high + 2 * low**3 for low, high in matrices)
        sharing = chosen.tensor * (chosen.replicas if chosen.sharding else 1)
        owners = min(sharing, max(len(matrices) * model.layers // chosen.pipeline, 1))
        gathered = self.job.machines.gather_time(parameters * model.bytes, chosen.tensor)
        return self.job.machines.matmul_time(operations / owners) + gathered
