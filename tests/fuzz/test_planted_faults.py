"""The fuzzer can fail: faults that are planted into the pipeline are found, told apart and shrunk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuzz import check
from fuzz.case import Case, StageSpec
from fuzz.check import check_case
from fuzz.layers import Counter
from fuzz.shrink import shrink
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, StepResult

LARGE = Case(
    schedule="interleaved-1f1b",
    ranks=2,
    microbatches=3,
    skips=((0, 2),),
    stages=(
        StageSpec(("linear", "layer_norm"), gives="deep"),
        StageSpec(("batch_norm", "counter"), gives="mask"),
        StageSpec(("attention", "side_loss")),
        StageSpec(("linear", "metric")),
    ),
    inputs="two",
    seed=3,
    recompute=(2,),
    kwargs=(1,),
    script=("step", "clip", "sgd", "eval", "step"),
    dtype="float64",
    extra=2,
    number=5,
)
"""A case with a bit of everything, which passes."""

Step = Callable[..., StepResult]


def scale_gradients(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """Gradients that are 1 % too large."""
    result = step(pipe, *args, **options)
    for parameter in pipe.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.01)
    return result


def drop_an_element(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """The last element of the batch is lost."""

    def shorten(value: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda leaf: leaf[:-1] if isinstance(leaf, torch.Tensor) else leaf, value)

    return step(pipe, *shorten(args), **shorten(options))


def change_a_buffer(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """A buffer is off by one after the step."""
    result = step(pipe, *args, **options)
    for stage in pipe.stages.values():
        for buffer in stage.module.buffers():
            buffer.add_(1)
    return result


def count_twice(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """A Python counter has one run too many."""
    result = step(pipe, *args, **options)
    for stage in pipe.stages.values():
        for module in stage.module.modules():
            if isinstance(module, Counter):
                module.runs += 1
    return result


def lose_structure(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """Two arguments arrive as one list."""
    return step(pipe, list(args), **options) if len(args) > 1 else step(pipe, *args, **options)


def turn_gradients(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """Gradients with the right values and other strides."""
    result = step(pipe, *args, **options)
    for parameter in pipe.parameters():
        if parameter.grad is not None and parameter.grad.dim() == 2:
            parameter.grad = parameter.grad.t().contiguous().t()
    return result


def refuse(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    """A refusal for no known reason."""
    raise ScheduleError("no step on a Sunday")


def crash(step: Step, pipe: Pipeline, *args: Any, **options: Any) -> StepResult:
    raise ZeroDivisionError("in the engine")


FAULTS: dict[Callable[..., StepResult], tuple[str, str]] = {
    scale_gradients: ("numbers: values", "{}"),
    drop_an_element: ("numbers: values", "{}"),
    change_a_buffer: ("numbers: buffer", '{"stages": [{"layers": ["batch_norm"]}]}'),
    count_twice: ("numbers: counter", '{"stages": [{"layers": ["counter"]}]}'),
    lose_structure: ("numbers: values", '{"inputs": "two"}'),
    turn_gradients: ("numbers: strides", "{}"),
    refuse: ("error ScheduleError: no step on a Sunday", "{}"),
    crash: ("error ZeroDivisionError: in the engine", "{}"),
}
"""Each fault with the kind of failure that it is, and the smallest case that shows it."""


def plant(fault: Callable[..., StepResult], monkeypatch: pytest.MonkeyPatch) -> None:
    step = Pipeline.step
    monkeypatch.setattr(Pipeline, "step", lambda pipe, *args, **options: fault(step, pipe, *args, **options))


def test_large_case_passes() -> None:
    """Without a fault: with its recomputed stage, which has no state, and with the state of the others."""
    assert check_case(LARGE).result == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_found_and_shrunk(fault: Callable[..., StepResult], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    large = Case.from_json(LARGE.to_json())
    outcome = check_case(large)
    assert outcome.failed
    kind, smallest = FAULTS[fault]
    if kind in ("numbers: buffer", "numbers: counter", "numbers: strides"):
        large = Case(stages=LARGE.stages, schedule=LARGE.schedule, ranks=2, microbatches=3, script=("step", "clip"))
        outcome = check_case(large)
    assert outcome.kind == kind
    assert shrink(large, check_case, outcome.kind).to_json() == smallest


@pytest.mark.slow
def test_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(lambda step, pipe, *args, **options: time.sleep(3) or step(pipe, *args, **options), monkeypatch)
    monkeypatch.setattr(check, "LIMIT", 0.3)
    assert check_case(Case()).kind == "hang"


def test_difference_between_transports_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for processes that has other numbers than the threads."""
    run = check.run_on_threads
    monkeypatch.setattr(check, "run_on_processes", lambda case, table, workers: run(case, table) | {"0.step.loss": torch.tensor(7.0)})
    outcome = check_case(Case(transport="both"), lambda: None)  # type: ignore[arg-type, return-value]
    assert outcome.failed
    assert "gloo and the plain loop differ in 1 values: 0.step.loss" in outcome.text


def test_case_that_torch_refuses() -> None:
    """Whatever the pipeline does is then no failure, if threads and processes do the same."""
    case = Case(stages=(StageSpec(("linear", "tanh")), StageSpec(changes="first")), ranks=2)
    assert check_case(case).result == "torch refuses"


def test_error_of_torch_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text may be that of a known refusal."""

    def fail(*_: Any) -> StepResult:
        raise RuntimeError("is fixed to 1, because it was loaded or written by hand")

    case = Case(form="json", script=("more",))
    assert check_case(case).result == "refused"
    plant(fail, monkeypatch)
    assert check_case(case).failed
