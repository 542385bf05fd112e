"""The ends of a model that are spread over the ranks: its token embedding and its head, which are in no stage.

What the model does around them stays in its stages, which run its own forward: the first stage gets the rows that the ranks have looked
up, and the last one returns the head's input. What the model makes of the head's output is found by a trial, on values that it cannot
know, so that nothing is left out in silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PlacementError
from penstock.runtime.batch.loss import NO_MAP, LogitMap
from penstock.runtime.model.hugging_face.split import HuggingFace, ModelUnits, make_cheap
from penstock.runtime.model.hugging_face.stage_module import EMBEDDINGS, StageState, StandIn, substitute_embedding
from penstock.runtime.model.hugging_face.structure import EndPaths, ModelStructure, copy_with
from penstock.runtime.model.partition import Partition, cut_units
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.torch_internals.modules import BUFFERS, PARAMETERS, own_buffers

_KEEP = "keep it in its stage with ps.Vocabulary"
_LARGEST = 60.0
"""The size of outputs of a head in the trial."""


@dataclass(frozen=True)
class ModelEnds:
    """The ends of a model of `transformers` that are spread, with their full names, and how the rest is cut into stages."""

    split: HuggingFace
    units: ModelUnits = field(repr=False)
    embedding: tuple[str, nn.Module] | None
    head: tuple[str, nn.Module] | None

    @classmethod
    def find(cls, model: Any, split: HuggingFace, *, embedding: bool, head: bool) -> ModelEnds:
        """Find the ends that are to be spread; refuse a model that does with them what shares of them cannot."""
        units = ModelUnits(model)
        structure, order = units.structure, units.order
        words = _find_path(structure, "embedding", structure.model.get_input_embeddings(), order.head) if embedding else None
        last = _find_path(structure, "head", structure.model.get_output_embeddings(), order.tail[-1:]) if head else None
        if words is not None:
            _check_embedding(structure.full_name(words), structure.around[words])
        is_linear = last is not None and isinstance(structure.around[last], nn.Linear)  # any other is refused by its type
        paths = EndPaths(words, last, find_logit_map(units, last) if is_linear and last is not None else NO_MAP)
        ends = [None if path is None else (structure.full_name(path), structure.around[path]) for path in (words, last)]
        return cls(split, ModelUnits(model, paths), *ends)

    @property
    def logits(self) -> LogitMap:
        """How the output of the head becomes logits."""
        return self.units.ends.logits

    def list_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules with parameters, the ends first and last."""
        structure, order = self.units.structure, self.units.order
        layers = (f"{structure.layers}.{number}" for number in range(structure.count))
        for path in dict.fromkeys((*order.head, *layers, *order.tail)):
            yield structure.full_name(path), structure.model.get_submodule(path)

    def cut(self, model: Any, stages: int) -> Partition:
        """Cut the model into stages, each with a layer; sizes count what is around the layers too, as without a spread vocabulary."""
        before, after = self.embedding is not None, self.head is not None
        modules, sizes = self.units.modules(), None if self.split.sizes is None else list(self.split.sizes)
        if before:
            modules = [[*modules[0], *modules[1]], *modules[2:]]
        if after:
            modules = [*modules[:-2], [*modules[-2], *modules[-1]]]
        if sizes:
            sizes[0] -= before
            sizes[-1] -= after
        if sizes and min(sizes) < 1:
            raise PlacementError(
                f"the stages have {list(self.split.sizes or ())} units, embedding and head included: one has no layer beside these, which "
                "are spread over the ranks; use fewer stages"
            )
        cuts = cut_units(modules, stages, sizes, model, unit="layer", more=" beside the ends that are spread over the ranks")
        last = len(modules)
        units = [range(cut.start + before if cut.start else 0, cut.stop + before + (after and cut.stop == last)) for cut in cuts]
        return Partition(tuple(self.units.make_parts(units)))

    # Inputs -----------------------------------------------------------------------------------------------------------

    def find_tokens(self, args: tuple[Any, ...]) -> Any:
        """Return the tokens among the arguments of a microbatch."""
        value = args[0] if len(args) == 1 else None
        return value.get("input_ids") if isinstance(value, Mapping) else value

    def add_embeddings(self, args: tuple[Any, ...], embeddings: Tensor) -> Any:
        """Return the input of the first stage: the arguments of a microbatch, and the embeddings of its tokens."""
        inputs = dict(args[0]) if isinstance(args[0], Mapping) else {"input_ids": args[0]}
        return {**inputs, EMBEDDINGS: embeddings}


def _find_path(structure: ModelStructure, name: str, module: nn.Module, candidates: Sequence[str]) -> str:
    """Return the path of an end, which must be one of the candidates."""
    path = next((path for path in candidates if structure.around[path] is module), None)
    if path is None:
        where = "before its layers" if name == "embedding" else "as its last module"
        raise PlacementError(f"{type(structure.model).__name__} does not run its {name} {where}: {_KEEP}({name}=False)")
    return path


# The embedding --------------------------------------------------------------------------------------------------------


def _check_embedding(name: str, embedding: nn.Module) -> None:
    """Refuse an embedding of a class of its own that does more with its rows than the first stage can do after they are looked up."""
    if not isinstance(embedding, nn.Embedding) or type(embedding).forward is nn.Embedding.forward:
        return
    tokens, width = torch.tensor([[0, 2, 1], [2, 2, 0]]), embedding.embedding_dim
    buffers = {key: _make_real(value) for key, value in own_buffers(embedding).items()}
    with preserve_random_state(), torch.no_grad():
        rows = torch.randn(3, width, dtype=embedding.weight.dtype)
        whole, state = copy.copy(embedding), StageState()
        given = substitute_embedding(embedding, state)
        whole.__dict__ |= {PARAMETERS: {"weight": nn.Parameter(rows)}, BUFFERS: buffers, "padding_idx": None}
        given.__dict__ |= {BUFFERS: buffers}
        state.embeddings = functional.embedding(tokens, rows)
        with suppress(Exception):  # the class may do anything
            if torch.equal(whole(tokens), given(tokens)):
                return
    raise PlacementError(
        f"{name!r} is a {type(embedding).__name__}, whose forward does more than to change the rows that nn.Embedding looks up, so it "
        f"cannot be spread over the ranks: {_KEEP}(embedding=False)"
    )


def _make_real(buffer: Tensor | None) -> Tensor | None:
    """Return the buffer on the host; one on the meta device with some values."""
    if buffer is None or not buffer.is_meta:
        return None if buffer is None else buffer.cpu()
    return torch.full_like(buffer, 3, device="cpu")


# The head -------------------------------------------------------------------------------------------------------------


class _FixedOutput(StandIn):
    """A head whose output does not depend on its input."""

    inner = "original"

    def __init__(self, original: nn.Module, output: Tensor) -> None:
        super().__init__()
        self.original, self.output = original, output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output.to(hidden.device)


def find_logit_map(units: ModelUnits, head: str) -> LogitMap:
    """Find how a model turns the output of its head into logits, from what its forward makes of values of all sizes."""
    structure = units.structure
    cheap, rows = make_cheap(structure, units.order), len(structure.model.get_submodule(head).weight)
    output = torch.linspace(-_LARGEST, _LARGEST, 2 * rows, dtype=torch.float64).view(1, 2, rows)
    model = copy_with(cheap.model, {head: _FixedOutput(cheap.around[head], output)})
    tokens = torch.zeros(1, 2, dtype=torch.long, device=structure.device)
    with torch.no_grad(), preserve_random_state():
        logits = model(input_ids=tokens, **structure.options).logits
    for candidate in _list_candidates(structure.config, output, logits.double().cpu()):
        if candidate.apply(output).shape == logits.shape and torch.allclose(candidate.apply(output), logits.double().cpu(), rtol=1e-5):
            return candidate
    names = [name for name, _ in _list_settings(structure.config, "logit")]
    raise PlacementError(
        f"{type(structure.model).__name__} makes its logits from the output of {structure.full_name(head)} in a way that its shares cannot"
        f"{' (' + ', '.join(names) + ' of its config)' if names else ''}: only a factor and a soft cap are known; {_KEEP}(head=False)"
    )


def _list_candidates(config: Any, output: Tensor, logits: Tensor) -> Iterator[LogitMap]:
    """Yield what the model may do: a soft cap, nothing, or a factor."""
    for _, cap in _list_settings(config, "softcap"):
        yield LogitMap(cap=cap)
    yield NO_MAP
    if output.shape == logits.shape:
        scale = float((output * logits).sum() / (output * output).sum())
        if scale:
            yield LogitMap(scale)


def _list_settings(config: Any, word: str) -> Sequence[tuple[str, float]]:
    """The numbers above 0 of a config whose names have this word in them."""
    values = config.to_dict().items()
    return [(name, float(value)) for name, value in values if word in name and isinstance(value, (int, float)) and value > 0]
