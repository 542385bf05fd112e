"""What a training file gives: a model, its data, and how to optimise it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PenstockError, ScriptError, nearest
from penstock.runtime.model.partition import Layers

LEARNING_RATE = 1e-3
"""Of AdamW, where a file has no optimizer of its own."""


@dataclass(frozen=True)
class Model:
    """What `build` returns."""

    module: nn.Module
    sample: Any
    loss_fn: Callable[..., Any] | None = None
    target: Any = None


@dataclass(frozen=True)
class Script:
    """The names that a training file defines.

    - `build()` returns `(layers, sample, loss_fn, target)`: a list of modules or an `nn.Sequential`, a microbatch, and the loss;
    - `data()` returns the samples: `len(data)`, and `data[numbers]` with a tensor of numbers gives `(inputs, target)`, as a
      `TensorDataset` does; several inputs are a tuple;
    - `optimizer(parameters)`, where there is one, else AdamW; `scheduler(optimizer)` for its learning rate, where there is one;
    - `split`, a `Layers`, where `build` returns a model that is no list of layers.

    Every rank runs the file, from the same seed.
    """

    source: str
    build: Callable[[], Any]
    data: Callable[[], Any] | None = None
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    split: Layers | None = None

    @classmethod
    def of(cls, source: str, names: Mapping[str, Any], build: str = "build") -> Script:
        """From the names of a module; `build` may have another one."""
        known = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        found = {name: names.get(name) for name in (build, "data", "optimizer", "scheduler")}
        for name, value in found.items():
            if not callable(value) and (value is not None or name in (build, "data")):
                what = f"no function {name!r}" if value is None else f"a {name!r} that is no function"
                raise ScriptError(f"{source} has {what}: a training file has build() and data(); {nearest(name, known)}")
        split = names.get("split")
        if split is not None and not isinstance(split, Layers):
            raise ScriptError(f"'split' of {source} is a {type(split).__name__}: it must be a penstock.runtime.Layers")
        return cls(source, names[build], names["data"], names.get("optimizer"), names.get("scheduler"), split)

    def model(self, seed: int) -> Model:
        """The model, the same on every rank."""
        torch.manual_seed(seed)
        with self._blamed("build()"):
            made = self.build()
        if not isinstance(made, tuple) or not 2 <= len(made) <= 4:
            what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
            raise ScriptError(f"build() of {self.source} returned {what}: return (layers, sample, loss_fn, target)")
        return Model(self._module(made[0]), *made[1:])

    def _module(self, given: Any) -> nn.Module:
        if isinstance(given, (list, tuple, nn.ModuleList)) and all(isinstance(each, nn.Module) for each in given) and given:
            return nn.Sequential(*given)
        if isinstance(given, nn.Module):
            return given
        raise ScriptError(f"build() of {self.source} returned no model but a {type(given).__name__}: return a list of modules, or a module")

    def samples(self) -> Any:
        """The data."""
        assert self.data is not None
        with self._blamed("data()"):
            made = self.data()
        if not hasattr(made, "__len__") or not hasattr(made, "__getitem__") or not len(made):
            raise ScriptError(f"data() of {self.source} returned {type(made).__name__}: return what has a length and data[numbers]")
        return made

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.make_optimizer is None:
            return torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        with self._blamed("optimizer(parameters)"):
            return self.make_optimizer(parameters)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        with self._blamed("scheduler(optimizer)"):
            return None if self.make_scheduler is None else self.make_scheduler(optimizer)

    def batch(self, data: Any, numbers: torch.Tensor) -> tuple[tuple[Any, ...], Any]:
        """The inputs and the target of some samples."""
        with self._blamed("data()[numbers]"):
            made = data[numbers]
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            what = f"{len(made)} parts" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
            raise ScriptError(f"data()[numbers] of {self.source} gave {what}: give (inputs, target)")
        inputs, target = made
        return (inputs if isinstance(inputs, tuple) else (inputs,)), target

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """Say where the file failed."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename}, line {last.lineno}"
            raise ScriptError(f"{what} of {self.source} failed: {type(error).__name__}: {error} ({where})") from error
