"""Jobs."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.planner.transformer import Transformer
from planner.job.small_jobs import SIZES, small_job, small_machines


def test_useful_operations_are_six_per_parameter_and_token_and_attention():
    job = small_job(model={"causal": False})
    matrices = 6 * 12 * 64**2 + 64 * 512  # 6 blocks, and the head
    attention = 6 * 4 * 128 * 64 * 3  # per token: two products forward, and twice that back
    assert job.operations == pytest.approx(job.tokens * (6 * matrices + attention))


def test_the_optimizer_decides_the_state():
    assert small_job().transformer.optimizer_bytes == 12
    assert small_job(optimizer="muon").transformer.optimizer_bytes == 8


def test_the_model_is_the_transformer_of_these_sizes():
    assert small_job().transformer.parameters == Transformer(**SIZES, flops=1.0).parameters


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"optimizer": "adma"}, "there is no optimizer 'adma': did you mean 'adam'"),
        ({"headroom": 1.0}, "headroom must be a number of at least 0 and below 1, got 1.0"),
        ({"headroom": "5%"}, "headroom must be a number of at least 0 and below 1, got '5%'"),
        ({"model": {**SIZES, 5: 8}}, "a job's model has no field 5"),
        ({"model": {**SIZES, "flops": 1e12}}, "a job's model has no field 'flops'"),
        ({"model": {**SIZES, "experts": 8}}, "a job's model has no field 'experts': mixtures of experts are not planned as a job"),
        ({"model": {**SIZES, "latency": "5us"}}, "a job's model has no field 'latency': it is one of the machines"),
        ({"model": {**SIZES, "layer": 8}}, "a job's model has no field 'layer': did you mean 'layers'"),
        ({"optimizer": []}, r"there is no optimizer \[\]"),
        ({"model": {**SIZES, "heads": 5}}, "hidden=64 cannot be shared among heads=5"),
        ({"model": {"layers": 2}}, "a transformer: 'hidden', 'heads', 'sequence', 'vocabulary' are missing"),
        ({"machines": None}, "machines must be penstock.Machines, got NoneType"),
    ],
)
def test_wrong_jobs_are_refused(changed, message):
    with pytest.raises(PenstockError, match=message):
        ps.Job(**{"model": SIZES, "machines": small_machines(), "batch": 16, **changed})
