"""Measure the time and memory of a model layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError, WholeBackwardNeeded, nearest
from penstock.planner.profile import Layer, Profile
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.device.gpu import default_device_type, device_name, is_initialized
from penstock.runtime.device.memory import PeakMemory
from penstock.runtime.device.timing import Stopwatch
from penstock.runtime.measure import memory
from penstock.runtime.measure.preserved_state import preserve_state
from penstock.runtime.model.hugging_face import HuggingFace, open_batch, recognise_model
from penstock.runtime.model.partition import Layers, partition
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import detach_as_leaves, detach_tree, find_differentiable
from penstock.runtime.torch_internals import pytree

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
    """Measure a model: the times of F, I and W and the memory of each layer. Times are in seconds, sizes in bytes.

    - `model`: a list of layers, an `nn.Sequential`, a causal language model of transformers, or another module with `split=Layers(...)`;
    - `sample`: one microbatch. A dict is the inputs and labels of a model of transformers, a tuple is several arguments.
      `microbatch_sizes` measures other sizes too, by repeating its rows;
    - `loss_fn(output, target)` or `loss_fn(output)` counts as part of the last layer; without one, its backward starts from ones;
    - `optimizer`: the optimizer whose memory counts: adamw, adam, sgd or none, or a function that makes one from parameters;
    - `device`: the device to move the model and the sample to; "auto" is a GPU if there is one.

    Each layer runs as a stage does: its backward is split by the same code, so that W is the work that can really be deferred. Times
    are medians of `repeats` rounds after `warmup`; on a GPU, of the GPU's own time. Memory counts the distinct storages that the
    forward saves, and those kept for the deferred weight gradients; on a GPU also the workspace beyond that. Nothing of the model
    changes except its device.
    """
    if warmup < 0 or repeats < 1:
        raise ScheduleError(f"warmup={warmup}, repeats={repeats}: at least 0 and 1")
    split, sample, loss_fn, target = _open_hugging_face(model, split, sample, loss_fn, target)
    named = _named_layers(model, split)
    args, target = _move(device, named, (sample if isinstance(sample, tuple) else (sample,), target))
    profiler = _Profiler(
        named, Loss(loss_fn, "mean") if loss_fn is not None else None, _find_optimizer(optimizer), warmup, repeats, progress
    )
    sizes = list(dict.fromkeys(microbatch_sizes or [count_rows(args)]))
    if min(sizes) < 1:
        raise ScheduleError(f"microbatch_sizes={sizes}: a microbatch has at least 1 row")
    first, *others = (profiler.profile(size, _resize(args, size), _resize(target, size)) for size in sizes)
    source = f"measured on {_device_name(args)} with torch {torch.__version__}, median of {repeats}"
    return replace(
        first, latency=latency, bandwidth=bandwidth, time_unit="s", size_unit="B", source=source, keeps_output=True, variants=others
    )


def count_rows(sample: Any) -> int:
    """How many rows a sample has."""
    rows = mb.batch_size(sample, 0)
    if rows is None:
        raise ScheduleError("the sample has no tensor with a batch dimension: give at least one tensor")
    return rows


def _resize(value: Any, size: int) -> Any:
    """A microbatch of this many rows, which repeats those of the sample as needed. It is not a view of a larger batch."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf.clone() if len(leaf) == size else leaf[torch.arange(size, device=leaf.device) % len(leaf)]

    return pytree.tree_map(resize, value)


def _open_hugging_face(model: Any, split: Any, sample: Any, loss_fn: Any, target: Any) -> tuple[Any, Any, Any, Any]:
    """Recognise a model of transformers, which has its own loss if there are labels; all others stay as they are."""
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


def _find_optimizer(optimizer: Optimizer | str | None) -> Optimizer | None:
    if not isinstance(optimizer, str):
        return optimizer
    known: dict[str, Optimizer | None] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "none": None}
    if optimizer not in known:
        raise ScheduleError(f"there is no optimizer {optimizer!r}: {nearest(optimizer, known)}")
    return known[optimizer]


def _move(device: str | torch.device | None, named: list[tuple[str, nn.Module]], value: Any) -> Any:
    """Move the layers and a value to a device, and return the value; without a device, everything stays where it is."""
    if device is None:
        return value
    try:
        destination = torch.device(default_device_type() if device == "auto" else device)
        torch.empty(0, device=destination)
    except (RuntimeError, AssertionError) as error:  # raised by torch for an unknown name, and for a device that is not there
        raise ScheduleError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    for _, layer in named:
        layer.to(destination)
    return pytree.tree_map(lambda leaf: leaf.to(destination) if isinstance(leaf, Tensor) else leaf, value)


def _device_name(args: Any) -> str:
    device = next(leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
    return device_name(device)


@dataclass
class _Forward:
    """One forward of a layer as a stage runs it, with everything that its backward needs."""

    leaves: Any
    output: Any
    ends: list[Tensor]
    deferral: Deferral

    def ones(self) -> list[Tensor | None]:
        """The gradients that the backward starts from."""
        return [torch.ones_like(end) for end in self.ends]


@dataclass
class _Profiler:
    """Measures all layers for one microbatch size after another."""

    named: list[tuple[str, nn.Module]]
    loss: Loss | None
    optimizer: Optimizer | None
    warmup: int
    repeats: int
    progress: Callable[[str, int, int], None] | None

    def profile(self, size: int, args: tuple[Any, ...], target: Any) -> Profile:
        """Measure all layers for one microbatch size, in rounds over all of them, so that a disturbance affects one time of each."""
        layers: list[_MeasuredLayer] = []
        inputs: Any = args
        with preserve_state([module for _, module in self.named]), torch.enable_grad():
            for _, module in self.named:
                module.zero_grad(set_to_none=True)
            for place, (name, module) in enumerate(self.named):
                last = place == len(self.named) - 1
                stage = Stage(place, module, unpack=place == 0)
                layers.append(_MeasuredLayer(name, stage, self.loss if last else None, target, inputs))
                inputs = layers[-1].measure_memory(self.warmup, self.optimizer)
            for done in range(self.repeats):
                if self.progress is not None:
                    self.progress(f"round {done + 1} of {self.repeats}, microbatches of {size}", done, self.repeats)
                for layer in layers:
                    layer.times.append(layer.time())
        return Profile([layer.result() for layer in layers], microbatch=size, input=float(memory.bytes_of(args)))


@dataclass
class _MeasuredLayer:
    """One layer, and its times and sizes so far."""

    name: str
    stage: Stage
    loss: Loss | None
    target: Any
    inputs: Any
    times: list[tuple[float, float, float]] = field(default_factory=list)
    sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Inspect the modules here, so that no timed run does."""
        self._can_split = self.stage.splits
        self._deferrable = self.stage.deferrable()

    def measure_memory(self, warmup: int, optimizer: Optimizer | None) -> Any:
        """Warm up and measure the sizes; returns the output, which is the input of the next layer."""
        for _ in range(warmup):
            self.time()
        held, stash, output = self._held()
        module = self.stage.module
        sizes = {
            "activation": held,
            "weight_stash": stash,
            "workspace": self._workspace(held),
            "output": memory.bytes_of(output),
            "parameters": sum(memory.module_sizes(module).values()),
            "gradients": memory.bytes_of([p.grad for p in module.parameters()]),
            "optimizer": memory.optimizer_bytes(module, optimizer),
        }
        self.sizes = {name: float(size) for name, size in sizes.items()}
        return output

    def result(self) -> Layer:
        f, i, w = (statistics.median(column) for column in zip(*self.times, strict=True))
        return Layer(name=self.name, f=f, i=i, w=w, **self.sizes)

    @property
    def _splits(self) -> bool:
        return self._can_split and self.stage.whole is None

    def _forward(self, leaves: Any, split: bool = True) -> _Forward:
        """Run a forward; a layer whose backward turns out not to be splittable is measured with a whole one from then on."""
        if split and self._splits:
            try:
                return self._run_forward(leaves, Deferral())
            except WholeBackwardNeeded as need:
                self.stage.whole = need.reason
                leaves = detach_as_leaves(self.inputs)
        return self._run_forward(leaves, None)

    def _run_forward(self, leaves: Any, deferral: Deferral | None) -> _Forward:
        with nullcontext() if deferral is None else self._deferrable.forward(deferral):
            output = self.stage.run([leaves], {})
            loss = None if self.loss is None else self.loss(output, None if self.target is None else [self.target], 0)
        ends = find_differentiable(output if loss is None else loss)
        return _Forward(leaves, output, ends, deferral or Deferral())

    def _backward(self, run: _Forward, grads: list[Tensor | None]) -> None:
        if not run.ends:
            return
        if self._splits:
            self._deferrable.backward_input(run.deferral, run.ends, grads)
        else:
            run_backward(run.ends, grads)

    def time(self) -> tuple[float, float, float]:
        """The times of F, I and W, without making the input and the gradients of the output."""
        leaves = detach_as_leaves(self.inputs)
        watch = Stopwatch(self.inputs)
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
        """The peak memory of F, I, W and B beyond what is held; 0 if the device does not count it."""
        if not is_initialized():
            return 0
        peak = PeakMemory()
        run = self._forward(detach_as_leaves(self.inputs))
        grads = run.ones()
        beyond = [peak.bytes() - held - (memory.bytes_of(run.output) if self.loss is None else 0)]
        beyond += [_peak_of(lambda: self._backward(run, grads)), _peak_of(lambda: self.stage.backward_weights(run.deferral))]
        whole = self._forward(detach_as_leaves(self.inputs), split=False)
        whole_grads = whole.ones()
        return max(0, *beyond, _peak_of(lambda: run_backward(whole.ends, whole_grads) if whole.ends else None))

    def _held(self) -> tuple[int, int, Any]:
        """The bytes held from F to I, those held from I to W, and the output."""
        own = memory.module_sizes(self.stage.module)
        with memory.watch_saved_tensors() as saved:
            run = self._forward(detach_as_leaves(self.inputs))
            held = {**saved, **memory.storage_sizes(run.leaves)}
            if self.loss is None:  # the output counts as an input of the next layer, or as a message
                output_sizes = memory.storage_sizes(run.output)
                held = {key: size for key, size in held.items() if key not in output_sizes}
            self._backward(run, run.ones())
        stash = memory.storage_sizes([(record.grad, record.value, record.extra) for record in run.deferral.operators])
        output = detach_tree(run.output)
        self.stage.backward_weights(run.deferral)
        return memory.bytes_without(held, own), memory.bytes_without(stash, own), output


def _peak_of(work: Callable[[], None]) -> int:
    peak = PeakMemory()
    work()
    return peak.bytes()
