"""The balance of a mixture of experts' routers, summed from stage to stage.

The whole model's loss is a product of two means over all layers, so that it is no sum over stages: what is carried along
with the hidden states are the two sums, a number an expert each, added up in the order of the layers as the whole model does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PlacementError
from penstock.runtime.model.hugging_face.anatomy import ModelStructure
from penstock.runtime.model.random_streams import preserve_random_state

RouterSums = tuple[Tensor, Tensor, Any]
"""How often each expert was chosen, its probabilities, and how many tokens and layers these are of."""


@dataclass(frozen=True)
class RouterLoss:
    """How a model's routers are to be balanced."""

    experts: int
    chosen: int
    coefficient: float
    router: type[nn.Module]
    index: int

    @contextmanager
    def watching(self, parts: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
        """Gives what the routers inside decide on, in the order in which they run."""
        found: list[Tensor] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            found.append(output[self.index] if isinstance(output, tuple) else output)

        routers = [each for part in parts for each in part.modules() if isinstance(each, self.router)]
        handles = [each.register_forward_hook(note) for each in routers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def add(self, sums: RouterSums | None, logits: Sequence[Tensor], mask: Tensor | None) -> RouterSums | None:
        """The sums with those of further layers."""
        for each in logits:
            probabilities = functional.softmax(each, dim=-1)
            _, chosen = torch.topk(probabilities, self.chosen, dim=-1)
            flat = None if mask is None else mask.reshape(-1).to(device=each.device, dtype=torch.float32)
            zeros = torch.zeros(self.experts, dtype=torch.float32, device=each.device)
            counts, weights, rows = sums or (zeros, zeros, 0.0)
            probabilities = probabilities.float()
            if flat is None:
                more = torch.bincount(chosen.reshape(-1), minlength=self.experts).float()
                sums = counts + more, weights + probabilities.sum(dim=0), rows + len(probabilities)
            else:
                more = zeros.scatter_add(0, chosen.reshape(-1), flat.repeat_interleave(self.chosen))
                sums = counts + more, weights + (probabilities * flat.unsqueeze(-1)).sum(dim=0), rows + flat.sum()
        return sums

    def loss(self, sums: RouterSums | None) -> Tensor | None:
        """The side loss of one microbatch."""
        if sums is None:
            return None
        counts, weights, rows = sums
        return self.coefficient * (torch.sum(counts / rows * (weights / rows).unsqueeze(0)) * self.experts)


def find_router_loss(anatomy: ModelStructure) -> RouterLoss | None:
    """How the model balances its routers; None where it does not. One that is computed in a way of its own is refused."""
    model: Any = anatomy.model
    own = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
    wanted = getattr(anatomy.config, "output_router_logits", False)
    if not wanted or (own is None and not hasattr(anatomy.config, "router_aux_loss_coef")):
        return None
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    router, index = getattr(recorder, "target_class", None), getattr(recorder, "index", 0)
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    experts, chosen, coefficient = (getattr(model, name, getattr(anatomy.config, name, None)) for name in names)
    if own is None or router is None or experts is None or chosen is None or coefficient is None:
        raise _unknown(model)
    found = RouterLoss(experts, chosen, coefficient, router, index)
    if not _agrees(found, own):
        raise _unknown(model)
    return found


def _unknown(model: Any) -> PlacementError:
    return PlacementError(
        f"{type(model).__name__} balances its routers in a way of its own: set config.output_router_logits = False to train without, "
        "or give a list with one module a stage"
    )


def _agrees(found: RouterLoss, own: Any) -> bool:
    """Whether the model's own function computes the same, tried on two layers of made-up tokens with and without a mask."""
    with torch.no_grad(), preserve_random_state():
        logits = tuple(torch.randn(6, found.experts) for _ in range(2))
        for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
            mine = found.loss(found.add(found.add(None, logits[:1], mask), logits[1:], mask))
            try:
                wanted = found.coefficient * own(logits, found.experts, found.chosen, mask)
            except Exception:  # it takes something else
                return False
            if not isinstance(wanted, Tensor) or mine is None or not torch.allclose(mine, wanted):
                return False
    return True
