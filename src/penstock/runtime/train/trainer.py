"""Measure and train the model of a training file, on one rank of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError, nearest
from penstock.planner.profile import Profile
from penstock.runtime.checkpoint.checkpoints import Checkpoints
from penstock.runtime.device.gpu import claim_gpu, default_device_type
from penstock.runtime.measure.link import measure_link
from penstock.runtime.measure.parity import Parity
from penstock.runtime.measure.profile import profile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.torch_internals import pytree
from penstock.runtime.train.data_order import DataOrder
from penstock.runtime.train.training_file import TrainingFile
from penstock.runtime.transport.current_group import get_group, rank
from penstock.simulator.timeline import Timeline

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

    def own_device(self) -> torch.device:
        """This rank's device; for `cuda`, a GPU of its own on this machine."""
        return claim_gpu(rank()) if self.device == "cuda" else torch.device(self.device)


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
    result = _TrainingRun(load_file(), plan, options, report if is_first else lambda progress: None).run()
    return result if is_first else None


class _TrainingRun:
    """A training run on one rank."""

    def __init__(self, file: TrainingFile, plan: Any, options: TrainingOptions, report: OnProgress) -> None:
        self.file, self.options, self.report = file, options, report
        self.device = options.own_device()
        self.data = file.load_data()
        model = file.build_model(options.seed)
        if options.check:
            model.module.to(self.device)
        self.pipe = Pipeline(model.module, plan, loss_fn=model.loss_fn, split=file.split, seed=options.seed)
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
        inputs, target = self._to_device(self.file.read_batch(self.data, next(self.order)))
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

    def _to_device(self, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, value)


# Measuring before the plan ----------------------------------------------------------------------------------------------


def profile_file(load_file: LoadFile, options: TrainingOptions, sizes: Sequence[int], report: OnProgress) -> Profile | None:
    """Profile the model on the first rank, while the others are idle, and the link from it to the second; None on other ranks."""
    group, rank = get_group()
    layers = _profile_layers(load_file(), options, sizes, report) if rank == 0 else None
    group.gather(rank, "profile", None, _DEADLINE)
    if options.device != "cpu" or group.ranks == 1 or rank > 1:
        return layers
    latency, bandwidth = measure_link(rank)
    return None if layers is None else replace(layers, latency=latency, bandwidth=bandwidth)


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
        device=options.own_device(),
        progress=lambda activity, done, total: report(TrainingProgress(activity)),
    )
