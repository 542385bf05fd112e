"""The contract of a training file, a model with its data and how to optimise it; and measuring and training it on one rank of a run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, ScheduleError, ScriptError, nearest
from penstock.planner.profile import Profile
from penstock.runtime.checkpoint.checkpoints import Checkpoints
from penstock.runtime.device.gpu import claim_device, default_device_type
from penstock.runtime.measure.links import measure_link
from penstock.runtime.measure.metrics import OnStep
from penstock.runtime.measure.parity import Parity
from penstock.runtime.measure.profile import profile
from penstock.runtime.model.partition import Layers
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.torch_internals import pytree
from penstock.runtime.train.data_order import DataOrder
from penstock.runtime.transport.current_group import get_group, rank
from penstock.simulator.timeline import Timeline

LEARNING_RATE = 1e-3
"""The default optimizer's, AdamW."""


@dataclass(frozen=True)
class BuiltModel:
    """The result of `build`."""

    module: nn.Module
    sample: Any
    loss_fn: Callable[..., Any] | None = None
    target: Any = None


@dataclass(frozen=True)
class TrainingFile:
    """The names that a training file defines.

    - `build()` returns `(layers, sample, loss_fn, target)`: a list of modules or an `nn.Sequential`, one microbatch, and the loss;
    - `data()` returns the samples: `len(data)`, and `data[numbers]` with a tensor of indices gives `(inputs, target)`, as a
      `TensorDataset` does; several inputs are a tuple;
    - `optimizer(parameters)`, optional, defaults to AdamW; `scheduler(optimizer)`, optional, sets its learning rate;
    - `split`, a `Layers`, if `build` returns a model that is not a list of layers.

    Every rank runs the file, from the same seed. Errors of the user's functions are raised as `ScriptError`, with their place in the file.
    """

    source: str
    build: Callable[[], Any]
    data: Callable[[], Any] | None = None
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    split: Layers | None = None

    @classmethod
    def of(cls, source: str, names: Mapping[str, Any], build: str = "build") -> TrainingFile:
        """Take what is needed from the names of a module; `build` is the name of the function that builds the model."""
        known = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        functions = {name: names.get(name) for name in (build, "data", "optimizer", "scheduler")}
        for name, value in functions.items():
            if not callable(value) and (value is not None or name in (build, "data")):
                problem = f"{source} has no function {name!r}" if value is None else f"{name!r} of {source} is not callable"
                raise ScriptError(f"{problem}: a training file has build() and data(); {nearest(name, known)}")
        split = names.get("split")
        if split is not None and not isinstance(split, Layers):
            raise ScriptError(f"'split' of {source} is a {type(split).__name__}: it must be a penstock.runtime.Layers")
        return cls(source, names[build], names["data"], names.get("optimizer"), names.get("scheduler"), split)

    def build_model(self, seed: int) -> BuiltModel:
        """Build the model, the same on every rank."""
        torch.manual_seed(seed)
        with self._locate_errors("build()"):
            built = self.build()
        if not isinstance(built, tuple) or not 2 <= len(built) <= 4:
            kind = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
            raise ScriptError(f"build() of {self.source} returned {kind}: return (layers, sample, loss_fn, target)")
        return BuiltModel(self._as_module(built[0]), *built[1:])

    def _as_module(self, layers: Any) -> nn.Module:
        if isinstance(layers, (list, tuple, nn.ModuleList)) and all(isinstance(layer, nn.Module) for layer in layers) and layers:
            return nn.Sequential(*layers)
        if isinstance(layers, nn.Module):
            return layers
        kind = type(layers).__name__
        raise ScriptError(f"build() of {self.source} returned a {kind} in place of a model: return a list of modules, or a module")

    def load_data(self) -> Any:
        """The samples."""
        assert self.data is not None
        with self._locate_errors("data()"):
            samples = self.data()
        if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__") or not len(samples):
            kind = type(samples).__name__
            raise ScriptError(f"data() of {self.source} returned {kind}: return an object with a length above 0 and data[numbers]")
        return samples

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.make_optimizer is None:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        with self._locate_errors("optimizer(parameters)"):
            return self.make_optimizer(parameters)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        with self._locate_errors("scheduler(optimizer)"):
            return None if self.make_scheduler is None else self.make_scheduler(optimizer)

    def read_batch(self, data: Any, numbers: torch.Tensor) -> tuple[tuple[Any, ...], Any]:
        """The inputs and the target of these samples."""
        with self._locate_errors("data()[numbers]"):
            batch = data[numbers]
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            kind = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
            raise ScriptError(f"data()[numbers] of {self.source} gave {kind}: give (inputs, target)")
        inputs, target = batch
        return (inputs if isinstance(inputs, tuple) else (inputs,)), target

    @contextmanager
    def _locate_errors(self, call: str) -> Iterator[None]:
        """Raise errors of the file as a `ScriptError` that says where it failed."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}, line {last.lineno}"
            raise ScriptError(f"{call} of {self.source} failed: {type(error).__name__}: {error} ({where})") from error


LoadFile = Callable[[], TrainingFile]
"""Loads the training file; called on every rank."""
_DEADLINE = 3600.0
"""Seconds that the other ranks wait for the first one to measure the model."""


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training run."""

    steps: int
    batch: int
    seed: int = 0
    folder: str | None = None
    """The folder of checkpoints; training continues from the latest one there."""
    every: int = 0
    """Steps between two checkpoints; 0 saves one at the end."""
    recorded: int = 10
    """How many of the last steps to record."""
    check: bool = False
    """Whether to compare the first and the last step with the unpipelined model."""
    device: str = "cpu"
    open_metrics: Callable[[], AbstractContextManager[OnStep | None]] = nullcontext
    """Opens what gets the metrics of each step; called on every rank."""

    def claim_device(self) -> torch.device:
        """This rank's device; for `cuda`, a GPU of its own on this machine."""
        return claim_device(self.device, rank())


def choose_device(name: str) -> str:
    """The kind of device to train on; `auto` is a GPU if there is one."""
    has_gpu = default_device_type() == "cuda"
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name not in ("cpu", "cuda"):
        raise ScheduleError(f"device {name!r}: {nearest(name, ('auto', 'cpu', 'cuda'))}")
    if name == "cuda" and not has_gpu:
        raise ScheduleError("device 'cuda': torch finds no GPU here; use cpu")
    return name


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run is."""

    activity: str
    step: int = 0
    loss: float | None = None
    seconds: float = 0.0


OnProgress = Callable[[TrainingProgress], None]


@dataclass
class TrainingResult:
    """The results of a run."""

    resumed_at: int = 0
    """The step of the checkpoint that it continued from."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """The duration of each step, the optimizer included."""
    timeline: Timeline | None = None
    """The recorded step of median duration."""
    parity: dict[int, Parity] = field(default_factory=dict)
    """The steps that were compared with the unpipelined model."""
    stages: str = ""
    device: str = ""
    loaded: str | None = None
    saved: str | None = None

    @property
    def equal(self) -> bool:
        """Whether all compared steps are equal to the unpipelined model, up to rounding."""
        return all(comparison.close for parity in self.parity.values() for comparison in parity.all)


# Training ---------------------------------------------------------------------------------------------------------------


def train(load_file: LoadFile, plan: Any, options: TrainingOptions, report: OnProgress) -> TrainingResult | None:
    """Train on this rank, together with all others; returns the result on the first rank, which is also the one that reports."""
    is_first = rank() == 0
    with options.open_metrics() as on_step:
        result = _TrainingRun(load_file(), plan, options, report if is_first else lambda progress: None, on_step).run()
    return result if is_first else None


class _TrainingRun:
    """A training run on one rank."""

    def __init__(self, file: TrainingFile, plan: Any, options: TrainingOptions, report: OnProgress, on_step: OnStep | None) -> None:
        self.file, self.options, self.report = file, options, report
        self.device = options.claim_device()
        self.data = file.load_data()
        model = file.build_model(options.seed)
        if options.check:
            model.module.to(self.device)
        self.pipe = Pipeline(model.module, plan, loss_fn=model.loss_fn, split=file.split, seed=options.seed, on_step=on_step)
        for stage in self.pipe.stages.values():
            stage.module.to(self.device)
        self.optimizer = file.build_optimizer(self.pipe.parameters())
        self.scheduler = file.build_scheduler(self.optimizer)
        self.order = DataOrder(len(self.data), options.batch, seed=options.seed)
        self.result = TrainingResult(stages=str(self.pipe.partition), device=str(self.device))
        self.timelines: list[Timeline] = []

    def run(self) -> TrainingResult:
        steps = self.options.steps
        folder = self.options.folder
        opened: AbstractContextManager[Checkpoints | None] = nullcontext() if folder is None else Checkpoints(folder)
        with opened as checkpoints:
            if checkpoints is not None:
                self._resume(checkpoints)
            for step in range(self.result.resumed_at + 1, steps + 1):
                self._step(step)
                if checkpoints is not None and (step % (self.options.every or steps) == 0 or step == steps):
                    checkpoints.save_async(self.pipe, self.optimizer, scheduler=self.scheduler, data=self.order, step=step)
        self.pipe.flush_metrics()
        if checkpoints is not None and checkpoints.whole():
            self.result.saved = str(checkpoints.whole()[0].path)
        ordered = sorted(self.timelines, key=lambda timeline: timeline.makespan)
        self.result.timeline = ordered[len(ordered) // 2] if ordered else None
        return self.result

    def _resume(self, checkpoints: Checkpoints) -> None:
        latest = checkpoints.load_latest(self.pipe, self.optimizer, scheduler=self.scheduler, data=self.order)
        if latest is not None:
            self.result.resumed_at, self.result.loaded = latest.step, str(latest.path)
            self.report(TrainingProgress(f"continues from {latest.path}", latest.step))

    def _step(self, step: int) -> None:
        options, result = self.options, self.result
        batch = self.file.read_batch(self.data, next(self.order))
        inputs, target = pytree.tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch)
        if options.check and step in (result.resumed_at + 1, options.steps):
            self.report(TrainingProgress("comparing with the unpipelined model", step - 1))
            result.parity[step] = self.pipe.parity(*inputs, target=target)
        self.pipe.record = step > options.steps - options.recorded
        start = time.perf_counter()
        step_result = self.pipe.step(*inputs, target=target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        loss = float("nan") if step_result.loss is None else float(step_result.loss)
        result.losses.append(loss)
        result.seconds.append(time.perf_counter() - start)
        if self.pipe.record and step_result.timeline is not None:
            self.timelines.append(step_result.timeline)
        self.report(TrainingProgress("training", step, loss, result.seconds[-1]))


# Measuring before the plan ----------------------------------------------------------------------------------------------


def profile_file(load_file: LoadFile, options: TrainingOptions, sizes: Sequence[int], report: OnProgress) -> Profile | None:
    """Profile the model on the first rank, while the others are idle, and the link from it to the second; None on other ranks."""
    group, rank = get_group()
    layers = _profile_layers(load_file(), options, sizes, report) if rank == 0 else None
    group.gather(rank, "profile", None, _DEADLINE)
    if options.device != "cpu" or group.ranks == 1 or rank > 1:
        return layers
    link = measure_link(1 - rank, first=rank == 0)
    return None if layers is None else replace(layers, latency=link.latency, bandwidth=link.bandwidth)


def _profile_layers(file: TrainingFile, options: TrainingOptions, sizes: Sequence[int], report: OnProgress) -> Profile:
    model = file.build_model(options.seed)
    return profile(
        model.module,
        model.sample,
        loss_fn=model.loss_fn,
        target=model.target,
        split=file.split,
        microbatch_sizes=sizes,
        optimizer=file.build_optimizer,
        device=options.claim_device(),
        progress=lambda activity, done, total: report(TrainingProgress(activity)),
    )
