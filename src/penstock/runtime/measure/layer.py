"""Measure one layer: the times of F, I and W as a stage runs them, and the memory that it holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import WholeBackwardNeeded
from penstock.planner.profile import Layer
from penstock.runtime.batch.loss import Loss
from penstock.runtime.device.gpu import PeakMemory, is_initialized
from penstock.runtime.device.timing import Stopwatch
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import detach_as_leaves, find_differentiable
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.tensors import count_sparse_values, identify_storage

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class _Forward:
    """One forward of a layer as a stage runs it, with everything that its backward needs."""

    leaves: Any
    output: Any
    ends: list[Tensor]
    deferral: Deferral

    def make_ones(self) -> list[Tensor | None]:
        """The gradients that the backward starts from."""
        return [torch.ones_like(end) for end in self.ends]


@dataclass
class MeasuredLayer:
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
        self._deferrable = self.stage.find_deferrable()

    def measure_memory(self, warmup: int, optimizer: Optimizer | None) -> Any:
        """Warm up and measure the sizes; returns the output, which is the input of the next layer."""
        for _ in range(warmup):
            self.time()
        held, stash, output = self._measure_held()
        module = self.stage.module
        sizes = {
            "activation": held,
            "weight_stash": stash,
            "workspace": self._measure_workspace(held),
            "output": bytes_of(output),
            "parameters": sum(module_sizes(module).values()),
            "gradients": bytes_of([p.grad for p in module.parameters()]),
            "optimizer": optimizer_bytes(module, optimizer),
        }
        self.sizes = {name: float(size) for name, size in sizes.items()}
        return output

    def result(self) -> Layer:
        f, i, w = (statistics.median(column) for column in zip(*self.times, strict=True))
        sizes: dict[str, Any] = dict(self.sizes)
        return Layer(name=self.name, f=f, i=i, w=w, **sizes)

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
            output = self._run_stage(leaves)
            loss = None if self.loss is None else self.loss(output, None if self.target is None else [self.target], 0)
        ends = [*find_differentiable(output if loss is None else loss), *self._list_further_ends()]
        return _Forward(leaves, output, ends, deferral or Deferral())

    # What a slice of a sequence does otherwise ------------------------------------------------------------------------

    def _prepare(self) -> None:
        """A step before each forward that is not part of it."""

    def _run_stage(self, leaves: Any) -> Any:
        return self.stage.run([leaves], {})

    def _list_further_ends(self) -> list[Tensor]:
        """Tensors of the last forward that its backward starts from, besides the output or the loss."""
        return []

    def _list_shared(self) -> list[Tensor]:
        """Tensors that the forward uses or makes and that do not count as its own."""
        return []

    # Parts of a measurement -------------------------------------------------------------------------------------------

    def _backward(self, run: _Forward, grads: list[Tensor | None]) -> None:
        if not run.ends:
            return
        if self._splits:
            self._deferrable.backward_input(run.deferral, run.ends, grads)
        else:
            run_backward(run.ends, grads)

    def time(self) -> tuple[float, float, float]:
        """The times of F, I and W, without making the input and the gradients of the output."""
        self._prepare()
        leaves = detach_as_leaves(self.inputs)
        watch = Stopwatch(self.inputs)
        run = self._forward(leaves)
        watch.mark()
        grads = run.make_ones()
        watch.mark()
        self._backward(run, grads)
        watch.mark()
        self.stage.backward_weights(run.deferral)
        watch.mark()
        f, _, i, w = watch.seconds()
        return f, i, w

    def _measure_workspace(self, held: int) -> int:
        """The peak memory of F, I, W and B beyond what is held; 0 if the device does not count it."""
        if not is_initialized():
            return 0
        self._prepare()
        peak = PeakMemory()
        run = self._forward(detach_as_leaves(self.inputs))
        grads = run.make_ones()
        beyond = [peak.bytes() - held - (bytes_of(run.output) if self.loss is None else 0)]
        beyond += [_measure_peak(lambda: self._backward(run, grads)), _measure_peak(lambda: self.stage.backward_weights(run.deferral))]
        self._prepare()
        whole = self._forward(detach_as_leaves(self.inputs), split=False)
        whole_grads = whole.make_ones()
        return max(0, *beyond, _measure_peak(lambda: run_backward(whole.ends, whole_grads) if whole.ends else None))

    def _measure_held(self) -> tuple[int, int, Any]:
        """The bytes held from F to I, those held from I to W, and the output."""
        own = module_sizes(self.stage.module)
        self._prepare()
        with watch_saved_tensors() as saved:
            run = self._forward(detach_as_leaves(self.inputs))
            held = {**saved, **storage_sizes(run.leaves)}
            if self.loss is None:  # the output counts as an input of the next layer, or as a message
                output_sizes = storage_sizes(run.output)
                held = {key: size for key, size in held.items() if key not in output_sizes}
            own |= storage_sizes(self._list_shared())
            self._backward(run, run.make_ones())
        stash = storage_sizes([(record.grad, record.value, record.extra) for record in run.deferral.operators])
        output = detach_as_leaves(run.output)  # a differentiable input gets its gradient, as it does on a stage
        self.stage.backward_weights(run.deferral)
        return bytes_without(held, own), bytes_without(stash, own), output


def _measure_peak(work: Callable[[], None]) -> int:
    peak = PeakMemory()
    work()
    return peak.bytes()


# How much memory tensors hold: distinct storages, each counted once ---------------------------------------------------

StorageSizes = dict[int, int]
"""Bytes by storage."""


def storage_sizes(value: Any) -> StorageSizes:
    """The storages of all tensors in a tree."""
    sizes: StorageSizes = {}
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            sizes[identify_storage(storage)] = storage.nbytes()
        elif isinstance(leaf, Tensor):  # sparse: indices and values
            sizes[id(leaf)] = leaf.element_size() * int(count_sparse_values(leaf))
    return sizes


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(storage_sizes(value).values())


def bytes_without(sizes: Mapping[int, int], others: Mapping[int, int]) -> int:
    """The bytes of all storages that are not among `others`."""
    return sum(size for key, size in sizes.items() if key not in others)


def module_sizes(module: nn.Module) -> StorageSizes:
    """The storages of parameters and buffers."""
    return storage_sizes([*(p.detach() for p in module.parameters()), *module.buffers()])


@contextmanager
def watch_saved_tensors() -> Iterator[StorageSizes]:
    """Collect the storages that autograd saves for the backward inside the block."""
    sizes: StorageSizes = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes.update(storage_sizes(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def optimizer_bytes(module: nn.Module, make: Optimizer | None) -> int:
    """The bytes that an optimizer keeps for the module's parameters after a step, tried on copies."""
    copies = [nn.Parameter(torch.zeros_like(p)) for p in module.parameters() if p.requires_grad]
    if make is None or not copies:
        return 0
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(copies)
    optimizer.step()
    return bytes_of(dict(optimizer.state)) if optimizer.state else 0
