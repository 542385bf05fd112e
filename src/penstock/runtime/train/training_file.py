"""The contract of a training file: a model, its data, and how to optimise it."""

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
"""The default optimizer's, AdamW."""


@dataclass(frozen=True)
class BuiltModel:
    """What `build` returns."""

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
