"""One stage of a model, run by the model's own forward with nothing in the places of the other stages' layers.

So masks, positions and rotary tables are made as the model makes them, from the few inputs that they depend on; these are carried
along with the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.batch.side_outputs import add_loss
from penstock.runtime.model.hugging_face.anatomy import ModelStructure, check_layerdrop, copy_with, modules_on_path
from penstock.runtime.model.hugging_face.balance import RouterLoss, RouterSums
from penstock.runtime.model.hugging_face.probe import RunOrder
from penstock.runtime.model.hugging_face.sites import BeforeAndAfter, EmptySlot, LayerSlot, StageState

_HIDDEN, _ROUTERS = "hidden_states", "router_sums"
_TOKENS = ("input_ids", "inputs_embeds")


class HuggingFaceStage(nn.Module):
    """Some of a model's parts: all before the layers, some layers, all after them."""

    def __init__(self, anatomy: ModelStructure, order: RunOrder, units: range, balance: RouterLoss | None) -> None:
        super().__init__()
        last = anatomy.count + 1
        self.first, self.last, self.balance = 0 in units, last in units, balance
        layers = [f"{anatomy.layers}.{unit - 1}" for unit in units if 0 < unit < last]
        first, *others = dict.fromkeys([*(order.head if self.first else ()), *layers, *(order.tail if self.last else ())])
        self.names = (first, *order.tables, *others)
        self.parts = nn.ModuleList(anatomy.model.get_submodule(name) for name in self.names)
        self.slot, self.draws = StageState(), False
        replaced = self._replaced(anatomy, order, units)
        whole = copy_with(anatomy.model, replaced)
        # In a tuple, so that the parameters are those of the parts alone, each once and in their order.
        self._own = (whole if self.last else whole.get_submodule(anatomy.base),)
        self._twins = tuple(modules_on_path(whole, anatomy.layers))
        self._options = anatomy.options

    def _replaced(self, anatomy: ModelStructure, order: RunOrder, units: range) -> dict[str, nn.Module]:
        slot, count = self.slot, anatomy.count
        sites = [
            LayerSlot(block, slot, block if number + 1 in units else None, f"{anatomy.layers}.{number}")
            for number, block in enumerate(anatomy.blocks)
        ]
        for site in sites:
            site.layer, site.tuples = True, order.tuples
        if not self.first:
            sites[min(units[0] - 1, count - 1)].enters = True
        replaced: dict[str, nn.Module] = {anatomy.layers: nn.ModuleList(sites)}
        for path in order.head:
            like = anatomy.around[path]
            replaced[path] = LayerSlot(like, slot, like, path) if self.first else EmptySlot(like, slot)
        after = []
        for path in order.tail:
            like, again = anatomy.around[path], path in replaced
            site = LayerSlot(like, slot, like if self.last else None, f"{path} after" if again else path)
            replaced[path] = BeforeAndAfter(slot, replaced[path], site) if again else site
            after.append(site)
        if not self.last:
            [*sites, *after][units[-1]].leaves = True
        return replaced

    def streamed(self) -> HuggingFaceStage:
        """With a random stream for each layer."""
        self.draws = True
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, carried, sums = self._inputs(args, kwargs)
        self._begin(hidden)
        model, slot, mask = self._own[0], self.slot, carried.get("attention_mask")
        given = {"inputs_embeds": hidden.detach()} if not self.first and hidden is not None else {}
        given |= {name: carried.pop(name) for name in _TOKENS if name in carried}
        try:
            with self._watching() as routed:
                out = model(**given, **{**carried, **self._options})
            made = out.logits if self.last else slot.made
        finally:
            slot.given = slot.made = slot.begun = None
        if self.balance is not None:
            sums = self.balance.add(sums, routed, mask)
        return self._handed_on(made, carried, sums)

    def _watching(self) -> AbstractContextManager[list[Tensor]]:
        """Gives what the routers decide on, where they are to be balanced."""
        nothing: list[Tensor] = []
        return nullcontext(nothing) if self.balance is None else self.balance.watching(self.parts)

    def _begin(self, hidden: Tensor | None) -> None:
        self.slot.given, self.slot.made, self.slot.passed = hidden, None, False
        self.slot.begun = torch.initial_seed() if self.draws else None
        training = any(part.training for part in self.parts)  # as the model's own now is, whose parts these are
        for each in self._twins:
            each.training = training
        check_layerdrop(self._twins)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any], RouterSums | None]:
        """The hidden states that came in, the model's other inputs, and the sums of the routers so far."""
        if len(args) != 1:
            raise ScheduleError(f"{len(args)} arguments: give a model of transformers' its tokens, or one dict of its inputs by name")
        given = args[0]
        if isinstance(given, Tensor):
            return (None, {"input_ids": given, **kwargs}, None) if self.first else (given, dict(kwargs), None)
        if not isinstance(given, Mapping):
            raise ScheduleError(f"a {type(given).__name__} as input: give tokens, or a dict of the model's inputs by name")
        inputs = {**given, **kwargs}
        if "past_key_values" in inputs:
            raise ScheduleError("past_key_values: a pipeline trains and evaluates whole sequences, and keeps no cache")
        if inputs.get("output_router_logits") and self.balance is None:
            raise ScheduleError("output_router_logits as an input: set it in the model's config before the pipeline is made")
        return inputs.pop(_HIDDEN, None), inputs, inputs.pop(_ROUTERS, None)

    def _handed_on(self, made: Any, carried: dict[str, Any], sums: RouterSums | None) -> Any:
        if self.last:
            loss = None if self.balance is None else self.balance.loss(sums)
            if loss is not None:
                add_loss(loss)
            return made
        if made is None:
            raise ScheduleError(f"the forward of the model never came past {self.names[-1]}")
        more = {name: value for name, value in carried.items() if value is not None}
        if sums is not None:
            more[_ROUTERS] = sums
        return {_HIDDEN: made, **more} if more else made
