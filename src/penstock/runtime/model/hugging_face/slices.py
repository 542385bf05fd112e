"""Models of `transformers` on slices of a sequence: their inputs are cut, and a cache of ours hands each layer the keys of earlier slices.

A slice runs the model's own forward with `past_key_values`, as generation does with a long prompt. So the model makes the mask and the
positions of the slice by itself. Three things that it makes from whole sequences only are added: masks of packed documents, rotary tables
that depend on the length of the sequence, and labels, which are shifted before they are cut.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.batch.loss import Loss, NextTokenCrossEntropy
from penstock.runtime.batch.slices import IGNORED, SequenceCutter, starts_of
from penstock.runtime.model.hugging_face.structure import ModelStructure, find_structure
from penstock.runtime.sequence.prefix import prefix_of

DOCUMENTS, LAST_POSITION = "packed_documents", "last_position"
"""Further inputs of a slice: the number of each token's document up to the slice's end, and the highest position of the sequence."""
_MASK, POSITIONS = "attention_mask", "position_ids"
_ATTENTIONS = {"full_attention", "sliding_attention"}
_ELSE = "use a schedule without slices"


# What can be cut ------------------------------------------------------------------------------------------------------


def check_model(structure: ModelStructure) -> None:
    """Refuse a model whose layers mix tokens in another way than causal attention over a cache."""
    model, config = structure.model, structure.config
    name, core = type(model).__name__, model.get_submodule(structure.base)
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTIONS)
    if others:
        raise PlacementError(f"{name} has layers of type {others[0]!r}, whose state is not kept from slice to slice: {_ELSE}")
    if "past_key_values" not in inspect.signature(core.forward).parameters or getattr(model, "_is_stateful", False):
        raise PlacementError(
            f"{name} takes no past_key_values, as state-space models do not, so its slices cannot see earlier ones: {_ELSE}"
        )
    backward = next((path for path, part in model.named_modules() if getattr(part, "is_causal", True) is False), None)
    if backward is not None or not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        where = f" in {backward}" if backward else ""
        raise PlacementError(f"{name} attends to later tokens{where}, which a slice cannot see: {_ELSE}")
    if getattr(config, "add_cross_attention", False):
        raise PlacementError(f"{name} attends to another sequence, which is not cut: {_ELSE}")


def depends_on_length(module: nn.Module) -> bool:
    """Whether a rotary table depends on the length of the sequence."""
    kinds = getattr(module, "rope_type", None)
    kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def mixes_documents(core: nn.Module) -> bool:
    """Whether a model lets packed documents see each other: its forward makes causal masks, and does not give them the positions.

    If the source is not at hand, or makes its masks in another way, the model is taken to keep documents apart.
    """
    try:
        forward = ast.parse(textwrap.dedent(inspect.getsource(type(core).forward)))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = list(ast.walk(forward))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _MAKES_MASK.fullmatch(getattr(node.func, "id", ""))]
    named = {keyword.arg for call in calls for keyword in call.keywords}
    listed = {key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    return bool(calls) and POSITIONS not in named | listed


_MAKES_MASK = re.compile(r"create_\w*causal_mask")
"""The functions of transformers that make masks, which look for packed documents in the positions that they are given."""


def adapt_cutter(cutter: SequenceCutter, model: Any, *, own_loss: bool) -> SequenceCutter:
    """Return a cutter for the batches of a model, whose own loss is used or another."""
    structure = find_structure(model)
    check_model(structure)
    scales = any(depends_on_length(part) for module in structure.around.values() for part in module.modules())
    mixing = type(structure.model).__name__ if mixes_documents(structure.model.get_submodule(structure.base)) else None
    cutter = replace(cutter, model_inputs=SlicedInputs(scales, mixing))
    if not own_loss:
        return cutter
    own, vocabulary = structure.model.loss_function, structure.config.vocab_size
    if "shift_labels" not in inspect.signature(own).parameters:
        raise PlacementError(
            f"the loss of {type(structure.model).__name__} takes no shift_labels, so it cannot be computed slice by slice: give loss_fn= "
            f"and labels that are shifted already, or {_ELSE}"
        )

    def loss(scores: Tensor, labels: Tensor) -> Any:
        return own(logits=scores, labels=labels, shift_labels=labels.contiguous(), vocab_size=vocabulary)

    return replace(cutter, model_target=NextTokenCrossEntropy(IGNORED).align, loss=Loss(loss, cutter.loss.reduction, counts=_count_valid))


def _count_valid(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


# Cutting the inputs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlicedInputs:
    """Cuts the inputs of a model. A slice gets its own tokens and positions, and the mask of all tokens up to its end."""

    needs_last_position: bool
    """Whether rotary tables depend on the length of the sequence."""
    mixing: str | None = None
    """The name of a model that lets packed documents see each other."""

    def find_length(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        inputs = _name_arguments(args, kwargs)
        tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ScheduleError("the batch has no input_ids of two dimensions, nor inputs_embeds of three, to cut into slices: give one")
        return tokens.shape[1]

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
        inputs = _name_arguments(args, kwargs)
        positions, total = inputs.get(POSITIONS), sum(lengths)
        if inputs.get(_MASK) is None and isinstance(positions, Tensor) and (documents := find_documents(positions)) is not None:
            if self.mixing is not None:
                raise ScheduleError(
                    f"{POSITIONS} start again within a row, as those of packed documents do, but {self.mixing} lets tokens see earlier "
                    f"documents: give an {_MASK} of four dimensions that hides them, or {_ELSE}"
                )
            inputs[DOCUMENTS] = documents
        bounds = pairwise(starts_of(lengths))
        slices = [{name: _cut_input(name, value, start, stop, total) for name, value in inputs.items()} for start, stop in bounds]
        if self.needs_last_position:
            last = torch.tensor(total - 1) if positions is None else positions.max()
            slices = [part | {LAST_POSITION: last.reshape(1, 1)} for part in slices]
        return [(part,) for part in slices]


def _name_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if len(args) != 1 or not isinstance(args[0], (Tensor, Mapping)):
        raise ScheduleError(f"{len(args)} arguments: give a transformers model its tokens, or one dict of its inputs by name")
    return {**(args[0] if isinstance(args[0], Mapping) else {"input_ids": args[0]}), **kwargs}


def find_documents(positions: Tensor) -> Tensor | None:
    """Number the documents that are packed into each row, told by positions that do not go on by one; None if there is one per row."""
    if positions.dim() != 2:
        return None
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return documents if bool((documents[:, -1] != 0).any()) else None


def _cut_input(name: str, value: Any, start: int, stop: int, total: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut_input(name, part, start, stop, total) for key, part in value.items()}
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if name in {_MASK, DOCUMENTS} and value.dim() == 2 and value.shape[1] == total:
        return value[:, :stop].data
    if name == _MASK and value.dim() == 4 and value.shape[-2:] == (total, total):
        return value[:, :, start:stop, :stop].data
    if name == POSITIONS and value.shape[-1] == total:
        return value[..., start:stop].data
    if name not in {_MASK, POSITIONS} and value.dim() > 1 and value.shape[1] == total:
        part = value[:, start:stop]
        return part if value.requires_grad else part.data
    raise ScheduleError(
        f"the input {name!r} of shape {list(value.shape)} cannot be cut into slices of {total} tokens: leave it out, or {_ELSE}"
    )


# The forward of a slice -----------------------------------------------------------------------------------------------


class SliceCache:
    """The cache that the layers of a stage are given: it keeps the keys and values of all slices so far."""

    is_compileable = False

    def __init__(self, start: int, attention: str) -> None:
        self.start, self.attention = start, attention
        self.updates = 0
        """How many layers have kept their keys and values."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values of this slice, and return those of all slices so far."""
        self.updates += 1
        joined: tuple[Tensor, Tensor] = prefix_of(("layer", layer_idx)).extend(keys, values, dim=-2)
        return joined

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys there are, and the position of the first. Older versions of transformers give the queries' positions."""
        queries = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.start + queries, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __len__(self) -> int:
        return 1

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets keys: the mask of a sliding window hides them."""
        return [False]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ScheduleError(f"a layer of the model keeps a state that is not keys and values, which slices cannot hand on: {_ELSE}")

    update_conv_state = update_recurrent_state = update_indexer = get_conv_state = get_recurrent_state = has_previous_state = _refuse


@dataclass
class SliceInputs:
    """The slice that a stage's forward runs."""

    cache: SliceCache
    documents: Tensor | None
    last_position: Tensor | None
    masks: dict[int, tuple[Any, Tensor]]
    """The masks of this forward with documents kept apart, by the id of the model's own mask, which is held too."""

    @classmethod
    def take(cls, carried: Mapping[str, Any], tokens: Tensor, attention: str) -> SliceInputs:
        """Read what the stage before, or the batch, has sent along; `tokens` has the sequence in its second dimension."""
        documents, last = carried.get(DOCUMENTS), carried.get(LAST_POSITION)
        if attention not in {"eager", "sdpa"} and (documents is not None or carried.get(_MASK) is not None):
            raise ScheduleError(
                f"a mask or packed documents with attn_implementation={attention!r}: slices need 'sdpa' or 'eager' for them, as in "
                "model.set_attn_implementation('sdpa')"
            )
        start = prefix_of("tokens").advance(tokens.shape[1])
        return cls(SliceCache(start, attention), documents, last, {})

    def check_update(self, name: str, before: int) -> None:
        """Refuse a layer that has not kept its keys and values once."""
        updates = self.cache.updates - before
        if updates != 1:
            raise ScheduleError(
                f"{name} has kept its keys and values {updates} times in the forward of a slice, so later slices cannot see it: its layers "
                "attend in another way, or the model recomputes them itself, which takes the cache away; give the pipeline recompute=True "
                f"instead, or {_ELSE}"
            )

    def keep_documents_apart(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the mask among a layer's arguments by one in which no token sees another document."""
        if self.documents is None:
            return args, kwargs
        names = list(inspect.signature(layer.forward).parameters)
        if _MASK not in names:
            raise ScheduleError(f"{type(layer).__name__} takes no {_MASK}, so packed documents cannot be kept apart: {_ELSE}")
        place = names.index(_MASK)
        if place < len(args):
            return (*args[:place], self._restrict(args[place], hidden), *args[place + 1 :]), kwargs
        return args, kwargs | {_MASK: self._restrict(kwargs.get(_MASK), hidden)}

    def _restrict(self, mask: Tensor | None, hidden: Tensor) -> Tensor:
        if id(mask) not in self.masks:
            assert self.documents is not None
            documents = self.documents.to(hidden.device)
            start = documents.shape[1] - hidden.shape[1]
            same = (documents[:, start:, None] == documents[:, None, :]).unsqueeze(1)
            if mask is None:  # plain causal attention
                restricted = same & torch.ones_like(same).tril(start)
            elif mask.dtype is torch.bool:
                restricted = mask & same
            else:
                restricted = mask.masked_fill(~same, torch.finfo(mask.dtype).min)
            self.masks[id(mask)] = mask, restricted
        return self.masks[id(mask)][1]
