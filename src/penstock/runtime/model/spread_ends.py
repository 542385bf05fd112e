"""The two ends of a model whose vocabulary is spread over the ranks: its embedding and its head, which are in no stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from penstock.errors import PlacementError
from penstock.runtime.batch.loss import NO_MAP, LogitMap
from penstock.runtime.model.hugging_face import HuggingFace, ModelEnds
from penstock.runtime.model.partition import Layers, list_layers
from penstock.runtime.torch_internals.modules import has_forward_hooks


class FirstInput(Protocol):
    """Where the tokens are in the batch, and what the first stage gets if their embedding is spread over the ranks."""

    def find_tokens(self, args: tuple[Any, ...]) -> Any:
        """Return the tokens among the arguments of a microbatch; anything else if there are none."""

    def add_embeddings(self, args: tuple[Any, ...], embeddings: Tensor) -> Any:
        """Return the input of the first stage."""


class TokensAlone:
    """For models of layers: the batch is the tokens, and the first stage gets their embeddings."""

    def find_tokens(self, args: tuple[Any, ...]) -> Any:
        return args[0] if len(args) == 1 else None

    def add_embeddings(self, args: tuple[Any, ...], embeddings: Tensor) -> Any:
        return embeddings


@dataclass(frozen=True)
class SpreadEnds:
    """The layers of a model that are spread over the ranks, with their names in the model; None for one that stays in its stage."""

    embedding: tuple[str, nn.Embedding] | None
    head: tuple[str, nn.Linear] | None
    logits: LogitMap = NO_MAP
    """How the output of the head becomes logits."""
    first_input: FirstInput = field(default_factory=TokensAlone)

    @property
    def are_tied(self) -> bool:
        """Whether both ends are spread and have one weight."""
        return self.embedding is not None and self.head is not None and self.embedding[1].weight is self.head[1].weight

    @property
    def names(self) -> list[str]:
        return [end[0] for end in (self.embedding, self.head) if end is not None]


def take_ends(model: Any, split: Any, plan: Any, stages: int, *, embedding: bool, head: bool) -> tuple[nn.Module, Any, SpreadEnds]:
    """Return the model, the split of the layers between the ends that are spread, and these ends.

    A list of modules is taken as the layers of an `nn.Sequential`, one per stage between the ends unless the split or the plan says
    otherwise. A plan counts the ends in its first and last stage.
    """
    planned = None if isinstance(plan, str) else getattr(plan, "partition", None)
    if isinstance(split, HuggingFace):
        split = replace(split, sizes=planned) if split.sizes is None else split
        return model, *_take_ends_of_transformer(ModelEnds.find(model, split, embedding=embedding, head=head))
    listed = isinstance(model, (list, tuple, nn.ModuleList))
    if listed:
        model = nn.Sequential(*model)
    if isinstance(model, Mapping) or not (split is None or isinstance(split, (Layers, Sequence))):
        raise PlacementError(
            "a vocabulary can be spread over the ranks if the whole model is known by its layers: give an nn.Sequential, a list of layers, "
            "or split=Layers(...), with the embedding first and the head last"
        )
    names, layers = list_layers(model, split)
    count = len(layers) - embedding - head
    if count < stages:
        raise PlacementError(f"{len(layers)} layers, of which {count} lie between the spread ends: each of {stages} stages needs one")
    ends = SpreadEnds(
        _check_embedding(names[0], layers[0]) if embedding else None,
        _check_head(names[-1], layers[-1]) if head else None,
    )
    _check_ties(ends, dict(zip(names, layers, strict=True)))
    sizes = split.sizes if isinstance(split, Layers) else split
    if sizes is None and planned is not None:
        sizes = list(planned)
        sizes[0] -= embedding
        sizes[-1] -= head
        if min(sizes) < 1:
            raise PlacementError(
                f"the plan's stages have {list(planned)} layers, embedding and head included: one has no other layer; plan for fewer stages"
            )
    if sizes is None and listed and count == stages:
        sizes = [1] * stages
    return model, replace(split, sizes=sizes) if isinstance(split, Layers) else sizes, ends


def _take_ends_of_transformer(found: ModelEnds) -> tuple[ModelEnds, SpreadEnds]:
    """Return what cuts the model between its ends, and these."""
    ends = SpreadEnds(
        None if found.embedding is None else _check_embedding(*found.embedding, own_forward=True),
        None if found.head is None else _check_head(*found.head),
        found.logits,
        found,
    )
    _check_ties(ends, dict(found.list_layers()))
    return found, ends


def _check_embedding(name: str, layer: nn.Module, *, own_forward: bool = False) -> tuple[str, nn.Embedding]:
    """Refuse other embeddings; with `own_forward`, the first stage does what a class of its own does with the rows."""
    if not isinstance(layer, nn.Embedding) or (type(layer).forward is not nn.Embedding.forward and not own_forward):
        raise PlacementError(
            f"the vocabulary is spread over the ranks, so the first layer must be an nn.Embedding: {_describe(name, layer)}"
        )
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise PlacementError(
            f"embedding {name!r} has max_norm, scale_grad_by_freq or sparse, which shares of it cannot have: leave them out"
        )
    _check_weights(name, layer)
    return name, layer


def _check_head(name: str, layer: nn.Module) -> tuple[str, nn.Linear]:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise PlacementError(f"the vocabulary is spread over the ranks, so the last layer must be an nn.Linear: {_describe(name, layer)}")
    _check_weights(name, layer)
    return name, layer


def _describe(name: str, layer: nn.Module) -> str:
    kind = type(layer)
    is_like_torch_s = kind.__name__ in ("Embedding", "Linear") and not kind.__module__.startswith("torch.")  # as of an adapter
    own = f"{kind.__module__}.{kind.__name__}" if is_like_torch_s else kind.__name__
    return f"{name!r} is a {own}; leave that layer in its stage with ps.Vocabulary(embedding=..., head=...) otherwise"


def _check_weights(name: str, layer: nn.Module) -> None:
    if has_forward_hooks(layer) or not all(type(parameter) is nn.Parameter for parameter in layer.parameters()) or list(layer.children()):
        raise PlacementError(f"{name!r} has hooks or parametrizations, which shares of it would not run: leave them out")


def _check_ties(ends: SpreadEnds, layers: Mapping[str, nn.Module]) -> None:
    """Refuse an end whose weight a layer has that is not spread."""
    names = list(layers)
    for name in ends.names:
        own = {id(parameter) for parameter in layers[name].parameters()}
        other = next((n for n, layer in layers.items() if n not in ends.names and any(id(p) in own for p in layer.parameters())), None)
        if other in (names[0], names[-1]):
            raise PlacementError(
                f"{name!r} shares its weight with {other!r}, but only {name!r} is spread over the ranks: spread both, with "
                "ps.Vocabulary(embedding=True, head=True), or give each its own"
            )
        if other is not None:
            raise PlacementError(
                f"{name!r} shares its weight with {other!r}, which is in a stage: only the embedding and the head can be spread over the "
                "ranks; give each its own"
            )
