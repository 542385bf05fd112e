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

The collectives of both layers run in the background on one `CollectiveLane`, one at a time and in the order in which they are joined: that
order is the same on all ranks, as the verifier's rule `joined` proves. The losses are those of `torch.nn.functional.cross_entropy`.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.batch.loss import NO_MAP, LogitMap
from penstock.runtime.device.connections import broadcast_options
from penstock.runtime.device.rows import scale_rows, take_softmax
from penstock.runtime.device.streams import create_streams, record_event, record_use, use_stream, wait_event
from penstock.runtime.device.timing import mark_time
from penstock.runtime.torch_internals.tensors import gradient_hooks, post_accumulate_hooks
from penstock.runtime.transport.group import do_nothing
from penstock.text.numbers import format_count

_LOOK = timedelta(seconds=0.2)
"""How long a thread waits for a collective of processes before it looks whether these were abandoned."""


_ABANDONED = "the collectives were abandoned after a failure"
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


class JoinedCollective(NamedTuple):
    """A collective that a rank has joined."""

    number: int
    """How many the rank had joined before it."""
    future: Future[Any]


class CollectiveLane(ABC):
    """Runs the collectives of one rank in the background, one after the other, in the order in which they are joined.

    On a GPU they run on a stream of their own. Use it as a context manager, or call `close` when the last one has been waited for.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.joined = 0
        """How many collectives this rank has joined."""
        self.on_join: Callable[[], None] | None = None
        """Called by the rank's thread when it has joined a collective."""
        self.before_take: Callable[[JoinedCollective], None] | None = None
        """Called by the rank's thread before it takes the result of a collective, to wait for it in another way; may raise."""
        self.on_take: Callable[[], None] | None = None
        """Called by the rank's thread when it has the result of a collective, and so has its stream."""
        self.times: list[tuple[Any, Any]] | None = None
        """When each collective began on this rank and when it ended, as `mark_time` tells it; None unless these are recorded."""
        self._thread = ThreadPoolExecutor(1, f"collectives of rank {rank}", initializer=use_stream, initargs=(create_streams(2)[1],))

    def join(self, work: Callable[[], Any], *tensors: Tensor) -> JoinedCollective:
        """Run `work`, which may do several collectives, when those before it are done; it uses these tensors."""
        ready, times = record_event(), self.times

        def run() -> tuple[Any, Any]:
            wait_event(ready)
            record_use(tensors)
            begun = None if times is None else mark_time()
            with torch.no_grad():
                value = work()
            if times is not None:
                times.append((begun, mark_time()))
            return value, record_event()

        collective = JoinedCollective(self.joined, self._thread.submit(run))
        self.joined += 1
        if self.on_join is not None:
            self.on_join()
        return collective

    def take(self, collective: JoinedCollective) -> Any:
        """The result of a collective, for this thread's stream to use. Waits for it, and raises the error that it has raised."""
        if self.before_take is not None:
            self.before_take(collective)
        value, done = collective.future.result()
        wait_event(done)
        if self.on_take is not None:
            self.on_take()
        record_use(value)
        return value

    def settle(self) -> None:
        """Wait until all collectives that this rank has joined have ended."""
        self._thread.submit(do_nothing).result()

    @abstractmethod
    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """The value of one rank on all ranks, in place. Like the others, called within the work of `join`, by every rank."""

    @abstractmethod
    def sum_on(self, target: int, value: Tensor) -> Tensor:
        """The sum of all ranks' values on one rank; the others get some tensor of its shape. May change the value."""

    @abstractmethod
    def sum_everywhere(self, value: Tensor) -> Tensor:
        """The sum of all ranks' values on all ranks. May change the value."""

    @abstractmethod
    def find_largest(self, value: Tensor) -> Tensor:
        """The largest of all ranks' values, element by element, on all ranks. May change the value."""

    def close(self) -> None:
        self._thread.shutdown()

    def abandon(self) -> None:
        """Close after a failure: collectives that not all ranks will join are not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessLane(CollectiveLane):
    """The collectives of processes, by a process group of torch.distributed, by default that of all processes.

    The group should have no other traffic, because a message between two of its ranks may come between its collectives. It may also be one
    that torch.distributed does not know, such as a `torch.distributed.ProcessGroupGloo`.
    """

    def __init__(self, group: Any = None) -> None:
        world: Any = dist.group.WORLD
        if group is None and world is None:
            raise PipelineError("torch.distributed is not initialised: call init_process_group first, or give a process group")
        self.group = world if group is None else group
        super().__init__(self.group.rank(), self.group.size())
        self._is_own = group is not None
        self._abandoned = False

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        return self._wait(self.group.broadcast([value], broadcast_options(source)), value)

    def sum_on(self, target: int, value: Tensor) -> Tensor:
        options = dist.ReduceOptions()
        options.rootRank = target
        return self._wait(self.group.reduce([value], options), value)

    def sum_everywhere(self, value: Tensor) -> Tensor:
        return self._wait(self.group.allreduce([value]), value)

    def find_largest(self, value: Tensor) -> Tensor:
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._wait(self.group.allreduce([value], options), value)

    def _wait(self, work: Any, value: Tensor) -> Tensor:
        """The value after a collective. A wait of gloo's cannot be interrupted, so it is made of short ones; NCCL's do not block."""
        while value.is_cpu and not work.is_completed():
            with suppress(RuntimeError):  # not yet
                work.wait(_LOOK)
            if self._abandoned:
                raise PipelineError(_ABANDONED)
        work.wait()
        return value

    def abandon(self) -> None:
        """Also aborts the group, which must be one of this lane's own: collectives in progress would last until their deadline."""
        self._abandoned = True
        super().abandon()
        if self._is_own:
            self.group.abort()


class ThreadLane(CollectiveLane):
    """The collectives of virtual ranks, which are threads of one process on one device: `ThreadLane.create(ranks)` gives one per rank."""

    def __init__(self, rank: int, shared: MeetingPoint) -> None:
        super().__init__(rank, len(shared.values))
        self._shared = shared
        shared.lanes[rank] = self

    @classmethod
    def create(cls, ranks: int, timeout: float = 60.0) -> list[ThreadLane]:
        """One lane per rank. A collective that not all ranks have joined after `timeout` seconds fails on all of them."""
        shared = MeetingPoint(ranks, timeout)
        return [cls(rank, shared) for rank in range(ranks)]

    def have_all_joined(self, collective: JoinedCollective) -> bool:
        """Whether every rank has joined a collective, so that it ends without any of them."""
        return all(lane is not None and lane.joined > collective.number for lane in self._shared.lanes)

    def abandon(self) -> None:
        super().abandon()
        self._shared.abandoned = True
        self._shared.barrier.abort()

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        with self._shared.meet(self.rank, value) as values:
            return value if self.rank == source else value.copy_(values[source])

    def sum_on(self, target: int, value: Tensor) -> Tensor:
        with self._shared.meet(self.rank, value) as values:
            return sum(values[1:], start=values[0]) if self.rank == target else value

    def sum_everywhere(self, value: Tensor) -> Tensor:
        with self._shared.meet(self.rank, value) as values:
            return sum(values[1:], start=values[0])

    def find_largest(self, value: Tensor) -> Tensor:
        with self._shared.meet(self.rank, value) as values:
            return torch.stack(values).amax(dim=0)


class MeetingPoint:
    """Where threads lay out their values for each other."""

    def __init__(self, ranks: int, timeout: float) -> None:
        self.values: list[Any] = [None] * ranks
        self.events: list[Any] = [None] * ranks
        self.lanes: list[ThreadLane | None] = [None] * ranks
        self.timeout, self.barrier = timeout, threading.Barrier(ranks)
        self.abandoned = False
        """Whether any rank has abandoned its lane."""

    @contextmanager
    def meet(self, rank: int, value: Tensor) -> Iterator[list[Tensor]]:
        """The values of all ranks, for as long as they stay as they are."""
        self.values[rank], self.events[rank] = value, record_event()
        self._wait_for_all()
        yield list(self.values)
        self.events[rank] = record_event()
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Wait until every rank is here, and for what their streams have done before."""
        try:
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            if self.abandoned:
                raise PipelineError(_ABANDONED) from None
            raise PipelineError(f"not all of {len(self.values)} ranks have joined a collective within {self.timeout:g} s") from None
        for event in self.events:
            wait_event(event)


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
        self._join_broadcast(unit, lambda: self.lane.broadcast(value, self.owner), value)

    def join_broadcast_of_any_shape(self, unit: int, hidden: Tensor | None) -> None:
        """BROADCAST with its shape: `hidden` is the head's input on the owner, and None elsewhere. All ranks must call this one."""
        value = None if hidden is None else hidden.detach().contiguous()

        def broadcast() -> Tensor:
            sizes = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64, device=self.weight.device)
            if value is not None:
                sizes[: 1 + value.dim()] = torch.tensor([value.dim(), *value.shape])
            count, *shape = self.lane.broadcast(sizes, self.owner).tolist()
            received = self.weight.new_empty(shape[:count]) if value is None else value
            return self.lane.broadcast(received, self.owner)

        self._join_broadcast(unit, broadcast, *([] if value is None else [value]))

    def _join_broadcast(self, unit: int, work: Callable[[], Tensor], *tensors: Tensor) -> None:
        if unit in self._inputs or unit in self._shares:
            raise PipelineError(f"microbatch {unit} of the spread head is in progress already")
        self._inputs[unit] = self.lane.join(work, *tensors)

    def compute_logits(self, unit: int) -> Tensor:
        """S without targets: the logits of the rank's rows, with which the microbatch ends. Every rank joins COMBINE with nothing."""
        hidden = self.lane.take(self._inputs.pop(unit))
        with torch.no_grad():
            return self.logit_map.apply(functional.linear(hidden, self.weight, self.bias))

    def join_nothing(self) -> None:
        """COMBINE without targets."""
        self.lane.join(do_nothing)

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
        combined = self.lane.join(lambda: self._combine(share), *(tensor for tensor in share if tensor is not None))
        self._losses[unit] = combined
        if share.hidden is None:
            del self._shares[unit]
            return
        self._factors[unit] = combined
        if self.lane.rank == self.owner:
            self._gradients[unit] = combined

    def _combine(self, share: _Share) -> _Combined:
        largest = self.lane.find_largest(share.log_total.clone())
        total, picked = self.lane.sum_everywhere(torch.stack(((share.log_total - largest).exp(), share.picked)))
        log_total = largest + total.log()
        factor = (share.log_total - log_total).exp().to(self.dtype)
        losses = torch.where(share.counts, log_total - picked, 0.0).to(self.dtype)
        if share.hidden is None or share.gradient is None:
            return _Combined(factor, losses, None)
        slope = share.own if share.slope is None else share.own * share.slope
        gradient = share.gradient * factor[:, None] - slope[:, None] * self.weight.detach()[share.place]
        gradient = self.lane.sum_on(self.owner, gradient * share.scale[:, None])
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
        combined = self.lane.join(lambda: self.lane.sum_on(self.owner, made), made)
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
            self._gradients[unit] = self.lane.join(lambda: value, value)
            return
        self._gradients[unit] = self.lane.join(lambda: self.lane.broadcast(value, self.owner), value)

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
