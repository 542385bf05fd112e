"""Cut a causal language model of `transformers` into stages, without tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.model.hugging_face.anatomy import ModelStructure, find_structure, is_transformers_model
from penstock.runtime.model.hugging_face.balance import find_router_loss
from penstock.runtime.model.hugging_face.portion import HuggingFaceStage
from penstock.runtime.model.hugging_face.probe import find_run_order
from penstock.runtime.model.hugging_face.rehearsal import rehearse
from penstock.runtime.model.partition import Part, Partition, balance_layers

IGNORED = -100
"""What labels are that count for nothing."""

_COUNT = "num_items_in_batch"


@dataclass(frozen=True)
class HuggingFace:
    """A causal language model of `transformers`, cut between its layers: `Pipeline(model, ..., split=HuggingFace())`.

    What runs before the layers is one unit, each layer is one, and what runs after them with the head is one. `sizes` says how many units
    each stage gets; otherwise they are balanced by parameters. The layers are those that the model's `base_model_pp_plan` names,
    or its only list of as many modules as it has layers. Stages run the model's own forward, with nothing in the place of layers that
    they have not. A model that this is not right for is refused.
    """

    sizes: Sequence[int] | None = None

    def cut(self, model: Any, stages: int) -> Partition:
        """The model's stages."""
        cutter = _Cutter.of(model)
        sizes = balance_layers(cutter.weights(), stages, type(model).__name__) if self.sizes is None else list(self.sizes)
        if len(sizes) != stages or sum(sizes) != cutter.count or min(sizes) < 1:
            raise PlacementError(
                f"split {sizes} for {stages} stages of {cutter.count} units, the layers and what is before and after them: "
                "give each stage at least one and use every unit once"
            )
        ends = [sum(sizes[:stage]) for stage in range(stages + 1)]
        return Partition(tuple(cutter.parts([range(ends[stage], ends[stage + 1]) for stage in range(stages)])))

    def units(self, model: Any) -> list[tuple[str, nn.Module]]:
        """Every unit by itself, as a profile measures them."""
        cutter = _Cutter.of(model)
        parts = cutter.parts([range(unit, unit + 1) for unit in range(cutter.count)])
        return [(cutter.title(unit), part.module) for unit, part in enumerate(parts)]

    def loss(self, model: Any) -> Callable[[Any, Any], Any]:
        """The model's own loss of scores and labels, which it shifts itself."""
        anatomy = find_structure(model)
        own, vocabulary = anatomy.model.loss_function, anatomy.config.vocab_size

        def loss(scores: Tensor, labels: Tensor) -> Any:
            return own(logits=scores, labels=labels, vocab_size=vocabulary)

        return loss


def count_labels(labels: Tensor) -> Tensor:
    """How many labels of a microbatch count: all but the first of a sequence, which nothing predicts, and those that are ignored."""
    return (labels[..., 1:] != IGNORED).sum()


def open_batch(args: tuple[Any, ...], default: Any = None) -> tuple[tuple[Any, ...], Any]:
    """Take the labels out of a batch from a tokenizer or collator; return its other inputs as one dict, and the labels or the default."""
    if len(args) != 1 or not isinstance(args[0], Mapping):
        return args, default
    inputs = dict(args[0])
    if inputs.pop(_COUNT, None) is not None:
        raise ScheduleError(
            f"{_COUNT} in a batch: a step's loss is the mean over all labels of its batch that count, which takes no other number; leave "
            "it out, and scale gradients yourself where several steps are one batch"
        )
    labels = inputs.pop("labels", default)
    return (inputs,), labels


def recognise_model(
    model: Any, split: Any, loss_fn: Callable[..., Any] | None, weight: Callable[[Any], Any] | None
) -> tuple[Any, Callable[..., Any] | None, Callable[[Any], Any] | None]:
    """A model of transformers' is known by itself, and has its own loss, weighted by the labels that count."""
    if split is None and is_transformers_model(model):
        split = HuggingFace()
    if isinstance(split, HuggingFace) and loss_fn is None:
        return split, split.loss(model), weight or count_labels
    return split, loss_fn, weight


class _Cutter:
    """A model that is known well enough to be cut."""

    def __init__(self, anatomy: ModelStructure) -> None:
        self.anatomy, self.order, self.balance = anatomy, find_run_order(anatomy), find_router_loss(anatomy)
        self.count = anatomy.count + 2

    @classmethod
    def of(cls, model: Any) -> _Cutter:
        return cls(find_structure(model))

    def _modules(self, unit: int) -> list[nn.Module]:
        around, blocks = self.anatomy.around, self.anatomy.blocks
        if 0 < unit < self.count - 1:
            return [blocks[unit - 1]]
        return [around[path] for path in (self.order.tail if unit else self.order.head)]

    def weights(self) -> list[int]:
        return [1 + sum(p.numel() for module in self._modules(unit) for p in module.parameters()) for unit in range(self.count)]

    def title(self, unit: int) -> str:
        if 0 < unit < self.count - 1:
            return self.anatomy.name(f"{self.anatomy.layers}.{unit - 1}")
        return " + ".join(map(self.anatomy.name, self.order.tail if unit else self.order.head))

    def parts(self, cuts: Sequence[range]) -> list[Part]:
        """The stages that have these units, once they were seen to do as the whole model does."""
        rehearse(self.anatomy, self.order, cuts)
        portions = [HuggingFaceStage(self.anatomy, self.order, units, self.balance) for units in cuts]
        return [Part(each, tuple(map(self.anatomy.name, each.names)), tuple(each.parts)) for each in portions]
