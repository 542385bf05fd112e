"""The whole ends of a model whose vocabulary is spread over the ranks, for a comparison with the unpipelined model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from penstock.runtime.batch.loss import LogitMap
from penstock.runtime.model.spread_ends import FirstInput
from penstock.runtime.model.tied_parameters import Gather
from penstock.runtime.parallel.spread_vocabulary import SpreadVocabulary


@dataclass(frozen=True)
class WholeEnds:
    """Copies of the embedding and the head as they are trained, on one rank; None for an end that is in its stage."""

    embedding: nn.Embedding | None
    head: nn.Linear | None
    logit_map: LogitMap
    first_input: FirstInput
    rows: dict[str, tuple[Tensor, slice]]
    """The rows of all ranks under their own names: the whole parameter, and their place in it."""

    @classmethod
    def gather(cls, vocabulary: SpreadVocabulary, gather: Gather) -> WholeEnds:
        """Copy all rows to every rank; called on all ranks."""
        weights, embedding, head = vocabulary.gather_weights(gather), None, None
        if vocabulary.embedding is not None:
            shard = vocabulary.embedding
            whole = _make_parameter(weights[f"{vocabulary.names['embedding']}.weight"], shard.weight)
            embedding = nn.Embedding(1, 1)
            embedding.weight, embedding.padding_idx = whole, shard.padding_idx
        if vocabulary.head is not None:
            head = nn.Linear(1, 1, bias=False)
            if embedding is not None and vocabulary.are_tied:
                head.weight = embedding.weight
            else:
                head.weight = _make_parameter(weights[f"{vocabulary.names['head']}.weight"], vocabulary.head.weight)
            if vocabulary.head.bias is not None:
                head.bias = _make_parameter(weights[f"{vocabulary.names['head']}.bias"], vocabulary.head.bias)
        modules = {vocabulary.names["head"]: head, vocabulary.names["embedding"]: embedding}
        parameters = {f"{name}.{kind}": value for name, end in modules.items() if end is not None for kind, value in end.named_parameters()}
        everyone = gather("rows of the vocabulary", vocabulary.describe_rows())
        forms = vocabulary.logit_map, vocabulary.first_input
        return cls(embedding, head, *forms, {name: (parameters[whole], rows) for own in everyone for name, (whole, rows) in own.items()})

    def copy(self) -> WholeEnds:
        ends = copy.deepcopy((self.embedding, self.head, self.rows))
        return replace(self, embedding=ends[0], head=ends[1], rows=ends[2])

    def embed(self, args: tuple[Any, ...]) -> Any:
        """The input of the first stage for the arguments of a microbatch."""
        assert self.embedding is not None
        return self.first_input.add_embeddings(args, self.embedding(self.first_input.find_tokens(args)))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.logit_map.apply(self.head(hidden))

    def list_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """The gradient of every rank's rows."""
        return ((name, None if whole.grad is None else whole.grad[rows]) for name, (whole, rows) in self.rows.items())


def _make_parameter(whole: Tensor, rows: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(whole.to(rows.device, copy=True), requires_grad=rows.requires_grad)


@contextmanager
def preserve_gradients(vocabulary: SpreadVocabulary | None) -> Iterator[None]:
    """Restore the gradients of this rank's rows at the end."""
    before = [] if vocabulary is None else [(parameter, parameter.grad) for _, parameter in vocabulary.named_parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
