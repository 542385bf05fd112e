"""Train what a training file gives, on one rank of a run.

A training file's model measured where it will run.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError, nearest
from penstock.planner.profile import Profile
from penstock.runtime.checkpoint.checkpoints import Checkpoints
from penstock.runtime.device.gpu import claim_gpu, default_device_type
from penstock.runtime.measure.parity import Parity
from penstock.runtime.measure.profile import profile
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.train.data_order import DataOrder
from penstock.runtime.train.training_file import Script
from penstock.runtime.transport.current_group import get_group, rank
from penstock.simulator.timeline import Timeline

Load = Callable[[], Script]
"""Gives the training file's functions; called on every rank."""


@dataclass(frozen=True)
class How:
    """What a run is to do."""

    steps: int
    batch: int
    seed: int = 0
    folder: str | None = None
    """Where checkpoints are; the last one there is gone on from."""
    every: int = 0
    """Steps between two checkpoints; 0 is one at the end."""
    recorded: int = 10
    """How many of the last steps are recorded."""
    check: bool = False
    """Whether the first and the last step are compared with the unpipelined model."""
    device: str = "cpu"

    def place(self) -> torch.device:
        """This rank's device; `cuda` is the one of its own on this machine."""
        return claim_gpu(rank()) if self.device == "cuda" else torch.device(self.device)


def known_device(name: str) -> str:
    """The kind of device to train on; `auto` is a GPU if there is one."""
    found = default_device_type() == "cuda"
    if name == "auto":
        return "cuda" if found else "cpu"
    if name not in ("cpu", "cuda"):
        raise ScheduleError(f"device {name!r}: {nearest(name, ('auto', 'cpu', 'cuda'))}")
    if name == "cuda" and not found:
        raise ScheduleError("device 'cuda': torch finds no GPU here; take cpu")
    return name


@dataclass(frozen=True)
class Moment:
    """How far a run is."""

    what: str
    step: int = 0
    loss: float | None = None
    seconds: float = 0.0


@dataclass
class Trained:
    """What came of a run."""

    begun: int = 0
    """The step that it went on from."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """What each step took, the optimizer included."""
    timeline: Timeline | None = None
    """The recorded step that took the median time."""
    parity: dict[int, Parity] = field(default_factory=dict)
    """Steps that were compared with the unpipelined model."""
    stages: str = ""
    device: str = ""
    loaded: str | None = None
    saved: str | None = None

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal, up to rounding."""
        return all(each.close for found in self.parity.values() for each in found.all)


def train(load: Load, plan: Any, how: How, tell: Callable[[Moment], None]) -> Trained | None:
    """Train on this rank, as all others do; the first rank's results."""
    made = _Run(load(), plan, how, tell if rank() == 0 else lambda moment: None).run()
    return made if rank() == 0 else None


class _Run:
    """A training run on one rank."""

    def __init__(self, script: Script, plan: Any, how: How, tell: Callable[[Moment], None]) -> None:
        self.script, self.how, self.tell = script, how, tell
        self.device = how.place()
        self.data = script.samples()
        model = script.model(how.seed)
        if how.check:
            model.module.to(self.device)
        self.pipe = Pipeline(model.module, plan, loss_fn=model.loss_fn, split=script.split, seed=how.seed)
        for stage in self.pipe.stages.values():
            stage.module.to(self.device)
        self.optimizer = script.optimizer(self.pipe.parameters())
        self.scheduler = script.scheduler(self.optimizer)
        self.order = DataOrder(len(self.data), how.batch, seed=how.seed)
        self.done = Trained(stages=str(self.pipe.partition), device=str(self.device))
        self.timelines: list[Timeline] = []

    def run(self) -> Trained:
        with self._checkpoints() as checkpoints:
            if checkpoints is not None:
                self._load(checkpoints)
            for step in range(self.done.begun + 1, self.how.steps + 1):
                self._step(step)
                every = self.how.every or self.how.steps
                if checkpoints is not None and (step % every == 0 or step == self.how.steps):
                    checkpoints.save_async(self.pipe, self.optimizer, scheduler=self.scheduler, data=self.order, step=step)
        if checkpoints is not None and checkpoints.whole():
            self.done.saved = str(checkpoints.whole()[0].path)
        found = sorted(self.timelines, key=lambda each: each.makespan)
        self.done.timeline = found[len(found) // 2] if found else None
        return self.done

    @contextlib.contextmanager
    def _checkpoints(self) -> Iterator[Checkpoints | None]:
        if self.how.folder is None:
            yield None
            return
        with Checkpoints(self.how.folder) as checkpoints:
            yield checkpoints

    def _load(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.load_latest(self.pipe, self.optimizer, scheduler=self.scheduler, data=self.order)
        if found is not None:
            self.done.begun, self.done.loaded = found.step, str(found.path)
            self.tell(Moment(f"goes on from {found.path}", found.step))

    def _step(self, step: int) -> None:
        inputs, target = self._on_device(self.script.batch(self.data, next(self.order)))
        if self.how.check and step in (self.done.begun + 1, self.how.steps):
            self.tell(Moment("comparing with the unpipelined model", step - 1))
            self.done.parity[step] = self.pipe.parity(*inputs, target=target)
        self.pipe.record = step > self.how.steps - self.how.recorded
        begun = time.perf_counter()
        result = self.pipe.step(*inputs, target=target)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        loss = float("nan") if result.loss is None else float(result.loss)
        self.done.losses.append(loss)
        self.done.seconds.append(time.perf_counter() - begun)
        if self.pipe.record and result.timeline is not None:
            self.timelines.append(result.timeline)
        self.tell(Moment("training", step, loss, self.done.seconds[-1]))

    def _on_device(self, value: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, value)


_ROUNDS = 15
_LARGE = 1 << 20
"""Bytes of the message that tells the bandwidth."""
_DEADLINE = 3600.0


def measured(load: Load, how: How, sizes: Sequence[int], tell: Callable[[Moment], None]) -> Profile | None:
    """The model's profile by the first rank, while the others keep quiet, and the link from it to the second."""
    group, rank = get_group()
    found = _profile(load, how, sizes, tell) if rank == 0 else None
    group.gather(rank, "profile", None, _DEADLINE)
    if how.device != "cpu" or group.ranks == 1 or rank > 1:
        return found
    latency, bandwidth = _link(rank)
    return None if found is None else replace(found, latency=latency, bandwidth=bandwidth)


def _profile(load: Load, how: How, sizes: Sequence[int], tell: Callable[[Moment], None]) -> Profile:
    script = load()
    model = script.model(how.seed)
    keywords: dict[str, Any] = {"split": script.split, "microbatch_sizes": sizes, "optimizer": script.optimizer, "device": how.place()}

    def say(what: str, at: int, of: int) -> None:
        tell(Moment(what))

    return profile(model.module, model.sample, loss_fn=model.loss_fn, target=model.target, progress=say, **keywords)


def _link(rank: int) -> tuple[float, float | None]:
    """Seconds that a message between the first two ranks takes at least, and how many bytes go over in a second."""
    small, large = (_one_way(rank, size) for size in (64, _LARGE))
    return small, _LARGE / (large - small) if large > small else None


def _one_way(rank: int, size: int) -> float:
    """Half of what there and back takes."""
    message, times = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for sender in (0, 1):
            if sender == rank:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)
        times.append(time.perf_counter() - begun)
    return statistics.median(times) / 2
