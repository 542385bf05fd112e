"""The vocabulary of a model, spread over the ranks of a pipeline: its embedding, and its head with the cross-entropy.

Each rank has some rows of both weights. `SpreadHead` and `SpreadEmbedding` have one method per action of a spread schedule (see
`ir.dependencies`):

| action | head | embedding |
|---|---|---|
| `BROADCAST` | brings the head's input to all ranks | brings the gradient of the embedding's output to all ranks |
| `S` | logits of the rank's rows, their softmax and the logarithm of its denominator, part of the input's gradient | the rank's rows |
| `COMBINE` | that logarithm for all rows, and with it the losses and the gradient of the input | the sum of all ranks' rows |
| `T` | gradients of the rank's rows | gradients of the rank's rows |

Rank r knows the softmax of its own rows and z_r, the logarithm of the sum of their exponentials. That of all rows is z, the logarithm of
the sum of exp(z_r): two collectives of one number per token, because the largest z_r comes first. The softmax over the whole vocabulary is
the rank's times exp(z_r - z). The gradient of the head's input is the sum over the ranks of exp(z_r - z) times what S has computed with
the rank's softmax, less the weights of the target's row: a third collective.

The collectives of both layers run on one `CollectiveLane`, one at a time and in the order in which they are joined: that
order is the same on all ranks, as the verifier's rule `joined` proves. The losses are those of `torch.nn.functional.cross_entropy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.batch.loss import NO_MAP, LogitMap
from penstock.runtime.device.rows import scale_rows, take_softmax
from penstock.runtime.parallel.collective_lane import (
    Broadcast,
    Collective,
    CollectiveLane,
    JoinedCollective,
    Largest,
    Sum,
    exchange_nothing,
)
from penstock.runtime.torch_internals.tensors import gradient_hooks, post_accumulate_hooks
from penstock.text.numbers import format_count

_MOST_DIMENSIONS = 8
"""Of the head's input, if its shape travels with it."""


def split_rows(rows: int, ranks: int, shares: Sequence[float] = ()) -> list[int]:
    """How many rows of the vocabulary each rank has: as near to its share as can be, at least one, and by default equally many.

    Of equally near ones, the first ranks have one more.

    >>> split_rows(10, 4)
    [3, 3, 2, 2]
    >>> split_rows(10, 3, [0.75, 0.25, 0.0])
    [7, 2, 1]
    """
    if rows < ranks:
        raise PipelineError(f"a vocabulary of {format_count(rows, 'row')} cannot be spread over {ranks} ranks: each needs at least one")
    _check_shares(shares, ranks)
    wanted = [rows * share for share in shares] or [rows / ranks] * ranks
    counts = [max(int(count), 1) for count in wanted]
    while sum(counts) != rows:
        step = 1 if sum(counts) < rows else -1
        near = [step * (count - whole) for count, whole in zip(wanted, counts, strict=True)]
        able = [rank for rank in range(ranks) if counts[rank] + step >= 1]
        counts[max(able, key=near.__getitem__)] += step
    return counts


def _check_shares(shares: Sequence[float], ranks: int) -> None:
    if shares and len(shares) != ranks:
        raise PipelineError(f"{len(shares)} shares of the vocabulary for {ranks} ranks: give the part of each")
    wrong = next((rank for rank, share in enumerate(shares) if not 0 <= share <= 1), None)
    if wrong is not None:
        raise PipelineError(f"rank {wrong} has a share of {shares[wrong]} of the vocabulary: it is a part, from 0 to 1")
    if shares and not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise PipelineError(f"the shares of the vocabulary are {sum(shares):.6g} in all, not 1: give the part of each of {ranks} ranks")


class _RowShard:
    """A rank's rows of a weight of the vocabulary."""

    first: int
    """The first of them in the whole weight."""
    weight: nn.Parameter
    """The rank's rows. T adds to their gradient, unless they are frozen."""

    def __init__(self, weight: Tensor | _RowShard, lane: CollectiveLane, owner: int, what: str, shares: Sequence[float]) -> None:
        if not 0 <= owner < lane.ranks:
            raise PipelineError(f"rank {owner} has the {what}, but the group has ranks 0 to {lane.ranks - 1}")
        self.lane, self.owner = lane, owner
        if isinstance(weight, _RowShard):
            if weight.lane is not lane:
                raise PipelineError("a head that shares its weight with an embedding joins collectives on the same lane")
            self.first, self.weight = weight.first, weight.weight
            return
        sizes = split_rows(len(weight), lane.ranks, shares)
        self.first = sum(sizes[: lane.rank])
        self.weight = self._take(weight, sizes[lane.rank])

    def _take(self, whole: Tensor, count: int) -> nn.Parameter:
        """The rank's rows of a weight or bias; frozen if the whole is a frozen parameter."""
        trained = whole.requires_grad or not isinstance(whole, nn.Parameter)
        return nn.Parameter(whole.detach()[self.first : self.first + count].clone(), requires_grad=trained)

    @property
    def rows(self) -> slice:
        """The rank's rows in the whole weight."""
        return slice(self.first, self.first + len(self.weight))

    def _find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens are rows of this rank, and their places among these rows; any rows, about equally often, for the others."""
        place = tokens.long() - self.first  # types with few digits would wrap around
        own = (place >= 0) & (place < len(self.weight))
        return own, place.remainder(len(self.weight))


def _broadcast(value: Tensor, source: int) -> Collective:
    return (yield Broadcast(value, source))


def _sum_on(target: int, value: Tensor) -> Collective:
    return (yield Sum(value, target))


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add to a parameter's gradient, and run its hooks, as autograd does."""
    gradient = gradient.to(parameter.dtype)
    hooks = gradient_hooks(parameter)
    for hook in list(hooks.values()) if hooks else ():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    _run_hooks(parameter)


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """The same for the product of two matrices, which is added as it is computed unless a hook wants it alone."""
    if parameter.grad is None or gradient_hooks(parameter):
        _add_gradient(parameter, left @ right)
        return
    parameter.grad.addmm_(left, right)
    _run_hooks(parameter)


def _run_hooks(parameter: nn.Parameter) -> None:
    """Run the post-accumulate hooks of a parameter."""
    hooks = post_accumulate_hooks(parameter)
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


class _Share(NamedTuple):
    """What S of the head has made of a microbatch."""

    hidden: Tensor | None
    """The head's input, one row per token. None without gradients, like the softmax and the gradient."""
    softmax: Tensor | None
    """Of the rank's rows, times the slopes of capped logits, in the type of the weights. None if these are frozen, too."""
    log_total: Tensor
    """The logarithm of the sum of the exponentials of the rank's logits."""
    picked: Tensor
    """The logit of the target, on the rank that has its row; else 0."""
    gradient: Tensor | None
    """The softmax times the slopes and the weights."""
    slope: Tensor | None
    """The slope of the target's capped logit. None without a cap."""
    own: Tensor
    """Whether the target is a row of this rank and counts."""
    place: Tensor
    """The row of the target among those of this rank; any row if it has another."""
    counts: Tensor
    """Whether the target counts."""
    scale: Tensor
    """How much the loss of each token counts, times the scale of the logits."""


class _Combined(NamedTuple):
    """What COMBINE of the head has made of a microbatch."""

    factor: Tensor
    """From the rank's softmax to that of all rows."""
    losses: Tensor
    gradient: Tensor | None
    """Of the head's input, on the owner."""


class SpreadHead(_RowShard):
    """The output layer and the cross-entropy, spread over the ranks.

    `weight` (vocabulary x hidden) and `bias` are the whole ones, the same on every rank, which keeps its own rows. With a `SpreadEmbedding`
    in place of the weight, both layers share one parameter, and their gradients add up in it (tied embeddings). `owner` is the rank of the
    last stage. Exponentials, sums and losses are computed in float32, or in the type of the weight if that has more digits, and differences
    of logits of different ranks in float64; the softmax is kept in the type of the weight. Targets equal to `ignore_index` have no loss.
    Logits are the products of the rows times `logit_scale`, and with a `logit_cap` then `logit_cap * tanh(logits / logit_cap)`.
    `shares` is the part of the rows that each rank keeps, by default an equal one; with one weight for both, it is the `SpreadEmbedding`
    that has it.

    For each microbatch, by its number, every rank calls `join_broadcast`, `run_share` and `join_combine` in this order, and then once
    each, in any order, `add_weight_gradients`, `take_losses` and, on the owner, `take_input_gradient`. Calls for different microbatches may
    be mixed, with the collectives in one order on all ranks.
    """

    def __init__(
        self,
        weight: Tensor | SpreadEmbedding,
        bias: Tensor | None = None,
        *,
        lane: CollectiveLane,
        owner: int,
        ignore_index: int = -100,
        logit_scale: float = 1.0,
        logit_cap: float | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        super().__init__(weight, lane, owner, "last stage", shares)
        if not logit_scale or (logit_cap is not None and logit_cap <= 0):
            raise PipelineError(f"logit_scale is {logit_scale} and logit_cap {logit_cap}: the scale must not be 0, and a cap be above 0")
        self.logit_map = LogitMap(logit_scale, logit_cap)
        self.bias = None if bias is None else self._take(bias, len(self.weight))
        self.ignore_index = ignore_index
        self.dtype = torch.promote_types(self.weight.dtype, torch.float32)
        self.restart(lane)

    @property
    def _trains(self) -> bool:
        """Whether T has a gradient to compute."""
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)

    def restart(self, lane: CollectiveLane) -> None:
        """Forget all microbatches in progress, after a failure, and join collectives on this lane from now on."""
        self.lane = lane
        self._inputs: dict[int, JoinedCollective] = {}
        self._shares: dict[int, _Share] = {}
        self._factors: dict[int, JoinedCollective] = {}
        self._losses: dict[int, JoinedCollective] = {}
        self._gradients: dict[int, JoinedCollective] = {}

    def join_broadcast(self, unit: int, hidden: Tensor) -> None:
        """BROADCAST: `hidden` is the head's input on the owner; elsewhere a tensor of its shape and type, which is overwritten."""
        value = hidden.detach().contiguous()
        self._join_broadcast(unit, _broadcast(value, self.owner), value)

    def join_broadcast_of_any_shape(self, unit: int, hidden: Tensor | None) -> None:
        """BROADCAST with its shape: `hidden` is the head's input on the owner, and None elsewhere. All ranks must call this one."""
        value = None if hidden is None else hidden.detach().contiguous()

        def broadcast() -> Collective:
            sizes = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64, device=self.weight.device)
            if value is not None:
                sizes[: 1 + value.dim()] = torch.tensor([value.dim(), *value.shape])
            count, *shape = (yield Broadcast(sizes, self.owner)).tolist()
            received = self.weight.new_empty(shape[:count]) if value is None else value
            return (yield Broadcast(received, self.owner))

        self._join_broadcast(unit, broadcast(), *([] if value is None else [value]))

    def _join_broadcast(self, unit: int, steps: Collective, *tensors: Tensor) -> None:
        if unit in self._inputs or unit in self._shares:
            raise PipelineError(f"microbatch {unit} of the spread head is in progress already")
        self._inputs[unit] = self.lane.join(steps, *tensors)

    def compute_logits(self, unit: int) -> Tensor:
        """S without targets: the logits of the rank's rows, with which the microbatch ends. Every rank joins COMBINE with nothing."""
        hidden = self.lane.take(self._inputs.pop(unit))
        with torch.no_grad():
            return self.logit_map.apply(functional.linear(hidden, self.weight, self.bias))

    def join_nothing(self) -> None:
        """COMBINE without targets."""
        self.lane.join(exchange_nothing())

    def run_share(
        self, unit: int, targets: Tensor, weights: Tensor | float = 1.0, *, gradients: bool = True, outputs: bool = False
    ) -> Tensor | None:
        """S: the logits of the rank's rows, which it returns for `outputs`, and its part of the gradient of the head's input.

        `weights` is how much the loss of each token counts in the gradients, such as one over the number of tokens for a mean.
        Without `gradients` only losses can be taken, by `take_losses`, and nothing else of the microbatch is kept after COMBINE.
        """
        hidden = self.lane.take(self._inputs.pop(unit))
        shape = hidden.shape[:-1]
        hidden, targets = hidden.view(-1, hidden.shape[-1]), targets.reshape(-1).long()
        if len(targets) != len(hidden):
            raise PipelineError(f"microbatch {unit} has {len(hidden)} tokens, but {len(targets)} targets")
        counts = targets != self.ignore_index
        scale = counts * torch.as_tensor(weights, dtype=self.dtype, device=targets.device) * self.logit_map.scale
        own, place = self._find(targets)
        own &= counts
        with torch.no_grad():
            output = functional.linear(hidden, self.weight, self.bias)
            returned = self.logit_map.apply(output.clone()).view(*shape, -1) if outputs else None
            logits = output if self.logit_map == NO_MAP else self.logit_map.apply(output.to(self.dtype))
            picked = torch.where(own, logits.gather(1, place[:, None])[:, 0].double(), 0.0)
            slopes, slope = (self._compute_slopes(values) if gradients else None for values in (logits, picked.to(self.dtype)))
            log_total = take_softmax(logits)
            softmax = logits if slopes is None else logits.mul_(slopes).to(output.dtype)
            gradient = (softmax @ self.weight).to(self.dtype) if gradients else None
        kept = softmax if gradients and self._trains else None
        self._shares[unit] = _Share(hidden if gradients else None, kept, log_total, picked, gradient, slope, own, place, counts, scale)
        return returned

    def _compute_slopes(self, logits: Tensor) -> Tensor | None:
        """The derivative of capped logits by the uncapped ones; None without a cap."""
        return None if self.logit_map.cap is None else 1 - (logits / self.logit_map.cap) ** 2

    def join_combine(self, unit: int) -> None:
        """COMBINE: the denominator of the softmax over all rows, the losses, and the gradient of the head's input."""
        share = self._shares[unit]
        combined = self.lane.join(self._combine(share), *(tensor for tensor in share if tensor is not None))
        self._losses[unit] = combined
        if share.hidden is None:
            del self._shares[unit]
            return
        self._factors[unit] = combined
        if self.lane.rank == self.owner:
            self._gradients[unit] = combined

    def _combine(self, share: _Share) -> Collective:
        largest = yield Largest(share.log_total.clone())
        total, picked = yield Sum(torch.stack(((share.log_total - largest).exp(), share.picked)))
        log_total = largest + total.log()
        factor = (share.log_total - log_total).exp().to(self.dtype)
        losses = torch.where(share.counts, log_total - picked, 0.0).to(self.dtype)
        if share.hidden is None or share.gradient is None:
            return _Combined(factor, losses, None)
        slope = share.own if share.slope is None else share.own * share.slope
        gradient = share.gradient * factor[:, None] - slope[:, None] * self.weight.detach()[share.place]
        gradient = yield Sum(gradient * share.scale[:, None], self.owner)
        return _Combined(factor, losses, gradient.to(share.hidden.dtype))

    def take_losses(self, unit: int) -> Tensor:
        """The loss of each token, on every rank; 0 for those that do not count. Waits for the COMBINE."""
        losses: Tensor = self.lane.take(self._losses.pop(unit)).losses
        return losses

    def take_input_gradient(self, unit: int) -> Tensor:
        """The gradient of the head's input, one row per token, on the owner. Waits for the COMBINE."""
        if self.lane.rank != self.owner:
            raise PipelineError(f"the gradient of the head's input is on rank {self.owner}, and this is rank {self.lane.rank}")
        gradient: Tensor = self.lane.take(self._gradients.pop(unit)).gradient
        return gradient

    def add_weight_gradients(self, unit: int) -> None:
        """T: add to the gradients of the rank's rows, and let go of the logits. Waits for the COMBINE."""
        combined, share = self.lane.take(self._factors.pop(unit)), self._shares.pop(unit)
        if share.softmax is None:  # frozen
            return
        with torch.no_grad():
            assert share.hidden is not None
            errors, column = share.softmax, share.place[:, None]
            scale_rows(errors, combined.factor * share.scale)
            targets = torch.expm1(-combined.losses) * share.scale  # the softmax less 1, with all digits if it is close to 1
            targets = targets if share.slope is None else targets * share.slope
            errors.scatter_(1, column, torch.where(share.own[:, None], targets[:, None].to(errors.dtype), errors.gather(1, column)))
            if self.bias is not None and self.bias.requires_grad:
                _add_gradient(self.bias, errors.sum(dim=0, dtype=self.dtype))
            if self.weight.requires_grad:
                _add_product(self.weight, errors.t(), share.hidden)


class SpreadEmbedding(_RowShard):
    """The input embedding, spread over the ranks; `owner` is the rank of stage 0.

    For each microbatch every rank calls `run_share` and `join_combine`, and later `join_broadcast` and `add_weight_gradients`. The row
    `padding_idx` gets no gradient, as in `torch.nn.Embedding`.
    """

    def __init__(
        self, weight: Tensor, *, lane: CollectiveLane, owner: int, padding_idx: int | None = None, shares: Sequence[float] = ()
    ) -> None:
        super().__init__(weight, lane, owner, "first stage", shares)
        self.padding_idx = padding_idx
        self.frozen = not self.weight.requires_grad
        """Whether its rows were frozen from the beginning: then no rank gets the gradient of its output."""
        self.restart(lane)

    def restart(self, lane: CollectiveLane) -> None:
        """Forget all microbatches in progress, after a failure, and join collectives on this lane from now on."""
        self.lane = lane
        self._tokens: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._combined: dict[int, JoinedCollective] = {}
        self._gradients: dict[int, JoinedCollective] = {}

    def run_share(self, unit: int, tokens: Tensor, *, gradients: bool = True) -> None:
        """S: the rows of the tokens that this rank has, zeros for the others. Without `gradients` the microbatch ends with its output."""
        if unit in self._tokens:
            raise PipelineError(f"microbatch {unit} of the spread embedding is in progress already")
        own, place = self._find(tokens)
        if gradients:
            self._tokens[unit] = tokens
        self._made[unit] = torch.where(own[..., None], self.weight.detach()[place], 0.0)

    def join_combine(self, unit: int) -> None:
        """COMBINE: the rows of all tokens, on the owner."""
        made = self._made.pop(unit)
        combined = self.lane.join(_sum_on(self.owner, made), made)
        if self.lane.rank == self.owner:
            self._combined[unit] = combined

    def take_output(self, unit: int) -> Tensor:
        """The embeddings of a microbatch, on the owner. Waits for the COMBINE."""
        if self.lane.rank != self.owner:
            raise PipelineError(f"the embeddings are on rank {self.owner}, and this is rank {self.lane.rank}")
        output: Tensor = self.lane.take(self._combined.pop(unit))
        return output

    def join_broadcast(self, unit: int, gradient: Tensor) -> None:
        """BROADCAST: the gradient of the embeddings from the owner; elsewhere a tensor of its shape and type, which is overwritten.

        Frozen rows need none: every rank joins with any tensor, and nothing is sent.
        """
        value = gradient.detach().contiguous()
        if self.frozen:
            self._gradients[unit] = self.lane.join(exchange_nothing(value), value)
            return
        self._gradients[unit] = self.lane.join(_broadcast(value, self.owner), value)

    def add_weight_gradients(self, unit: int) -> None:
        """T: add to the gradients of the rank's rows. Waits for the BROADCAST."""
        gradient, tokens = self.lane.take(self._gradients.pop(unit)), self._tokens.pop(unit)
        if not self.weight.requires_grad:
            return
        own, place = self._find(tokens)
        if self.padding_idx is not None:
            own &= tokens != self.padding_idx
        # Tokens of other ranks add zeros: to select those of this rank, the host would have to wait for the device.
        added = torch.where(own[..., None], gradient, 0.0).to(self.weight.dtype).flatten(0, -2)
        if self.weight.grad is None or gradient_hooks(self.weight):
            _add_gradient(self.weight, torch.zeros_like(self.weight.detach()).index_add_(0, place.flatten(), added))
            return
        self.weight.grad.index_add_(0, place.flatten(), added)
        _run_hooks(self.weight)
