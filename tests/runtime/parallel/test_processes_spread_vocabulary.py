"""Pipelines whose vocabulary is spread over processes: the numbers of the plain loop, data-parallel ranks, and a rank that fails."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, TokenCrossEntropy, device_mesh, rank
from penstock.runtime.launch.workers import Workers
from runtime import spread_models, spread_resuming
from runtime.spread_models import build_model, compare_with_plain_loop, draw_batch, plan_for_cluster, spread, train_pipeline
from runtime.spread_resuming import build_empty, compare, go_on

cloudpickle.register_pickle_by_value(spread_models)
cloudpickle.register_pickle_by_value(spread_resuming)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "ends"),
    [("1f1b", 2, 4, "tied"), ("interleaved-1f1b", 2, 4, ""), ("zbv", 2, 4, "tied"), ("1f1b", 4, 6, "frozen"), ("zbv", 4, 8, "")],
)
def test_it_trains_like_the_plain_loop(workers: Workers, name: str, ranks: int, microbatches: int, ends: str) -> None:
    """With the whole logits on every rank, the times of collectives, and parity with the whole model."""
    schedule, (tokens, targets) = spread(name, ranks, microbatches), draw_batch()
    model = build_model(schedule.stages)
    if ends == "tied":
        model[-1].weight = model[0].weight
    model[0].weight.requires_grad_(ends != "frozen")

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), deadline=60, record=True)
        assert pipe.parity(tokens, target=targets).loop.worst < 1e-12
        evaluated, outputs = pipe.eval_step(tokens, target=targets, outputs=True), pipe.infer(tokens)
        timeline = evaluated.timeline
        assert timeline is not None
        times = timeline.collective_start[timeline.flat.graph().meet >= 0], timeline.collective_end[timeline.flat.graph().meet >= 0]
        assert (times[0] >= 0).all()
        assert (times[0] <= times[1]).all()
        trained = train_pipeline(pipe, tokens, targets)
        spread_models.assert_equal(trained["losses"][0], evaluated.loss)  # type: ignore[arg-type]
        return {**trained, "outputs": [outputs, evaluated.outputs]}

    wanted, found = model(tokens).detach(), workers.run(run, ranks=ranks)
    for of_rank in found:
        for outputs in of_rank["outputs"]:
            spread_models.assert_equal(outputs, wanted)
    compare_with_plain_loop(found, model, tokens, targets, microbatches)


def test_a_plan_of_a_whole_job_trains_like_the_plain_model(workers: Workers, tmp_path: Path) -> None:
    """Two pipeline ranks that share the vocabulary, and two data ranks."""
    sizes = {"layers": 4, "hidden": 8, "heads": 2, "sequence": 6, "vocabulary": 37}
    rates = {"flops": 1e12, "memory": 64e6, "memory_bandwidth": 1e11, "node_bandwidth": 2e10, "bandwidth": 2e9}
    job = ps.Job(model=sizes, machines=ps.Machines(gpus=4, **rates), batch=8)
    ps.predict_job(job, ps.Configuration(pipeline=2, data=2, vocabulary="spread")).save(tmp_path / "job.json")
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(37, 8), *inner, nn.Linear(8, 37)).double()
    tokens, targets = torch.randint(37, (2, 8, 6))

    def run() -> tuple[float, dict[str, Tensor]]:
        torch.set_num_threads(1)
        mesh = device_mesh(pp=2, dp=2)
        pipe = Pipeline(model, ps.JobPlan.load(tmp_path / "job.json"), loss_fn=TokenCrossEntropy(), mesh=mesh, deadline=60)
        own = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
        loss = pipe.step(tokens[own], target=targets[own]).loss
        return float(loss), {name: parameter.grad for name, parameter in pipe.named_parameters()}

    found = workers.run(run, ranks=4)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    wanted, seen = {name: parameter.grad for name, parameter in model.named_parameters()}, set()
    for own_loss, gradients in found:
        assert own_loss == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in gradients.items():
            whole, _, rows = name.partition("[")
            part = slice(*map(int, rows.rstrip("]").split(":"))) if rows else slice(None)
            torch.testing.assert_close(gradient, wanted[whole][part], rtol=1e-12, atol=1e-14)
            seen.add(whole)
    assert seen == set(wanted)


@pytest.mark.parametrize(
    "devices",
    [(2, 0, 3, 1), pytest.param((1, 0), marks=pytest.mark.matrix(family="1f1b", feature="spread vocabulary and reordered ranks"))],
)
def test_a_cluster_plan_that_reorders_the_processes(workers: Workers, devices: tuple[int, ...]) -> None:
    """Also within each replica of a mesh, there with shares of different size."""
    plan, (tokens, targets) = plan_for_cluster(*devices, shares=(0.8, 0.2) if len(devices) == 2 else ()), draw_batch()
    model = build_model(2 * len(devices))

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        mesh = device_mesh(pp=2, dp=2) if len(devices) == 2 else None
        pipe = Pipeline(model, plan, loss_fn=TokenCrossEntropy(), mesh=mesh, deadline=60)
        own = rank() if mesh is None else mesh["pp"].get_local_rank()
        assert pipe.rank == devices.index(own)
        words = next(value for name, value in pipe.named_parameters() if name.startswith("0.weight["))
        assert len(words) == ((9, 2) if len(devices) == 2 else (3, 3, 3, 2))[pipe.rank]
        x, y = (tokens, targets) if mesh is None else take_part(mesh, tokens, targets)
        outputs = pipe.infer(x)
        return {**train_pipeline(pipe, x, y), "outputs": outputs}

    found = workers.run(run, ranks=4)
    logits = model(tokens).detach()
    if len(devices) == 4:
        for of_rank in found:
            spread_models.assert_equal(of_rank["outputs"], logits)
        compare_with_plain_loop(found, model, tokens, targets, 4)
        return
    first, second = found[0]["by_microbatch"], found[1]["by_microbatch"]
    both = {"by_microbatch": [one + other for one, other in zip(first, second, strict=True)]}
    for of_rank, wanted in zip(found, 2 * logits.split(SIZES), strict=True):
        spread_models.assert_equal(of_rank["outputs"], wanted)
    for replica in (found[::2], found[1::2]):
        compare_with_plain_loop([of_rank | both for of_rank in replica], copy.deepcopy(model), tokens, targets, BEGIN)


SIZES, BEGIN = (5, 4), (2, 3, 4, 5, 6, 7, 8)
"""Sequences of two data ranks, and where their microbatches begin in the whole batch if each has four."""


def take_part(mesh: Any, *batch: Tensor) -> list[Tensor]:
    return [part.split(SIZES)[mesh["dp"].get_local_rank()] for part in batch]


def get_full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param("1f1b", False, marks=pytest.mark.matrix(family="1f1b", feature="spread vocabulary and replicate")),
        pytest.param("zbv", False, marks=pytest.mark.matrix(family="zbv", feature="spread vocabulary and replicate")),
        pytest.param("zbv", True, marks=pytest.mark.matrix(family="zbv", feature="spread vocabulary and FSDP2")),
    ],
)
def test_data_parallel_ranks_train_like_the_plain_loop(workers: Workers, name: str, shard: bool) -> None:
    """With parts of different sizes. The rows of all replicas start with the values of the first, and are never sharded further."""
    schedule, (tokens, targets) = spread(name, 2, 4), draw_batch()
    model = build_model(schedule.stages, bias=True)

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        mesh = device_mesh(pp=2, dp=2)
        if mesh["dp"].get_local_rank():
            for end in (model[0], model[-1]):
                end.weight.data.zero_()
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), mesh=mesh, shard=shard, deadline=60)
        x, y = take_part(mesh, tokens, targets)
        evaluated = pipe.eval_step(x, target=y, outputs=True)
        outputs = [evaluated.outputs, pipe.infer(x)]
        trained = train_pipeline(pipe, x, y)
        spread_models.assert_equal(trained["losses"][0], evaluated.loss)  # type: ignore[arg-type]
        trained["outputs"] = outputs
        trained["named"] = {name: tuple(map(get_full, both)) for name, both in trained["named"].items()}
        return trained

    found = workers.run(run, ranks=4)  # in the order of the mesh: pp 0 dp 0, pp 0 dp 1, pp 1 dp 0, pp 1 dp 1
    first, second = found[0]["by_microbatch"], found[1]["by_microbatch"]
    both = {"by_microbatch": [one + other for one, other in zip(first, second, strict=True)]}
    for of_rank, wanted in zip(found, 2 * model(tokens).detach().split(SIZES), strict=True):
        for logits in of_rank["outputs"]:
            spread_models.assert_equal(logits, wanted)
    for replica in (found[::2], found[1::2]):
        compare_with_plain_loop([of_rank | both for of_rank in replica], copy.deepcopy(model), tokens, targets, BEGIN)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_gradients_that_wait_for_a_later_step(workers: Workers, dtype: torch.dtype | None) -> None:
    """Those of two steps are summed over data ranks once; rows in float32 may be summed in float64."""
    schedule, (tokens, targets) = spread("zbv", 2, 4), draw_batch()
    model = build_model(schedule.stages)
    if dtype is not None:
        model.float()

    def run() -> dict[str, Tensor | None]:
        mesh = device_mesh(pp=2, dp=2)
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), mesh=mesh, accumulate_dtype=dtype, deadline=60)
        x, y = take_part(mesh, tokens, targets)
        pipe.step(x, target=y, finalize_gradients=False)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        with pytest.raises(ScheduleError, match="not finalized"):
            pipe.clip_grad_norm_(1.0)
        pipe.step(x.flip(0), target=y.flip(0))
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}

    found = workers.run(run, ranks=4)
    wanted = copy.deepcopy(model).double()
    (2 * TokenCrossEntropy()(wanted(tokens), targets)).backward()
    for of_rank in found:
        for key, gradient in of_rank.items():
            assert gradient is not None
            assert gradient.dtype is model[0].weight.dtype
            name, _, rows = key.partition("[")
            whole = wanted.get_parameter(name).grad
            assert whole is not None
            own = slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)
            torch.testing.assert_close(gradient.double(), whole[own], rtol=0, atol=1e-12 if dtype is None else 1e-6)
    for one, other in (found[:2], found[2:]):
        assert all(torch.equal(one[name], other[name]) for name in one)  # data ranks keep the same values, to the last bit


@pytest.mark.matrix(family="1f1b", feature="spread vocabulary and checkpoints")
def test_replicas_of_rows_are_saved_once_and_loaded_by_other_ranks(workers: Workers, tmp_path: Path) -> None:
    """From a mesh of 2 x 2 processes to 4 ranks of one pipeline, and back."""
    for number, (ranks, mesh) in enumerate([(2, {"pp": 2, "dp": 2}), (4, {}), (2, {"dp": 2, "pp": 2})]):
        schedule, model = spread("1f1b", ranks, 4), build_empty(tmp_path)
        for losses in workers.run(lambda: go_on(model, schedule, tmp_path, 1, **mesh), ranks=4):  # noqa: B023 - called at once
            compare(losses, number)
    saved = dcp.FileSystemReader(tmp_path / "step-00000001").read_metadata().state_dict_metadata
    assert [chunk.sizes[0] for chunk in saved["model.0.weight"].chunks] == [6, 5]


def test_tensor_parallel_ranks_are_refused(workers: Workers) -> None:
    schedule = spread("1f1b", 2, 4)

    def run() -> str:
        with pytest.raises(ScheduleError) as caught:
            Pipeline(build_model(2), schedule, loss_fn=TokenCrossEntropy(), mesh=device_mesh(pp=2, tp=2))
        return str(caught.value)

    told = workers.run(run, ranks=4)
    assert [text.partition(",")[0] for text in told] == [
        "a tp dimension of mesh= does not go with a vocabulary that is spread over the ranks"
    ] * 4


class Failing(nn.Module):
    """A layer that fails on process 1 while told to."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            raise ValueError("out of order")
        return x * 1.0


def count_open_files() -> int:
    """How many files and connections this process has open, where the system tells."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_fails_ends_the_waits_of_the_others(workers: Workers, ranks: int) -> None:
    """Long before the deadline, also in another replica, and the next step has the numbers of the whole model.

    Connections of failed steps and of pipelines that are gone are closed.
    """
    schedule, (tokens, targets) = spread("1f1b", 2, 4), draw_batch()
    words, *_, head = build_model(0)

    def run() -> tuple[str, Tensor | None]:
        mesh = device_mesh(pp=2, dp=2) if ranks == 4 else None
        failing, open_files = Failing(), []
        for _ in range(2):
            model = nn.Sequential(words, failing, failing, head)
            pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), deadline=600, mesh=mesh)
            for _ in range(2):
                failing.fails = True
                with pytest.raises(PipelineError) as caught:
                    pipe.step(tokens, target=targets)
                failing.fails = False
                loss = pipe.step(tokens, target=targets).loss
                told = str(caught.value).partition("\n")[0]
                del caught  # has the frames of the failed step
                open_files.append(count_open_files())
            del pipe, model
        assert open_files == open_files[:1] * 4
        return told, loss

    for told, loss in workers.run(run, ranks=ranks):
        assert f"failed on {'rank 1' if ranks == 2 else 'rank 1 (pp 0, dp 1)'}: ValueError: out of order" in told
        assert loss is not None
        spread_models.assert_equal(loss, TokenCrossEntropy()(build_model(0)(tokens), targets))
