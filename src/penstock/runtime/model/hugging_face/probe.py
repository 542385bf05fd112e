"""Watch a model's own forward once, with nothing in its layers: what runs before and after, and that hidden states alone pass through."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import PlacementError
from penstock.runtime.model.hugging_face.anatomy import ModelStructure, check_layerdrop, copy_with, modules_on_path
from penstock.runtime.model.hugging_face.sites import copy_attributes, find_hidden, get_attribute, is_embedding
from penstock.runtime.model.random_streams import preserve_random_state

_TOKENS = 1, 2


@dataclass(frozen=True)
class RunOrder:
    """In which order the parts of a model run."""

    head: tuple[str, ...]
    """Before the layers."""
    tail: tuple[str, ...]
    """After them."""
    tables: tuple[str, ...]
    """Without parameters, and needed by every stage: rotary tables say."""
    tuples: bool
    """Whether layers give tuples that begin with the hidden states."""


@dataclass
class _Seen:
    """What a forward did."""

    tuples: bool
    count: int
    width: int
    layers: int = 0
    hidden: Any = None
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    fault: str | None = None

    def blame(self, fault: str) -> None:
        self.fault = self.fault or fault


class _Layer(nn.Module):
    """In a layer's place: sees what it is given, and hands it on."""

    def __init__(self, like: nn.Module, seen: _Seen, number: int) -> None:
        super().__init__()
        self.seen, self.number = seen, number
        copy_attributes(self, like)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen, given = self.seen, find_hidden(args, kwargs)
        if seen.layers != self.number:
            seen.blame(f"its layers run in another order: layer {self.number} comes where layer {seen.layers} should")
        if self.number and given is not seen.hidden:
            seen.blame(f"hidden states are changed between layers {self.number - 1} and {self.number}")
        more = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor) and leaf is not given]
        if any(leaf.requires_grad for leaf in more):
            seen.blame(
                f"layer {self.number} is given more than hidden states, masks and tables: something that was computed from the tokens"
            )
        seen.layers += 1
        seen.hidden = given.view_as(given)
        return (seen.hidden,) if seen.tuples else seen.hidden


class _Other(nn.Module):
    """In the place of a module beside the layers: notes when it runs."""

    def __init__(self, like: nn.Module, seen: _Seen, path: str) -> None:
        super().__init__()
        self.like, self.seen, self.path = on_host(like), seen, path
        self.holds = next(like.parameters(), None) is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen = self.seen
        if 0 < seen.layers < seen.count:
            seen.blame(f"{self.path} runs between its layers")
        (seen.after if seen.layers else seen.before).append(self.path)
        if len(seen.after) == 1 and find_hidden(args, kwargs) is not seen.hidden:
            seen.blame(f"hidden states are changed between its last layer and {self.path}")
        if not self.holds:
            return self.like(*args, **kwargs)
        given = find_hidden(args, kwargs)
        if is_embedding(self) or not given.is_floating_point():
            return torch.zeros(*_TOKENS, seen.width, device=given.device).requires_grad_()
        return given

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name, "like")


def find_run_order(anatomy: ModelStructure) -> RunOrder:
    """The order in which the parts run, or what cannot be cut about them."""
    check_layerdrop(modules_on_path(anatomy.model, anatomy.layers))
    faults = []
    for tuples in (False, True):
        seen = _Seen(tuples, anatomy.count, anatomy.config.hidden_size)
        try:
            _run(anatomy, seen)
        except Exception as error:  # whatever a model raises where it is not what it seems
            seen.blame(f"it fails without its layers ({type(error).__name__}: {error})")
        if seen.fault is None and seen.layers != anatomy.count:
            seen.blame(f"{seen.layers} of its {anatomy.count} layers run")
        if seen.fault is None:
            return _ordered(anatomy, seen)
        faults.append(seen.fault)
    raise PlacementError(
        f"{type(anatomy.model).__name__} cannot be cut between its layers: {faults[0]}; "
        "write its stages yourself and give a list with one module a stage"
    )


def on_host(module: nn.Module) -> nn.Module:
    """The module, or where it has buffers on the meta device and nothing else, a copy of it that has some on the host."""
    absent = [each for each in module.buffers() if each.is_meta]
    if not absent or next(module.parameters(), None) is not None:
        return module
    made = copy.deepcopy(module).to_empty(device="cpu")
    for each in made.buffers():
        each.zero_()
    return made


def _run(anatomy: ModelStructure, seen: _Seen) -> None:
    """The whole forward on two tokens."""
    replaced: dict[str, nn.Module] = {path: _Other(each, seen, path) for path, each in anatomy.around.items()}
    replaced[anatomy.layers] = nn.ModuleList(_Layer(each, seen, number) for number, each in enumerate(anatomy.blocks))
    model = copy_with(anatomy.model, replaced)
    with torch.enable_grad(), preserve_random_state():
        model(input_ids=torch.zeros(*_TOKENS, dtype=torch.long, device=anatomy.device), **anatomy.options)


def _ordered(anatomy: ModelStructure, seen: _Seen) -> RunOrder:
    holding = {path for path, each in anatomy.around.items() if next(each.parameters(), None) is not None}
    head, tail = list(dict.fromkeys(seen.before)), list(dict.fromkeys(seen.after))
    unused = [path for path in holding if path not in head and path not in tail]
    both = [path for path in head if path in tail]
    if unused or any(path in holding for path in both):
        path, what = (unused[0], "does not run on tokens alone") if unused else (both[0], "runs both before and after its layers")
        raise PlacementError(f"{path} of {type(anatomy.model).__name__} {what}: write its stages yourself and give a list of them")
    tables = tuple(path for path in anatomy.around if path not in holding and path not in tail and not _is_drop(anatomy, path))
    return RunOrder(
        tuple(path for path in head if path not in tables),
        tuple(path for path in tail if path not in tables),
        tables,
        seen.tuples,
    )


def _is_drop(anatomy: ModelStructure, path: str) -> bool:
    return isinstance(anatomy.around[path], nn.Dropout)
