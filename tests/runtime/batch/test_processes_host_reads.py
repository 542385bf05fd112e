"""How often the host reads a tensor's value in a step: on a GPU it waits each time for all the work that it has given to the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from models.tiny import batch, llama
from penstock.runtime import Pipeline, TokenCrossEntropy, add_metric
from penstock.runtime.batch import loss
from penstock.runtime.batch.loss import Loss, read_numbers
from penstock.runtime.batch.result import ResultShare
from penstock.runtime.launch.workers import Workers
from penstock.runtime.parallel import spread_vocabulary
from runtime.spread_models import build_model, draw_batch, spread

READS = ("__bool__", "__float__", "__int__", "__index__", "cpu", "item", "numpy", "tolist")
"""Everything that brings a value to the host."""


class CountShapes(TorchDispatchMode):
    """Notes each operation whose result has a shape that depends on values, for which the host waits too."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [index for index in args[1] if index is not None and index.dtype == torch.bool] if name in {"index", "index_put_"} else []
        if masks or name in {"nonzero", "masked_select", "_unique2", "unique_dim"}:
            self.reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(reads: list[str]) -> Iterator[None]:
    """Note each call that reads a tensor."""

    def count(name: str) -> Callable[..., Any]:
        own = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if "/transformers/" not in sys._getframe(1).f_code.co_filename:  # a model may read its own masks
                reads.append(name)
            return own(self, *args, **kwargs)

        return read

    own = {name: Tensor.__dict__.get(name) for name in READS}
    for name in READS:
        setattr(Tensor, name, count(name))
    try:
        with CountShapes(reads):
            yield
    finally:
        for name, method in own.items():
            delattr(Tensor, name) if method is None else setattr(Tensor, name, method)


class Reporting(nn.Module):
    """A layer that reports a metric of each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        add_metric("size", x.detach().norm())
        return self.map(x)


def steady_reads(pipe: Pipeline, make: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]) -> list[list[str]]:
    """The reads of the third step with 4 microbatches and with 16, as if all targets were on a device."""
    found = []
    is_on_host = loss.is_on_host
    loss.is_on_host = spread_vocabulary.is_on_host = lambda tensor: False
    try:
        for count in (4, 16):
            for _ in range(3):
                args, options = make(count)
                reads: list[str] = []
                with counted(reads):
                    pipe.step(*args, microbatches=count, **options)
            found.append(sorted(reads))
    finally:
        loss.is_on_host = spread_vocabulary.is_on_host = is_on_host
    return found


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_one_read_per_step_with_cross_entropy(workers: Workers, name: str) -> None:
    """Only the result is brought to the host, losses and metrics of all microbatches at once."""

    def run() -> list[list[str]]:
        torch.manual_seed(0)
        schedule = ps.schedule(name, 2, 4)
        pipe = Pipeline([Reporting() for _ in range(schedule.stages)], schedule, loss_fn=functional.cross_entropy)

        def make(count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (torch.randn(2 * count, 6),), {"target": torch.randint(6, (2 * count,))}

        return steady_reads(pipe, make)

    assert workers.run(run, ranks=2) == [[["cpu"], ["cpu"]]] * 2


@pytest.mark.parametrize("items", [None, 40], ids=["own number of labels", "number of labels given"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_labels_of_a_transformers_model_are_counted_at_once(workers: Workers, name: str, items: int | None) -> None:
    """The weights of all microbatches are read together before the step, with the number of labels if that is a tensor."""
    pytest.importorskip("transformers")

    def run() -> list[list[str]]:
        pipe = Pipeline(llama(), schedule=name, microbatches=4)

        def make(count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = {key: value[:1].repeat(count, 1) for key, value in batch().items() if isinstance(value, Tensor)}
            return (inputs | ({} if items is None else {"num_items_in_batch": torch.tensor(items)}),), {}

        return steady_reads(pipe, make)

    for few, many in workers.run(run, ranks=2):
        assert few == many
        assert few in (["tolist"], ["cpu", "tolist"])


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_spread_vocabulary_looks_at_no_tokens_on_a_device(workers: Workers, name: str) -> None:
    def run() -> list[list[str]]:
        schedule = spread(name, 2, 4)
        pipe = Pipeline(build_model(schedule.stages), schedule, loss_fn=TokenCrossEntropy())

        def make(count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            tokens, targets = draw_batch(count, 5)
            return (tokens,), {"target": targets}

        return steady_reads(pipe, make)

    for few, many in workers.run(run, ranks=2):
        assert few == many
        assert few in ([], ["cpu"])  # the result


def test_numbers_are_read_as_they_are_one_by_one() -> None:
    values = [
        2,
        0.25,
        torch.tensor(3),
        torch.tensor([7], dtype=torch.int32),
        torch.tensor(True),
        torch.tensor(0.1),
        torch.tensor(0.1).double(),
    ]
    assert read_numbers(values) == [float(value) for value in values]
    assert read_numbers([]) == []
    for wrong in (torch.ones(2), torch.tensor(1j)):
        with pytest.raises((RuntimeError, ValueError)):
            read_numbers([torch.tensor(1), wrong])


def test_targets_on_a_device_are_looked_at_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[list[str]] = []
    function = Loss(functional.cross_entropy, "mean")
    monkeypatch.setattr(loss, "is_on_host", lambda tensor: False)
    for _ in range(9):
        reads.append([])
        with counted(reads[-1]):
            function.warn_about_ignore_index([torch.ones(3, dtype=torch.long)] * 4)
    assert [len(each) for each in reads] == [1, 1, 0, 1, 0, 0, 0, 1, 0]
    for number in range(10, 17):
        if number == 16:
            with pytest.warns(UserWarning, match="ignore_index -100"):
                function.warn_about_ignore_index([torch.full((3,), -100)] * 4)
        else:
            function.warn_about_ignore_index([torch.full((3,), -100)] * 4)


def test_share_travels_whole() -> None:
    """Values of several types and shapes come out in their places."""
    share = ResultShare(microbatches=3)
    share.losses = {2: (torch.tensor(1.0), 0.25), 0: (torch.tensor([2.0]), 0.5), 1: (torch.tensor(3.0).double(), 0.25)}
    share.side = {(0, 1): torch.tensor(4.0)}
    share.metrics = {"b": {(1, 0): torch.tensor(5), (0, 0): torch.tensor(6.0)}, "a": {(1, 2): torch.zeros(2)}}
    other = ResultShare.__new__(ResultShare)
    other.__setstate__(share.__getstate__())
    assert str(other) == str(share)
