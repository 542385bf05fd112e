"""The load-balancing loss of a mixture of experts, summed from stage to stage.

The whole model's loss is a product of two means over all layers, so it is not a sum over stages. The two sums, with one number per
expert each, are sent along with the hidden states, and added up in the order of the layers as the whole model does.
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
from penstock.runtime.model.hugging_face.structure import ModelStructure
from penstock.runtime.model.random_streams import preserve_random_state

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
    wanted = getattr(structure.config, "output_router_logits", False)
    if not wanted or (own is None and not hasattr(structure.config, "router_aux_loss_coef")):
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
            mine = loss.compute(loss.add(loss.add(None, logits[:1], mask), logits[1:], mask))
            try:
                expected = loss.coefficient * own(logits, loss.experts, loss.chosen, mask)
            except Exception:  # it takes other arguments
                return False
            if not isinstance(expected, Tensor) or mine is None or not torch.allclose(mine, expected):
                return False
    return True
