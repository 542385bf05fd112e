"""Keyword arguments of the model, and how a result describes itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, launch


class Scaled(nn.Module):
    """A layer with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.inner(x) * scale


def model() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Scaled(), nn.Linear(4, 4, dtype=torch.float64)]


X, SCALE, Y = (torch.randn(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) for size in (4, 1, 4))


def run() -> tuple[float, list[float], Tensor, str, str]:
    pipe = Pipeline(model(), schedule="1f1b", microbatches=2, loss_fn=nn.functional.mse_loss)
    result = pipe.step(X, scale=SCALE, target=Y)
    with pytest.raises(ScheduleError, match="scale is given twice"):
        pipe.step(X, scale=SCALE, stage_kwargs={0: {"scale": SCALE}}, target=Y)
    evaluated = pipe.eval_step(X, scale=SCALE, target=Y)
    return float(result.loss), [float(evaluated.loss)], pipe.infer(X, scale=SCALE), repr(result), repr(evaluated)


def test_keyword_arguments_of_the_model_reach_the_first_stage_in_slices():
    first, second = model()
    outputs = second(first(X, scale=SCALE)).detach()
    wanted = float(nn.functional.mse_loss(outputs, Y))
    for loss, (evaluated,), inferred, shown, _ in launch(run, 2):
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert evaluated == pytest.approx(wanted, rel=1e-12)
        torch.testing.assert_close(inferred, outputs)
        assert shown == f"<StepResult loss {wanted:.6g}, 2 microbatches>"


def test_a_pipeline_says_what_it_is():
    def show() -> str:
        return repr(Pipeline([nn.Linear(4, 4) for _ in range(4)], schedule="zbv", microbatches=1))

    assert launch(show, 2) == [
        "<Pipeline 'zbv', v, 2 ranks, 4 stages, 1 microbatch; rank 0 has stages 0, 3>",
        "<Pipeline 'zbv', v, 2 ranks, 4 stages, 1 microbatch; rank 1 has stages 1, 2>",
    ]
