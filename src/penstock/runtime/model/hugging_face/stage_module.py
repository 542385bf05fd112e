"""One stage of a model: the model's own forward, with empty slots in place of the layers of other stages.

So masks, positions and rotary tables are made as the model makes them, from the few inputs that they depend on, which are sent along
with the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.batch.side_outputs import add_loss
from penstock.runtime.model.hugging_face.router_loss import RouterLoss, RouterSums
from penstock.runtime.model.hugging_face.structure import ModelStructure, RunOrder, check_layerdrop, copy_with, modules_on_path
from penstock.runtime.model.random_streams import draw_from
from penstock.runtime.torch_internals.modules import CHILDREN

_HIDDEN, _ROUTERS = "hidden_states", "router_sums"
_TOKENS = ("input_ids", "inputs_embeds")
_PLAIN = (bool, int, float, str)


class HuggingFaceStage(nn.Module):
    """A contiguous run of a model's units: unit 0 is all before the layers, then one unit per layer, and the last is all after them."""

    def __init__(self, structure: ModelStructure, order: RunOrder, units: range, router_loss: RouterLoss | None) -> None:
        super().__init__()
        last = structure.count + 1
        self.first, self.last, self.router_loss = 0 in units, last in units, router_loss
        layers = [f"{structure.layers}.{unit - 1}" for unit in units if 0 < unit < last]
        first, *others = dict.fromkeys([*(order.head if self.first else ()), *layers, *(order.tail if self.last else ())])
        self.names = (first, *order.tables, *others)
        self.parts = nn.ModuleList(structure.model.get_submodule(name) for name in self.names)
        self.state, self.draws = StageState(), False
        whole = copy_with(structure.model, self._make_slots(structure, order, units))
        # In a tuple, so that the parameters are those of the parts alone, each once and in their order.
        self._own = (whole if self.last else whole.get_submodule(structure.base),)
        self._path = tuple(modules_on_path(whole, structure.layers))
        self._options = structure.options

    def _make_slots(self, structure: ModelStructure, order: RunOrder, units: range) -> dict[str, nn.Module]:
        """Return the slots of the forward, by path, with this stage's own modules in them."""
        state, count = self.state, structure.count
        slots = [
            LayerSlot(block, state, block if number + 1 in units else None, f"{structure.layers}.{number}")
            for number, block in enumerate(structure.blocks)
        ]
        for slot in slots:
            slot.layer, slot.tuples = True, order.tuples
        if not self.first:
            slots[min(units[0] - 1, count - 1)].enters = True
        replaced: dict[str, nn.Module] = {structure.layers: nn.ModuleList(slots)}
        for path in order.head:
            original = structure.around[path]
            replaced[path] = LayerSlot(original, state, original, path) if self.first else EmptySlot(original, state)
        after = []
        for path in order.tail:
            original, again = structure.around[path], path in replaced
            slot = LayerSlot(original, state, original if self.last else None, f"{path} after" if again else path)
            replaced[path] = BeforeAndAfter(state, replaced[path], slot) if again else slot
            after.append(slot)
        if not self.last:
            [*slots, *after][units[-1]].leaves = True
        return replaced

    def use_layer_streams(self) -> HuggingFaceStage:
        """Draw each layer's random numbers from a stream of its own from now on."""
        self.draws = True
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, carried, sums = self._read_inputs(args, kwargs)
        self._begin(hidden)
        model, state, mask = self._own[0], self.state, carried.get("attention_mask")
        inputs = {"inputs_embeds": hidden.detach()} if not self.first and hidden is not None else {}
        inputs |= {name: carried.pop(name) for name in _TOKENS if name in carried}
        try:
            with self._watch_routers() as logits:
                out = model(**inputs, **{**carried, **self._options})
            output = out.logits if self.last else state.output
        finally:
            state.input = state.output = state.seed = None
        if self.router_loss is not None:
            sums = self.router_loss.add(sums, logits, mask)
        return self._make_output(output, carried, sums)

    def _watch_routers(self) -> AbstractContextManager[list[Tensor]]:
        nothing: list[Tensor] = []
        return nullcontext(nothing) if self.router_loss is None else self.router_loss.watch(self.parts)

    def _begin(self, hidden: Tensor | None) -> None:
        self.state.input, self.state.output, self.state.in_layers = hidden, None, False
        self.state.seed = torch.initial_seed() if self.draws else None
        training = any(part.training for part in self.parts)  # the current mode of the original model, which has the same parts
        for module in self._path:
            module.training = training
        check_layerdrop(self._path)

    def _read_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, dict[str, Any], RouterSums | None]:
        """Return the hidden states of the stage before, the model's other inputs, and the sums of the routers so far."""
        if len(args) != 1:
            raise ScheduleError(f"{len(args)} arguments: give a transformers model its tokens, or one dict of its inputs by name")
        value = args[0]
        if isinstance(value, Tensor):
            return (None, {"input_ids": value, **kwargs}, None) if self.first else (value, dict(kwargs), None)
        if not isinstance(value, Mapping):
            raise ScheduleError(f"a {type(value).__name__} as input: give tokens, or a dict of the model's inputs by name")
        inputs = {**value, **kwargs}
        if "past_key_values" in inputs:
            raise ScheduleError("past_key_values: a pipeline trains and evaluates whole sequences, and keeps no cache")
        if inputs.get("output_router_logits") and self.router_loss is None:
            raise ScheduleError("output_router_logits as an input: set it in the model's config before making the pipeline")
        return inputs.pop(_HIDDEN, None), inputs, inputs.pop(_ROUTERS, None)

    def _make_output(self, output: Any, carried: dict[str, Any], sums: RouterSums | None) -> Any:
        """Return the logits, or the hidden states with the inputs that later stages need."""
        if self.last:
            loss = None if self.router_loss is None else self.router_loss.compute(sums)
            if loss is not None:
                add_loss(loss)
            return output
        if output is None:
            raise ScheduleError(f"the forward of the model never came past {self.names[-1]}")
        more = {name: value for name, value in carried.items() if value is not None}
        if sums is not None:
            more[_ROUTERS] = sums
        return {_HIDDEN: output, **more} if more else output


class StageState:
    """The hidden states that enter and leave a stage during one forward."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.seed: int | None = None
        """The seed that the forward begins with, if it draws from one stream per layer."""
        self.in_layers = False
        """Whether the forward has reached its layers."""


class LayerSlot(nn.Module):
    """A layer's place in the forward; hidden states pass through an empty one unchanged.

    The first slot of a stage inserts the hidden states of the stage before, and the first slot after the stage takes out its output.
    """

    def __init__(self, original: nn.Module, state: StageState, module: nn.Module | None, name: str) -> None:
        super().__init__()
        self.state, self.module, self.name = state, module, name
        self.enters = self.leaves = False
        self.layer = self.tuples = False
        copy_attributes(self, original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state
        state.in_layers = state.in_layers or self.layer
        if self.leaves and state.output is None:
            state.output = find_hidden(args, kwargs)
        if self.enters and state.input is not None:
            args, kwargs = _replace_hidden(args, kwargs, state.input)
        if self.module is None:
            hidden = find_hidden(args, kwargs)
            return (hidden,) if self.tuples else hidden
        if state.seed is not None:
            draw_from(state.seed, self.name)
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name, "module")


class EmptySlot(nn.Module):
    """The place of a module before the layers in a later stage. Its output is not used, but must have a valid shape."""

    def __init__(self, original: nn.Module, state: StageState) -> None:
        super().__init__()
        self.state, self.embeds = state, is_embedding(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value, hidden = find_hidden(args, kwargs), self.state.input
        if hidden is None or (value.is_floating_point() and not self.embeds):
            return value
        return hidden.new_zeros(1, 1, hidden.shape[-1])


class BeforeAndAfter(nn.Module):
    """The place of a module without parameters that runs both before the layers and after them: one slot for each."""

    def __init__(self, state: StageState, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.state, self.before, self.after = state, before, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.after if self.state.in_layers else self.before)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return get_attribute(self, name, "after")


def copy_attributes(stand_in: nn.Module, original: nn.Module) -> None:
    """Give a stand-in the plain attributes of the original: a model may ask a layer for its type."""
    own = vars(stand_in)
    stand_in.__dict__ |= {key: value for key, value in vars(original).items() if isinstance(value, _PLAIN) and key not in own}


def get_attribute(stand_in: nn.Module, name: str, inner: str) -> Any:
    """Get an attribute of a stand-in, or else of the module inside it: a model may ask for the dtype of its weight."""
    try:
        return nn.Module.__getattr__(stand_in, name)
    except AttributeError:
        module = stand_in.__dict__.get(CHILDREN, {}).get(inner)
        if module is None or name.startswith("__"):
            raise
        return getattr(module, name)


def is_embedding(module: nn.Module) -> bool:
    """Whether this is an embedding, or a stand-in for one."""
    return isinstance(getattr(module, "original", module), nn.Embedding)


def find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states, or tokens, among the arguments of a layer."""
    at = _find_place(args, kwargs)
    return args[at] if isinstance(at, int) else kwargs[at]


def _find_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    """Return the position or name of the first argument that is not None; positional ones come first, then `hidden_states`."""
    names = ("hidden_states", *kwargs) if "hidden_states" in kwargs else tuple(kwargs)
    places: list[int | str] = [at for at, value in enumerate(args) if value is not None]
    return (places + [name for name in names if kwargs[name] is not None])[0]


def _replace_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    at = _find_place(args, kwargs)
    return ((*args[:at], hidden, *args[at + 1 :]), kwargs) if isinstance(at, int) else (args, kwargs | {at: hidden})
