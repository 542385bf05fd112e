"""Measure a model layer by layer on the device that it is on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import PlacementError, ScheduleError, WholeBackwardNeeded, nearest
from penstock.planner.profile import Layer, Profile
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.device import device as device_calls
from penstock.runtime.measure import memory as holdings
from penstock.runtime.model.hugging_face import HuggingFace, open_batch, recognise_model
from penstock.runtime.model.module_state import ModuleState
from penstock.runtime.model.partition import Layers, partition
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import detach_as_leaves, detach_tree, find_differentiable

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def profile(
    model: Any,
    sample: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    split: Layers | HuggingFace | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    optimizer: Optimizer | str | None = "adamw",
    device: str | torch.device | None = None,
    warmup: int = 3,
    repeats: int = 7,
    latency: float = 0.0,
    bandwidth: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """The profile of a model: F, I and W of every layer, and what each holds. Times in seconds, sizes in bytes.

    - `model`: a list of layers, an `nn.Sequential`, a causal language model of transformers', or another module with `split=Layers(...)`;
    - `sample`: a microbatch; a dict is the inputs and labels of a model of transformers', a tuple several arguments. `microbatch_sizes`
      measures other sizes too, from its rows repeated;
    - `loss_fn(output, target)` or `loss_fn(output)` counts with the last layer; without one its backward starts from ones;
    - `optimizer`: whose memory counts: adamw, adam, sgd or none, or what makes one from parameters;
    - `device`: move the model and the sample there; "auto" is a GPU if there is one.

    Each layer is run as a stage is: its backward is split by the same means, so that W is what can really wait. Times are
    the median of `repeats` rounds after `warmup`; on a GPU, of its own time. Memory is what is really held: the distinct memory that the
    forward saves, and that the weights' backward waits with; on a GPU also what is needed beyond that while a layer runs. Nothing
    of the model is changed but its device.
    """
    if warmup < 0 or repeats < 1:
        raise ScheduleError(f"warmup={warmup}, repeats={repeats}: at least 0 and 1")
    split, sample, loss_fn, target = _opened(model, split, sample, loss_fn, target)
    named = _named_layers(model, split)
    args, target = _on(device, named, (sample if isinstance(sample, tuple) else (sample,), target))
    measuring = _Measuring(named, Loss(loss_fn, "mean") if loss_fn is not None else None, _maker(optimizer), warmup, repeats, progress)
    sizes = list(dict.fromkeys(microbatch_sizes or [rows_of(args)]))
    if min(sizes) < 1:
        raise ScheduleError(f"microbatch_sizes={sizes}: a microbatch has at least 1 row")
    first, *others = (measuring.at(size, mb_args(args, size), mb_args(target, size)) for size in sizes)
    source = f"measured on {_device_name(args)} with torch {torch.__version__}, median of {repeats}"
    return replace(
        first, latency=latency, bandwidth=bandwidth, time_unit="s", size_unit="B", source=source, keeps_output=True, variants=others
    )


def rows_of(sample: Any) -> int:
    """How many rows a sample has."""
    own = mb.batch_size(sample, 0)
    if own is None:
        raise ScheduleError("the sample has no tensor with a batch dimension: give at least one tensor")
    return own


def mb_args(value: Any, size: int) -> Any:
    """A microbatch of so many rows: those of the sample, from the first on again where it has fewer. It is no view of a larger batch."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf.clone() if len(leaf) == size else leaf[torch.arange(size, device=leaf.device) % len(leaf)]

    return pytree.tree_map(resized, value)


def _opened(model: Any, split: Any, sample: Any, loss_fn: Any, target: Any) -> tuple[Any, Any, Any, Any]:
    """A model of transformers' is known by itself, and has its own loss where there are labels."""
    own, loss, _ = recognise_model(model, split, loss_fn, None)
    if not isinstance(own, HuggingFace):
        return split, sample, loss_fn, target
    args, labels = open_batch((sample,))
    target = labels if target is None else target
    return own, args, None if target is None and loss_fn is None else loss, target


def _named_layers(model: Any, split: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(split, HuggingFace):
        return split.units(model)
    if isinstance(model, (list, tuple, nn.ModuleList)) and split is None:
        layers = [(f"{place} {type(layer).__name__}", layer) for place, layer in enumerate(model)]
        if not layers or not all(isinstance(layer, nn.Module) for _, layer in layers):
            raise PlacementError("a model is a list of at least one layer, each an nn.Module")
        return layers
    if isinstance(split, Layers):
        inner = model.get_submodule(split.layers)
        count = len(split.head) + len(inner) + len(split.tail)
        split = replace(split, sizes=[1] * count)
    elif not isinstance(model, nn.Sequential):
        raise PlacementError(
            f"a {type(model).__name__} does not say which layers it has: give a list, an nn.Sequential or split=Layers(...)"
        )
    else:
        count = len(model)
    parts = partition(model, count, split or [1] * count).parts
    return [(part.layers[0], part.module) for part in parts if part is not None]


def _maker(optimizer: Optimizer | str | None) -> Optimizer | None:
    if not isinstance(optimizer, str):
        return optimizer
    known: dict[str, Optimizer | None] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "none": None}
    if optimizer not in known:
        raise ScheduleError(f"there is no optimizer {optimizer!r}: {nearest(optimizer, known)}")
    return known[optimizer]


def _on(device: str | torch.device | None, named: list[tuple[str, nn.Module]], value: Any) -> Any:
    """The value on the device, to which the layers are moved too; where nothing is said, all stay where they are."""
    if device is None:
        return value
    try:
        where = torch.device(device_calls.best() if device == "auto" else device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:  # torch's answers to a name that it does not know, and to a device that is not there
        raise ScheduleError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    for _, layer in named:
        layer.to(where)
    return pytree.tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, Tensor) else leaf, value)


def _device_name(args: Any) -> str:
    device = next(leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
    return device_calls.name_of(device)


@dataclass
class _Run:
    """One forward of a layer as a stage runs it, with all that its backwards need."""

    leaves: Any
    made: Any
    ends: list[Tensor]
    deferral: Deferral

    def ones(self) -> list[Tensor | None]:
        """The gradients that its backward starts from."""
        return [torch.ones_like(end) for end in self.ends]


@dataclass
class _Measuring:
    named: list[tuple[str, nn.Module]]
    loss: Loss | None
    optimizer: Optimizer | None
    warmup: int
    repeats: int
    progress: Callable[[str, int, int], None] | None

    def at(self, size: int, args: tuple[Any, ...], target: Any) -> Profile:
        """The layers for microbatches of one size, timed in rounds over all of them, so that what disturbs one run disturbs one of each."""
        ones: list[_One] = []
        given: Any = args
        with _kept([module for _, module in self.named]):
            for place, (name, module) in enumerate(self.named):
                last = place == len(self.named) - 1
                ones.append(_One(name, Stage(place, module, unpack=place == 0), self.loss if last else None, target, given))
                given = ones[-1].look(self.warmup, self.optimizer)
            for round_ in range(self.repeats):
                self._tell(f"round {round_ + 1} of {self.repeats}, microbatches of {size}", round_)
                for one in ones:
                    one.time()
        return Profile([one.layer() for one in ones], microbatch=size, input=float(sum(holdings.sizes(args).values())))

    def _tell(self, what: str, done: int) -> None:
        if self.progress is not None:
            self.progress(what, done, self.repeats)


@dataclass
class _One:
    """One layer, and what is known of it."""

    name: str
    stage: Stage
    loss: Loss | None
    target: Any
    given: Any
    times: list[tuple[float, float, float]] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look at the modules once, here, so that no timed run does."""
        self._can_split = self.stage.splits
        self._deferrable = self.stage.deferrable()

    def look(self, warmup: int, optimizer: Optimizer | None) -> Any:
        """Run it until it is warm, and see what it holds; what it gives the next one."""
        for _ in range(warmup):
            self._run_once()
        held, stash, made = self._held()
        module = self.stage.module
        found = {
            "activation": held,
            "weight_stash": stash,
            "workspace": self._workspace(held),
            "output": sum(holdings.sizes(made).values()),
            "parameters": sum(holdings.of_module(module).values()),
            "gradients": sum(holdings.sizes([p.grad for p in module.parameters()]).values()),
            "optimizer": holdings.of_optimizer(module, optimizer),
        }
        self.sizes = {name: float(size) for name, size in found.items()}
        return made

    def time(self) -> None:
        self.times.append(self._run_once())

    def layer(self) -> Layer:
        f, i, w = (statistics.median(column) for column in zip(*self.times, strict=True))
        return Layer(name=self.name, f=f, i=i, w=w, **self.sizes)

    @property
    def _splits(self) -> bool:
        return self._can_split and self.stage.whole is None

    def _forward(self, leaves: Any, split: bool = True) -> _Run:
        """A forward; a layer that turns out to need its backward whole is measured so from then on."""
        if split and self._splits:
            try:
                return self._run_forward(leaves, Deferral())
            except WholeBackwardNeeded as need:
                self.stage.whole = need.reason
                leaves = detach_as_leaves(self.given)
        return self._run_forward(leaves, None)

    def _run_forward(self, leaves: Any, deferral: Deferral | None) -> _Run:
        with nullcontext() if deferral is None else self._deferrable.forward(deferral):
            made = self.stage.run([leaves], {})
            loss = None if self.loss is None else self.loss(made, None if self.target is None else [self.target], 0)
        ends = find_differentiable(made if loss is None else loss)
        return _Run(leaves, made, ends, deferral or Deferral())

    def _backward(self, run: _Run, grads: list[Tensor | None]) -> None:
        if not run.ends:
            return
        if self._splits:
            self._deferrable.backward_input(run.deferral, run.ends, grads)
        else:
            run_backward(run.ends, grads)

    def _run_once(self) -> tuple[float, float, float]:
        """How long F, I and W take; what a layer is given, its input and the gradients of its output, is made outside of these."""
        leaves = detach_as_leaves(self.given)
        watch = device_calls.Stopwatch(self.given)
        run = self._forward(leaves)
        watch.mark()
        grads = run.ones()
        watch.mark()
        self._backward(run, grads)
        watch.mark()
        self.stage.backward_weights(run.deferral)
        watch.mark()
        f, _, i, w = watch.seconds()
        return f, i, w

    def _workspace(self, held: int) -> int:
        """What a device gives out at most while F, I, W or B runs, beyond what is held then; nothing where none counts it."""
        if not device_calls.is_running():
            return 0
        peak = device_calls.Peak()
        run = self._forward(detach_as_leaves(self.given))
        grads = run.ones()
        beyond = [peak.bytes() - held - (sum(holdings.sizes(run.made).values()) if self.loss is None else 0)]
        beyond += [_beyond(lambda: self._backward(run, grads)), _beyond(lambda: self.stage.backward_weights(run.deferral))]
        whole = self._forward(detach_as_leaves(self.given), split=False)
        whole_grads = whole.ones()
        return max(0, *beyond, _beyond(lambda: run_backward(whole.ends, whole_grads) if whole.ends else None))

    def _held(self) -> tuple[int, int, Any]:
        """What is held from F to I, and from I to W, and the output."""
        own = holdings.of_module(self.stage.module)
        with holdings.saved() as seen:
            run = self._forward(detach_as_leaves(self.given))
            held = {**seen, **holdings.sizes(run.leaves)}
            if self.loss is None:  # counted with who reads it: the next layer, or the message
                held = {key: size for key, size in held.items() if key not in holdings.sizes(run.made)}
            self._backward(run, run.ones())
        stash = holdings.sizes([(record.grad, record.value, record.extra) for record in run.deferral.operators])
        made = detach_tree(run.made)
        self.stage.backward_weights(run.deferral)
        return holdings.total(held, own), holdings.total(stash, own), made


def _beyond(work: Callable[[], None]) -> int:
    peak = device_calls.Peak()
    work()
    return peak.bytes()


@contextmanager
def _kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave gradients, buffers, attributes and torch's random state as they were."""
    grads = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    states = [ModuleState.capture(module) for module in modules]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        with torch.enable_grad(), preserve_random_state():
            yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for state in states:
            state.restore()
