"""Splitting a causal language model of `transformers` into stages, and its batches and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.model.hugging_face.dry_run import find_run_order, try_cuts
from penstock.runtime.model.hugging_face.router_loss import find_router_loss
from penstock.runtime.model.hugging_face.stage_module import HuggingFaceStage
from penstock.runtime.model.hugging_face.structure import find_structure, is_transformers_model
from penstock.runtime.model.partition import Part, Partition, balance_layers

IGNORED = -100
"""The label of tokens that do not count."""

_COUNT = "num_items_in_batch"


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
        units = _Units(model)
        sizes = balance_layers(units.weights(), stages, type(model).__name__) if self.sizes is None else list(self.sizes)
        if len(sizes) != stages or sum(sizes) != units.count or min(sizes) < 1:
            raise PlacementError(
                f"split {sizes} for {stages} stages of {units.count} units, the layers and what is before and after them: "
                "give each stage at least one and use every unit once"
            )
        ends = [sum(sizes[:stage]) for stage in range(stages + 1)]
        return Partition(tuple(units.make_parts([range(ends[stage], ends[stage + 1]) for stage in range(stages)])))

    def units(self, model: Any) -> list[tuple[str, nn.Module]]:
        """Return every unit as a module, with its name, as a profile measures them."""
        units = _Units(model)
        parts = units.make_parts([range(unit, unit + 1) for unit in range(units.count)])
        return [(units.title(unit), part.module) for unit, part in enumerate(parts)]

    def loss(self, model: Any) -> Callable[[Any, Any], Any]:
        """Return the model's own loss of scores and labels, which shifts the labels itself."""
        structure = find_structure(model)
        own, vocabulary = structure.model.loss_function, structure.config.vocab_size

        def loss(scores: Tensor, labels: Tensor) -> Any:
            return own(logits=scores, labels=labels, vocab_size=vocabulary)

        return loss


def count_labels(labels: Tensor) -> Tensor:
    """Count the labels of a microbatch that matter: not the first of a sequence, which nothing predicts, nor ignored ones."""
    return (labels[..., 1:] != IGNORED).sum()


def open_batch(args: tuple[Any, ...], default: Any = None) -> tuple[tuple[Any, ...], Any]:
    """Take the labels out of a batch from a tokenizer or collator; return its other inputs as one dict, and the labels or the default."""
    if len(args) != 1 or not isinstance(args[0], Mapping):
        return args, default
    inputs = dict(args[0])
    if inputs.pop(_COUNT, None) is not None:
        raise ScheduleError(
            f"{_COUNT} in a batch: a step's loss is the mean over all labels of its batch that count, and takes no other number; leave it "
            "out, and scale gradients yourself if several steps are one batch"
        )
    labels = inputs.pop("labels", default)
    return (inputs,), labels


def recognise_model(
    model: Any, split: Any, loss_fn: Callable[..., Any] | None, weight: Callable[[Any], Any] | None
) -> tuple[Any, Callable[..., Any] | None, Callable[[Any], Any] | None]:
    """Return the split, loss function and weight to use: a transformers model defaults to its own loss, weighted by valid labels."""
    if split is None and is_transformers_model(model):
        split = HuggingFace()
    if isinstance(split, HuggingFace) and loss_fn is None:
        return split, split.loss(model), weight or count_labels
    return split, loss_fn, weight


class _Units:
    """The units of a model that can be cut between its layers: the head, each layer, and the tail."""

    def __init__(self, model: Any) -> None:
        self.structure = find_structure(model)
        self.order, self.router_loss = find_run_order(self.structure), find_router_loss(self.structure)
        self.count = self.structure.count + 2

    def _paths(self, unit: int) -> Sequence[str]:
        if 0 < unit < self.count - 1:
            return [f"{self.structure.layers}.{unit - 1}"]
        return self.order.tail if unit else self.order.head

    def weights(self) -> list[int]:
        """Return the number of parameters per unit, plus one."""
        modules = [[self.structure.model.get_submodule(path) for path in self._paths(unit)] for unit in range(self.count)]
        return [1 + sum(p.numel() for module in unit for p in module.parameters()) for unit in modules]

    def title(self, unit: int) -> str:
        return " + ".join(map(self.structure.full_name, self._paths(unit)))

    def make_parts(self, cuts: Sequence[range]) -> list[Part]:
        """Return one stage per range of units, after trying that the stages compute what the whole model does."""
        try_cuts(self.structure, self.order, cuts)
        stages = [HuggingFaceStage(self.structure, self.order, units, self.router_loss) for units in cuts]
        return [Part(stage, tuple(map(self.structure.full_name, stage.names)), tuple(stage.parts)) for stage in stages]
