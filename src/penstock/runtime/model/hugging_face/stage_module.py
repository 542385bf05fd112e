"""One stage of a model: the model's own forward, with empty slots in place of the layers of other stages.

So masks, positions and rotary tables are made as the model makes them, from the few inputs that they depend on, which are sent along
with the hidden states. The load-balancing loss of a mixture of experts is a product of two means over all layers, so it is not a sum
over stages: its two sums, with one number per expert each, are sent along too, and added up in the order of the layers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.batch.result import add_loss
from penstock.runtime.model.hugging_face.slices import DOCUMENTS, LAST_POSITION, POSITIONS, SliceInputs, depends_on_length
from penstock.runtime.model.hugging_face.structure import (
    NO_ENDS,
    EndPaths,
    ModelStructure,
    RunOrder,
    check_layerdrop,
    copy_with,
    modules_on_path,
)
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.sequence.prefix import Slice, current_slice, prefix_of
from penstock.runtime.torch_internals.modules import CHILDREN, PARAMETERS

_HIDDEN, _ROUTERS = "hidden_states", "router_sums"
EMBEDDINGS = "token_embeddings"
"""The input with the embeddings of the tokens, if the embedding is spread over the ranks."""
_TOKENS = ("input_ids", "inputs_embeds")
_PLAIN = (bool, int, float, str)
RouterSums = tuple[Tensor, Tensor, Any]
"""How often each expert was chosen, the sums of their probabilities, and the number of tokens times layers."""


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of a model's routers."""

    experts: int
    chosen: int
    coefficient: float
    router: type[nn.Module]
    index: int
    """Where the logits are in a router's output, if that is a tuple."""

    @contextmanager
    def watch(self, parts: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
        """Collect the logits of the routers that run inside, in their order."""
        logits: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            logits.append(output[self.index] if isinstance(output, tuple) else output)

        routers = [module for part in parts for module in part.modules() if isinstance(module, self.router)]
        handles = [router.register_forward_hook(note) for router in routers]
        try:
            yield logits
        finally:
            for handle in handles:
                handle.remove()

    def add(self, sums: RouterSums | None, logits: Sequence[Tensor], mask: Tensor | None) -> RouterSums | None:
        """Add the logits of further layers to the sums."""
        for layer in logits:
            probabilities = functional.softmax(layer, dim=-1)
            _, chosen = torch.topk(probabilities, self.chosen, dim=-1)
            flat = None if mask is None else mask.reshape(-1).to(device=layer.device, dtype=torch.float32)
            zeros = torch.zeros(self.experts, dtype=torch.float32, device=layer.device)
            counts, weights, rows = sums or (zeros, zeros, 0.0)
            probabilities = probabilities.float()
            if flat is None:
                more = torch.bincount(chosen.reshape(-1), minlength=self.experts).float()
                sums = counts + more, weights + probabilities.sum(dim=0), rows + len(probabilities)
            else:
                more = zeros.scatter_add(0, chosen.reshape(-1), flat.repeat_interleave(self.chosen))
                sums = counts + more, weights + (probabilities * flat.unsqueeze(-1)).sum(dim=0), rows + flat.sum()
        return sums

    def compute(self, sums: RouterSums | None) -> Tensor | None:
        """Compute the side loss of one microbatch."""
        if sums is None:
            return None
        counts, weights, rows = sums
        return self.coefficient * (torch.sum(counts / rows * (weights / rows).unsqueeze(0)) * self.experts)


def find_router_loss(structure: ModelStructure) -> RouterLoss | None:
    """Return the model's load-balancing loss, or None if it has none; refuse a loss that is computed in another way."""
    model: Any = structure.model
    own = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
    is_on = getattr(structure.config, "output_router_logits", False)
    if not is_on or (own is None and not hasattr(structure.config, "router_aux_loss_coef")):
        return None
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router, index = getattr(recorder, "target_class", None), getattr(recorder, "index", 0)
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    experts, chosen, coefficient = (getattr(model, name, getattr(structure.config, name, None)) for name in names)
    if own is not None and router is not None and experts is not None and chosen is not None and coefficient is not None:
        loss = RouterLoss(experts, chosen, coefficient, router, index)
        if _agrees(loss, own):
            return loss
    raise PlacementError(
        f"{type(model).__name__} balances its routers in a way of its own: set config.output_router_logits = False to train without, "
        "or give a list with one module per stage"
    )


def _agrees(loss: RouterLoss, own: Any) -> bool:
    """Whether the model's own function computes the same, on two layers of random logits with and without a mask."""
    with torch.no_grad(), preserve_random_state():
        logits = tuple(torch.randn(6, loss.experts) for _ in range(2))
        for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
            computed = loss.compute(loss.add(loss.add(None, logits[:1], mask), logits[1:], mask))
            try:
                expected = loss.coefficient * own(logits, loss.experts, loss.chosen, mask)
            except Exception:  # it takes other arguments
                return False
            if not isinstance(expected, Tensor) or computed is None or not torch.allclose(computed, expected):
                return False
    return True


class HuggingFaceStage(nn.Module):
    """A contiguous run of a model's units: unit 0 is all before the layers, then one unit per layer, and the last is all after them."""

    sliceable = True
    """Its layers reach earlier slices through a cache; models that cannot are refused by `slices.check_model`."""

    def __init__(
        self, structure: ModelStructure, order: RunOrder, units: range, router_loss: RouterLoss | None, ends: EndPaths = NO_ENDS
    ) -> None:
        """`ends` are in no stage: the first one gets the embeddings of the tokens as an input, and the last one returns the head's."""
        super().__init__()
        last = structure.count + 1
        self.first, self.last, self.router_loss, self.ends = 0 in units, last in units, router_loss, ends
        layers = [f"{structure.layers}.{unit - 1}" for unit in units if 0 < unit < last]
        inside = [*(order.head if self.first else ()), *layers, *(order.tail if self.last else ())]
        first, *others = dict.fromkeys(name for name in inside if name not in ends.list_paths())
        self.names = (first, *order.tables, *others)
        self.parts = nn.ModuleList(structure.model.get_submodule(name) for name in self.names)
        self.state, self.draws = StageState(), False
        self.calls: Mapping[str, Callable[..., Any]] = {}
        """Functions to run in place of modules during one forward, by the keys of `list_units`: recomputed layers, for example."""
        head = tuple(path for path in order.head if path != ends.embedding)
        self._units = [head if not unit else () if unit == last else (f"{structure.layers}.{unit - 1}",) for unit in units]
        whole = copy_with(structure.model, self._make_slots(structure, order, units))
        # In a tuple, so that the parameters are those of the parts alone, each once and in their order.
        self._own = (whole if self.last else whole.get_submodule(structure.base),)
        self._path = tuple(modules_on_path(whole, structure.layers))
        self._stubs = tuple(module for module in whole.modules() if isinstance(module, (_GivenEmbedding, HeadInput)))
        self._options = structure.options
        self._config = structure.config

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
            module = substitute_embedding(original, state) if path == self.ends.embedding else original
            replaced[path] = LayerSlot(original, state, module, path) if self.first else EmptySlot(original, state)
        for path in order.tables:
            if depends_on_length(structure.around[path]):
                replaced[path] = TableSlot(structure.around[path], state)
        after = []
        for path in order.tail:
            original, again = structure.around[path], path in replaced
            module = HeadInput(original, state) if path == self.ends.head else original
            slot = LayerSlot(original, state, module if self.last else None, f"{path} after" if again else path)
            replaced[path] = BeforeAndAfter(state, replaced[path], slot) if again else slot
            after.append(slot)
        if not self.last:
            [*slots, *after][units[-1]].leaves = True
        return replaced

    def list_units(self) -> list[dict[str, nn.Module]]:
        """The modules of each unit by name. The last unit has none: its loss is computed outside of the model's forward."""
        modules = dict(zip(self.names, self.parts, strict=True))
        return [{name: modules[name] for name in names} for names in self._units]

    def use_layer_streams(self) -> HuggingFaceStage:
        """Draw each layer's random numbers from a stream of its own from now on."""
        self.draws = True
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, carried, sums = self._read_inputs(args, kwargs)
        self._begin(hidden)
        model, state, mask = self._own[0], self.state, carried.get("attention_mask")
        state.embeddings = carried.pop(EMBEDDINGS, None)
        self._place_stubs(state.embeddings if hidden is None else hidden)
        inputs: dict[str, Any] = {"inputs_embeds": hidden.detach()} if not self.first and hidden is not None else {}
        inputs |= {name: carried.pop(name) for name in _TOKENS if name in carried}
        options, of_slice = self._options, {}
        if (part := current_slice()) is not None:
            tokens = next(value for value in inputs.values() if value is not None)
            state.slice = SliceInputs.take(carried, tokens, self._config._attn_implementation)
            of_slice = {name: carried.pop(name) for name in (DOCUMENTS, LAST_POSITION) if name in carried}
            options = {**options, "past_key_values": state.slice.cache}
            mask = mask[:, -tokens.shape[1] :] if isinstance(mask, Tensor) else mask
        try:
            with self._watch_routers() as logits:
                out = model(**inputs, **{**carried, **options})
            output = out.logits if self.last and self.ends.head is None else state.output
        finally:
            state.input = state.output = state.seed = state.slice = state.embeddings = None
        if self.router_loss is not None:
            sums = self.router_loss.add(sums, logits, mask)
        return self._make_output(output, carried | of_slice, sums, part)

    def _watch_routers(self) -> AbstractContextManager[list[Tensor]]:
        nothing: list[Tensor] = []
        return nullcontext(nothing) if self.router_loss is None else self.router_loss.watch(self.parts)

    def _begin(self, hidden: Tensor | None) -> None:
        self.state.input, self.state.output, self.state.in_layers = hidden, None, False
        self.state.calls = self.calls
        self.state.seed = torch.initial_seed() if self.draws else None
        training = any(part.training for part in self.parts)  # the current mode of the original model, which has the same parts
        for module in self._path:
            module.training = training
        check_layerdrop(self._path)

    def _place_stubs(self, value: Tensor | None) -> None:
        """Give what takes the place of a spread end the device of the hidden states, if the model was built on the meta device."""
        for stub in self._stubs:
            if stub.weight.is_meta and value is not None:
                stub.weight = nn.Parameter(torch.empty_like(stub.weight, device=value.device), requires_grad=False)

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

    def _make_output(self, output: Any, carried: dict[str, Any], sums: RouterSums | None, part: Slice | None) -> Any:
        """Return the logits, or the hidden states with the inputs that later stages need."""
        if output is None:
            raise ScheduleError(f"the forward of the model never came past {self.names[-1]}")
        if self.last:
            if self.router_loss is not None and part is not None and sums is not None:
                sums = _sum_slices(sums)
            loss = None if self.router_loss is None else self.router_loss.compute(sums)
            if loss is not None and (part is None or part.last):
                add_loss(loss if part is None else loss / part.share)
            return output
        more = {name: value for name, value in carried.items() if value is not None}
        if sums is not None:
            more[_ROUTERS] = sums
        return {_HIDDEN: output, **more} if more else output


def _sum_slices(sums: RouterSums) -> RouterSums:
    """Add the sums of earlier slices of the microbatch: its routers are balanced over all of its tokens, in its last slice."""
    counts, weights, rows = sums
    rows = torch.as_tensor(rows, dtype=weights.dtype, device=weights.device)
    counts, weights, rows = prefix_of("routers").extend(counts.unsqueeze(0), weights.unsqueeze(0), rows.reshape(1), dim=0)
    return counts.sum(dim=0), weights.sum(dim=0), rows.sum()


class StageState:
    """The hidden states that enter and leave a stage during one forward."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.output: Tensor | None = None
        self.embeddings: Tensor | None = None
        """The embeddings of the tokens, if they were looked up elsewhere, until the forward takes them."""
        self.seed: int | None = None
        """The seed that the forward begins with, if it draws from one stream per layer."""
        self.in_layers = False
        """Whether the forward has reached its layers."""
        self.slice: SliceInputs | None = None
        """The slice that the forward runs on; None for whole sequences."""
        self.calls: Mapping[str, Callable[..., Any]] = {}
        """Functions that run in place of modules, by the names of their slots."""

    def take_embeddings(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of the tokens, once per forward."""
        given, self.embeddings = self.embeddings, None
        if given is None or given.shape[:-1].numel() != tokens.numel():
            raise ScheduleError(
                "the model looks up more in its embedding than input_ids, which only the ranks that share the embedding could: leave out "
                "token_type_ids and the like, or keep the embedding in its stage with ps.Vocabulary(embedding=False)"
            )
        return given.view(*tokens.shape, -1)


class StandIn(nn.Module):
    """Takes the place of a module in the forward. A model may ask it for attributes, such as a layer's type or the dtype of its weight."""

    inner = "original"
    """The name of the submodule that has the attributes which this one lacks, if there is one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get(CHILDREN, {}).get(self.inner)
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def copy_attributes(self, original: nn.Module) -> None:
        """Take over the plain attributes of the original."""
        own = vars(self)
        self.__dict__ |= {key: value for key, value in vars(original).items() if isinstance(value, _PLAIN) and key not in own}


class LayerSlot(StandIn):
    """A layer's place in the forward; hidden states pass through an empty one unchanged.

    The first slot of a stage inserts the hidden states of the stage before, and the first slot after the stage takes out its output.
    """

    inner = "module"

    def __init__(self, original: nn.Module, state: StageState, module: nn.Module | None, name: str) -> None:
        super().__init__()
        self.state, self.module, self.name = state, module, name
        self.enters = self.leaves = False
        self.layer = self.tuples = False
        self.copy_attributes(original)

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
        call = state.calls.get(self.name, self.module)
        if state.seed is not None:
            draw_from(state.seed, self.name)
        if state.slice is None or not self.layer:
            return call(*args, **kwargs)
        args, kwargs = state.slice.keep_documents_apart(self.module, args, kwargs, find_hidden(args, kwargs))
        before = state.slice.cache.updates
        output = call(*args, **kwargs)
        state.slice.check_update(self.name, before)
        return output


class TableSlot(StandIn):
    """The place of a rotary table that depends on the sequence's length: in a slice, it is made with the last position of the sequence."""

    def __init__(self, original: nn.Module, state: StageState) -> None:
        super().__init__()
        self.original, self.state = original, state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self.state.slice
        if part is None or part.last_position is None:
            return self.original(*args, **kwargs)
        positions = kwargs[POSITIONS] if POSITIONS in kwargs else args[1]
        longer = torch.cat([positions, part.last_position.to(positions).expand(*positions.shape[:-1], 1)], dim=-1)
        if POSITIONS in kwargs:
            kwargs = kwargs | {POSITIONS: longer}
        else:
            args = (args[0], longer, *args[2:])
        tables = self.original(*args, **kwargs)
        return tuple(table.narrow(-2, 0, positions.shape[-1]) for table in tables)


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


class BeforeAndAfter(StandIn):
    """The place of a module without parameters that runs both before the layers and after them: one slot for each."""

    inner = "after"

    def __init__(self, state: StageState, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.state, self.before, self.after = state, before, after

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.after if self.state.in_layers else self.before)(*args, **kwargs)


class _GivenEmbedding(nn.Embedding):
    """An embedding whose rows were looked up elsewhere."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        state: Any = self.state
        embeddings: Tensor = state.take_embeddings(input)
        return embeddings


class _GivenStandIn(StandIn):
    """The same in place of a stand-in."""

    def __init__(self, original: nn.Module, state: StageState) -> None:
        super().__init__()
        self.original, self.state = original, state

    def forward(self, tokens: Tensor) -> Tensor:
        return self.state.take_embeddings(tokens)


def substitute_embedding(original: nn.Module, state: StageState) -> nn.Module:
    """Return what takes the place of an embedding that is spread over the ranks.

    A class of its own may do more than to look up rows, such as to multiply them. Its forward then runs here, with the rows that the ranks
    have looked up as the result of `super().forward`.
    """
    if not isinstance(original, nn.Embedding):
        return _GivenStandIn(original, state)
    kind = type(original)
    is_plain = kind.forward is nn.Embedding.forward
    twin = copy.copy(original)
    twin.__class__ = _GivenEmbedding if is_plain else type(f"Given{kind.__name__}", (kind, _GivenEmbedding), {})
    vars(twin)["state"] = state
    twin.__dict__[PARAMETERS] = {"weight": _shrink(original.weight)}
    return twin


class HeadInput(StandIn):
    """The place of a head that is spread over the ranks: it takes out its input as the output of the stage."""

    def __init__(self, original: nn.Module, state: StageState) -> None:
        super().__init__()
        self.state = state
        weight = getattr(original, "weight", None)
        self.weight = _shrink(weight if isinstance(weight, Tensor) else torch.empty(0, 0))
        self.copy_attributes(original)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.state.output is not None:
            raise ScheduleError("the model runs its head twice in one forward: keep it in its stage with ps.Vocabulary(head=False)")
        self.state.output = hidden
        return hidden


def _shrink(weight: Tensor) -> nn.Parameter:
    """Return a weight without rows, which a model may ask for its type and device."""
    return nn.Parameter(weight.detach().new_empty(0, weight.shape[1]), requires_grad=False)


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
