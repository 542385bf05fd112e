"""Run a model's own forward whole and in the stages that it is to be cut into, with cheap stand-ins for all that has parameters.

So the cuts are tried whatever the model's size, and whether its parameters are there or on the meta device. The stand-ins mix in all
that they are given: a stage that makes another mask, position or table than the whole model does gives another output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import PlacementError
from penstock.runtime.model.hugging_face.anatomy import ModelStructure, copy_with, modules_on_path
from penstock.runtime.model.hugging_face.portion import HuggingFaceStage
from penstock.runtime.model.hugging_face.probe import RunOrder, on_host
from penstock.runtime.model.hugging_face.sites import copy_attributes, find_hidden, get_attribute, is_embedding

_ROWS, _LENGTH = 2, 5


class _Cheap(nn.Module):
    """In the place of a module with parameters: some function of its number and of all that it is given, with no parameters."""

    def __init__(self, like: nn.Module, number: int, width: int) -> None:
        super().__init__()
        self.like, self.number, self.width, self.training = like, number, width, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = find_hidden(args, kwargs)
        if is_embedding(self) or not given.is_floating_point():
            steps = torch.arange(self.width, device=given.device) * (self.number + 1)
            return torch.cos(given.unsqueeze(-1).float() + steps)
        return torch.sin(given * 1.3 + self.number)

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name, "like")


class _CheapLayer(_Cheap):
    def __init__(self, like: nn.Module, number: int, width: int, tuples: bool) -> None:
        super().__init__(like, number, width)
        self.tuples = tuples
        copy_attributes(self, like)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = find_hidden(args, kwargs)
        others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not hidden]
        made = torch.sin(hidden * 1.3 + self.number) + sum(map(_digest, others))
        return (made,) if self.tuples else made


def _digest(value: Tensor) -> Tensor:
    """One number of a tensor of any kind, which its order matters for."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).float().reshape(-1)
    return (torch.atan(flat) * torch.cos(torch.arange(len(flat), device=flat.device))).mean()


def rehearse(anatomy: ModelStructure, order: RunOrder, cuts: Sequence[range]) -> None:
    """Refuse a model whose stages, of these units each, do not give what it gives as a whole."""
    cheap = _cheap(anatomy, order)
    stages = [HuggingFaceStage(cheap, order, units, None) for units in cuts]
    for inputs in _inputs(anatomy):
        with torch.no_grad():
            try:
                wanted = cheap.model(**inputs, **anatomy.options).logits
                found: Any = inputs
                for stage in stages:
                    found = stage(found)
            except Exception as error:  # whatever a model raises where a stage lacks something
                raise _refusal(anatomy, f"they fail on {_LENGTH} tokens ({type(error).__name__}: {error})") from error
        if found.shape != wanted.shape or not torch.allclose(found, wanted, equal_nan=True):
            raise _refusal(anatomy, f"with {' and '.join(inputs)} they give another output than the whole model")


def _refusal(anatomy: ModelStructure, seen: str) -> PlacementError:
    return PlacementError(
        f"{type(anatomy.model).__name__} was tried in stages, and {seen}: its forward does more around its layers than "
        "stages of it do; write its stages yourself and give a list with one module a stage"
    )


def _cheap(anatomy: ModelStructure, order: RunOrder) -> ModelStructure:
    """The same model without parameters, and without anything random."""
    width = anatomy.config.hidden_size
    around: dict[str, nn.Module] = {}
    for number, (path, module) in enumerate(anatomy.around.items()):
        holds = next(module.parameters(), None) is not None
        around[path] = _Cheap(module, number, width) if holds else copy.deepcopy(on_host(module)).eval()
    layers = nn.ModuleList(_CheapLayer(each, number, width, order.tuples) for number, each in enumerate(anatomy.blocks))
    model = copy_with(anatomy.model, {**around, anatomy.layers: layers})
    for each in modules_on_path(model, anatomy.layers):
        each.training = False
    return replace(anatomy, model=model, around=around)


def _inputs(anatomy: ModelStructure) -> list[dict[str, Tensor]]:
    """A few tokens, alone and with a mask of some that are padding where the model takes one."""
    tokens = {"input_ids": torch.arange(_ROWS * _LENGTH, device=anatomy.device).reshape(_ROWS, _LENGTH)}
    mask = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device=anatomy.device)
    mask[-1, :2] = 0
    taken = inspect.signature(anatomy.model.forward).parameters
    return [tokens, tokens | {"attention_mask": mask}] if "attention_mask" in taken else [tokens]
