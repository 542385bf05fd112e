"""Splitting a causal language model of `transformers` into stages, and its batches and loss.

Two dry runs of the model's own forward, with cheap stand-ins for its modules, precede the split. `find_run_order` runs it once with empty
layers: it sees what runs before and after them, and that nothing but hidden states passes through them. `try_cuts` runs the whole
forward and the stages on stand-ins that mix in all of their inputs: a stage that makes another mask, position or table than the whole
model gives another output. Both work for models of any size, on the meta device too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.batch.loss import NextTokenCrossEntropy
from penstock.runtime.model.hugging_face.stage_module import (
    EMBEDDINGS,
    HuggingFaceStage,
    StandIn,
    find_hidden,
    find_router_loss,
    is_embedding,
)
from penstock.runtime.model.hugging_face.structure import (
    NO_ENDS,
    EndPaths,
    ModelStructure,
    RunOrder,
    check_layerdrop,
    copy_with,
    find_structure,
    is_transformers_model,
    modules_on_path,
)
from penstock.runtime.model.partition import Part, Partition, cut_units
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.torch_internals import pytree

IGNORED = -100
"""The label of tokens that do not count."""

_COUNT = "num_items_in_batch"
_TWO_TOKENS = 1, 2
_ROWS, _LENGTH = 2, 5
_WRITE_STAGES = "write its stages yourself and give a list with one module per stage"


@dataclass(frozen=True)
class HuggingFace:
    """A causal language model of `transformers`, cut between its layers: `Pipeline(model, ..., split=HuggingFace())`.

    What runs before the layers is one unit, each layer is one, and what runs after them with the head is one. `sizes` is the number of
    units per stage; by default they are balanced by parameters. The layers are those that the model's `base_model_pp_plan` names, or
    its only list of as many modules as it has layers. Stages run the model's own forward, with empty slots in place of the layers that
    they do not hold. A model for which this is not right is refused.
    """

    sizes: Sequence[int] | None = None

    def cut(self, model: Any, stages: int) -> Partition:
        """Cut the model into stages."""
        units = ModelUnits(model)
        cuts = cut_units(units.modules(), stages, self.sizes, model, unit="unit", more=", the layers and what is before and after them")
        return Partition(tuple(units.make_parts(cuts)))

    def units(self, model: Any) -> list[tuple[str, nn.Module]]:
        """Return every unit as a module, with its name, as a profile measures them."""
        units = ModelUnits(model)
        parts = units.make_parts([range(unit, unit + 1) for unit in range(units.count)])
        return [(units.title(unit), part.module) for unit, part in enumerate(parts)]

    def loss(self, model: Any) -> Callable[[Any, Any], Any]:
        """Return the model's own loss of scores and labels, which shifts the labels itself."""
        structure = find_structure(model)
        return ModelLoss(structure.model.loss_function, structure.config.vocab_size)


class ModelLoss:
    """The own loss of a model."""

    def __init__(self, own: Callable[..., Any], vocabulary: int) -> None:
        self.own, self.vocabulary = own, vocabulary

    def __call__(self, scores: Tensor, labels: Tensor) -> Any:
        return self.own(logits=scores, labels=labels, vocab_size=self.vocabulary)

    @cached_property
    def token_entropy(self) -> NextTokenCrossEntropy | None:
        """The mean cross-entropy of the next tokens, if the loss is that for random scores and labels, some of them ignored."""
        entropy = NextTokenCrossEntropy(IGNORED)
        draws = torch.Generator().manual_seed(0)
        scores = torch.randn(_ROWS, _LENGTH, self.vocabulary, generator=draws)
        labels = torch.randint(self.vocabulary, (_ROWS, _LENGTH), generator=draws)
        labels[0, 2] = IGNORED
        with torch.no_grad():
            try:
                agrees = torch.allclose(self(scores, labels), entropy(scores, labels), rtol=1e-4)
            except Exception:  # a model may have a loss of anything
                return None
        return entropy if agrees else None


def count_labels(labels: Tensor) -> Tensor:
    """Count the labels of a microbatch that matter: not the first of a sequence, which nothing predicts, nor ignored ones."""
    return (labels[..., 1:] != IGNORED).sum()


def open_batch(args: tuple[Any, ...], default: Any = None) -> tuple[tuple[Any, ...], Any, Any]:
    """Take the labels out of a batch from a tokenizer or collator.

    Returns its other inputs as one dict, the labels or the default, and `num_items_in_batch` if the batch has one: the number of labels
    in all the batches that make up one update, which the summed loss is divided by in place of the labels of this batch.
    """
    if len(args) != 1 or not isinstance(args[0], Mapping):
        return args, default, None
    inputs = dict(args[0])
    count = inputs.pop(_COUNT, None)
    labels = inputs.pop("labels", default)
    if not isinstance(count, (int, float, Tensor, type(None))):
        raise ScheduleError(f"{_COUNT} is {count!r}: give the number of labels that count, of all batches of the update")
    return (inputs,), labels, count


def recognise_model(
    model: Any, split: Any, loss_fn: Callable[..., Any] | None, weight: Callable[[Any], Any] | None
) -> tuple[Any, Callable[..., Any] | None, Callable[[Any], Any] | None]:
    """Return the split, loss function and weight to use: a transformers model defaults to its own loss, weighted by valid labels."""
    if split is None and is_transformers_model(model):
        split = HuggingFace()
    if isinstance(split, HuggingFace) and loss_fn is None:
        return split, split.loss(model), weight or count_labels
    return split, loss_fn, weight


class ModelUnits:
    """The units of a model that can be cut between its layers: the head, each layer, and the tail."""

    def __init__(self, model: Any, ends: EndPaths = NO_ENDS) -> None:
        """`ends` are in no unit."""
        self.ends = ends
        self.structure = find_structure(model)
        self.order, self.router_loss = find_run_order(self.structure), find_router_loss(self.structure)
        self.count = self.structure.count + 2

    def _list_paths(self, unit: int) -> Sequence[str]:
        if 0 < unit < self.count - 1:
            return [f"{self.structure.layers}.{unit - 1}"]
        return [path for path in (self.order.tail if unit else self.order.head) if path not in self.ends.list_paths()]

    def modules(self) -> list[list[nn.Module]]:
        """Return the modules of each unit."""
        return [[self.structure.model.get_submodule(path) for path in self._list_paths(unit)] for unit in range(self.count)]

    def title(self, unit: int) -> str:
        return " + ".join(map(self.structure.full_name, self._list_paths(unit)))

    def make_parts(self, cuts: Sequence[range]) -> list[Part]:
        """Return one stage per range of units, after trying that the stages compute what the whole model does."""
        try_cuts(self.structure, self.order, cuts, self.ends)
        stages = [HuggingFaceStage(self.structure, self.order, units, self.router_loss, self.ends) for units in cuts]
        return [Part(stage, tuple(map(self.structure.full_name, stage.names)), tuple(stage.parts)) for stage in stages]


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _copy_to_host(module: nn.Module) -> nn.Module:
    """Return the module, or if it has only buffers and some on the meta device, a copy with zeros on the host."""
    if has_parameters(module) or not any(buffer.is_meta for buffer in module.buffers()):
        return module
    host = copy.deepcopy(module).to_empty(device="cpu")
    for buffer in host.buffers():
        buffer.zero_()
    return host


# The order of the modules ---------------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """The record of one forward with empty layers."""

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


class _TracedLayer(StandIn):
    """An empty layer that checks its arguments."""

    def __init__(self, original: nn.Module, trace: _Trace, number: int) -> None:
        super().__init__()
        self.trace, self.number = trace, number
        self.copy_attributes(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trace, hidden = self.trace, find_hidden(args, kwargs)
        if trace.layers != self.number:
            trace.blame(f"its layers run in another order: layer {self.number} runs where layer {trace.layers} should")
        if self.number and hidden is not trace.hidden:
            trace.blame(f"hidden states are changed between layers {self.number - 1} and {self.number}")
        others = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, Tensor) and leaf is not hidden]
        if any(leaf.requires_grad for leaf in others):
            trace.blame(
                f"layer {self.number} is given more than hidden states, masks and tables: something that was computed from the tokens"
            )
        trace.layers += 1
        trace.hidden = hidden.view_as(hidden)
        return (trace.hidden,) if trace.tuples else trace.hidden


class _TracedModule(StandIn):
    """A module around the layers that notes when it runs."""

    def __init__(self, original: nn.Module, trace: _Trace, path: str) -> None:
        super().__init__()
        self.original, self.trace, self.path = _copy_to_host(original), trace, path
        self.has_parameters = has_parameters(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trace, value = self.trace, find_hidden(args, kwargs)
        if 0 < trace.layers < trace.count:
            trace.blame(f"{self.path} runs between its layers")
        (trace.after if trace.layers else trace.before).append(self.path)
        if len(trace.after) == 1 and value is not trace.hidden:
            trace.blame(f"hidden states are changed between its last layer and {self.path}")
        if not self.has_parameters:
            return self.original(*args, **kwargs)
        if is_embedding(self) or not value.is_floating_point():
            return torch.zeros(*_TWO_TOKENS, trace.width, device=value.device).requires_grad_()
        return value


def find_run_order(structure: ModelStructure) -> RunOrder:
    """Find the order in which the modules run, on two tokens; refuse a model that cannot be cut between its layers."""
    check_layerdrop(modules_on_path(structure.model, structure.layers))
    faults = []
    for tuples in (False, True):
        trace = _Trace(tuples, structure.count, structure.config.hidden_size)
        try:
            _run_traced(structure, trace)
        except Exception as error:  # models may raise anything when their layers are empty
            trace.blame(f"it fails without its layers ({type(error).__name__}: {error})")
        if trace.fault is None and trace.layers != structure.count:
            trace.blame(f"{trace.layers} of its {structure.count} layers run")
        if trace.fault is None:
            return _make_order(structure, trace)
        faults.append(trace.fault)
    raise PlacementError(f"{type(structure.model).__name__} cannot be cut between its layers: {faults[0]}; {_WRITE_STAGES}")


def _run_traced(structure: ModelStructure, trace: _Trace) -> None:
    replaced: dict[str, nn.Module] = {path: _TracedModule(module, trace, path) for path, module in structure.around.items()}
    replaced[structure.layers] = nn.ModuleList(_TracedLayer(block, trace, number) for number, block in enumerate(structure.blocks))
    model = copy_with(structure.model, replaced)
    with torch.enable_grad(), preserve_random_state():
        model(input_ids=torch.zeros(*_TWO_TOKENS, dtype=torch.long, device=structure.device), **structure.options)


def _make_order(structure: ModelStructure, trace: _Trace) -> RunOrder:
    holding = {path for path, module in structure.around.items() if has_parameters(module)}
    head, tail = list(dict.fromkeys(trace.before)), list(dict.fromkeys(trace.after))
    unused = [path for path in holding if path not in head and path not in tail]
    both = [path for path in head if path in tail]
    if unused or any(path in holding for path in both):
        path, fault = (unused[0], "does not run on tokens alone") if unused else (both[0], "runs both before and after its layers")
        raise PlacementError(f"{path} of {type(structure.model).__name__} {fault}: {_WRITE_STAGES}")
    tables = tuple(
        path for path, module in structure.around.items() if path not in holding and path not in tail and not isinstance(module, nn.Dropout)
    )
    head, tail = ([path for path in paths if path not in tables] for paths in (head, tail))
    return RunOrder(tuple(head), tuple(tail), tables, trace.tuples)


# The cuts -------------------------------------------------------------------------------------------------------------


class _CheapModule(StandIn):
    """A stand-in without parameters for a module with some: a function of its number and its input."""

    def __init__(self, original: nn.Module, number: int, width: int) -> None:
        super().__init__()
        self.original, self.number, self.width, self.training = original, number, width, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = find_hidden(args, kwargs)
        if is_embedding(self) or not value.is_floating_point():
            steps = torch.arange(self.width, device=value.device) * (self.number + 1)
            return torch.cos(value.unsqueeze(-1).float() + steps)
        return torch.sin(value * 1.3 + self.number)


class _CheapLayer(_CheapModule):
    """A stand-in for a layer: a function of its number and all of its arguments."""

    def __init__(self, original: nn.Module, number: int, width: int, tuples: bool) -> None:
        super().__init__(original, number, width)
        self.tuples = tuples
        self.copy_attributes(original)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = find_hidden(args, kwargs)
        others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not hidden]
        output = torch.sin(hidden * 1.3 + self.number) + sum(map(digest_tensor, others))
        return (output,) if self.tuples else output


def digest_tensor(value: Tensor) -> Tensor:
    """Return one finite number for a tensor of any dtype, which depends on the order of its elements."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).float().reshape(-1)
    return (torch.atan(flat) * torch.cos(torch.arange(len(flat), device=flat.device))).mean()


def try_cuts(structure: ModelStructure, order: RunOrder, cuts: Sequence[range], ends: EndPaths) -> None:
    """Refuse a model whose stages, of these units each, do not compute what it computes as a whole."""
    cheap = make_cheap(structure, order)
    stages = [HuggingFaceStage(cheap, order, units, None, ends) for units in cuts]
    for inputs in _make_inputs(structure):
        with torch.no_grad():
            try:
                expected = cheap.model(**inputs, **structure.options).logits
                output: Any = inputs
                if ends.embedding is not None:
                    output = inputs | {EMBEDDINGS: cheap.around[ends.embedding](inputs["input_ids"])}
                for stage in stages:
                    output = stage(output)
                if ends.head is not None:
                    output = ends.logits.apply(cheap.around[ends.head](output))
            except Exception as error:  # models may raise anything when a stage lacks something
                raise _make_refusal(structure, f"they fail on {_LENGTH} tokens ({type(error).__name__}: {error})") from error
        if output.shape != expected.shape or not torch.allclose(output, expected, equal_nan=True):
            raise _make_refusal(structure, f"with {' and '.join(inputs)} they give another output than the whole model")


def _make_refusal(structure: ModelStructure, fault: str) -> PlacementError:
    return PlacementError(
        f"{type(structure.model).__name__} was tried in stages, and {fault}: its forward does more around its layers than "
        f"its stages do; {_WRITE_STAGES}"
    )


def make_cheap(structure: ModelStructure, order: RunOrder) -> ModelStructure:
    """Return the same model without parameters, and without anything random."""
    width = structure.config.hidden_size
    around: dict[str, nn.Module] = {
        path: _CheapModule(module, number, width) if has_parameters(module) else copy.deepcopy(_copy_to_host(module)).eval()
        for number, (path, module) in enumerate(structure.around.items())
    }
    layers = nn.ModuleList(_CheapLayer(block, number, width, order.tuples) for number, block in enumerate(structure.blocks))
    model = copy_with(structure.model, {**around, structure.layers: layers})
    for module in modules_on_path(model, structure.layers):
        module.training = False
    return replace(structure, model=model, around=around)


def _make_inputs(structure: ModelStructure) -> list[dict[str, Tensor]]:
    """Return a few tokens, alone and, if the model takes one, with a mask that marks some as padding."""
    tokens = {"input_ids": torch.arange(_ROWS * _LENGTH, device=structure.device).reshape(_ROWS, _LENGTH)}
    mask = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device=structure.device)
    mask[-1, :2] = 0
    names = inspect.signature(structure.model.forward).parameters
    return [tokens, tokens | {"attention_mask": mask}] if "attention_mask" in names else [tokens]
