"""Stages driven by hand, traced stages, messages and sharded activations, against the installed torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.torch.both import BOTH, OURS, TORCH, VERSION, Package, fill, forward_cache, prepare
from compat.torch.models import assert_same, blocks, data, grads, schedule, stages


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """The second of two ranks; the first does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def described(ops: list[Any]) -> list[Any]:
    return [(op.op.__name__, tuple(op.tensor.shape), op.tensor.dtype, op.peer, op.group_peer) for op in ops]


def last_of_two(package: Package) -> Any:
    """Build a stage with static shapes, set up as torch's schedules do."""
    x = torch.zeros(2, 6, requires_grad=True)
    stage = package.top.PipelineStage(nn.Linear(6, 4), 1, 2, torch.device("cpu"), input_args=x, output_args=torch.zeros(2, 4))
    prepare(package, stage)
    return stage


@pytest.mark.usefixtures("one_of_two")
def test_recv_info_and_send_info() -> None:
    found = []
    for package in BOTH:
        stage = last_of_two(package)
        received = described(stage.get_fwd_recv_ops(0))
        fill(stage.args_recv_info[0][0], torch.Generator().manual_seed(0))
        output = stage.forward_one_chunk(0, ())
        stage.backward_one_chunk(0, loss=output.square().sum())
        found.append(
            [received, described(stage.get_fwd_send_ops(0)) if 0 in forward_cache(stage) else [], described(stage.get_bwd_send_ops(0))]
        )
        assert stage.get_bwd_recv_ops(0) == []
        assert not forward_cache(stage)
        assert not stage.bwd_cache
    assert found[1] == found[0]
    assert found[1][0] == [("irecv", (2, 6), torch.float32, 0, 0)]


@pytest.mark.usefixtures("one_of_two")
def test_missing_gradients_are_sent_as_zeros() -> None:
    for package in BOTH:
        stage = last_of_two(package)
        stage.bwd_cache[1] = (None,)
        (op,) = stage.get_bwd_send_ops(1)
        assert op.op is dist.isend
        assert torch.equal(op.tensor, torch.zeros(2, 6))
        with pytest.raises(RuntimeError, match="out of range"):
            stage.get_bwd_send_ops(2)


@pytest.mark.usefixtures("one_of_two")
def test_backward_weight_needs_backward_input_first() -> None:
    for package in BOTH:
        stage = last_of_two(package)
        with pytest.raises(AssertionError, match="backward_one_chunk"):
            stage.backward_weight_one_chunk(0)
        with pytest.raises(RuntimeError, match="Unknown backward type"):
            stage.backward_maybe_with_nosync("sideways", {"stage_output": None, "output_grads": None, "input_values": []})
        stage.has_backward = False
        stage.backward_weight_one_chunk(0)
        stage.backward_one_chunk(0)


@pytest.mark.usefixtures("one_of_two")
def test_limits_of_message_tags() -> None:
    for package in BOTH:
        with pytest.raises(ValueError, match="out of range"):
            package.top.PipelineStage(nn.Linear(1, 1), 2, 2, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="cannot be larger than number of stages"):
            package.top.PipelineStage(nn.Linear(1, 1), 0, 1, torch.device("cpu"))


# Messages -------------------------------------------------------------------------------------------------------------


def test_sends_only_and_receives_only_start_one_by_one() -> None:
    for package in BOTH if VERSION >= (2, 13) else [OURS]:
        schedules = package.schedules
        with (
            mock.patch.object(schedules.dist, "isend") as isend,
            mock.patch.object(schedules.dist, "irecv") as irecv,
            mock.patch.object(schedules.dist, "batch_isend_irecv", return_value=["both"]) as batch,
        ):
            group = SimpleNamespace(group_name="g")
            send = SimpleNamespace(op=isend, tensor="t", group=group, tag=3, group_peer=1, peer=5)
            receive = SimpleNamespace(op=irecv, tensor="u", group=group, tag=4, group_peer=2, peer=4)
            assert schedules._batch_p2p([]) == []
            assert schedules._batch_p2p([send, send]) == [isend.return_value] * 2
            assert schedules._batch_p2p([receive], desc="why") == [irecv.return_value]
            assert schedules._batch_p2p([send, receive]) == ["both"]
            works = schedules._sorted_batch_p2p([send, receive, send])
        isend.assert_called_with("t", group=group, tag=3, group_dst=1)
        irecv.assert_called_with("u", group=group, tag=4, group_src=2)
        batch.assert_called_once_with([send, receive])
        assert list(works.items()) == [(4, [irecv.return_value]), (5, [isend.return_value] * 2)]
        schedules._wait_batch_p2p([isend.return_value])
        isend.return_value.wait.assert_called_once_with()
        assert schedules._sorted_batch_p2p([]) == {}


# Traced models --------------------------------------------------------------------------------------------------------


class Traced(nn.Module):
    """Marks its split; the first stage takes two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.one(x) + y)
        OURS.top.pipe_split()
        return self.two(x)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore")
def test_traced_models() -> None:
    model, (x, y) = Traced(), data(8)
    shift = torch.randn(8, 6)
    pipe = OURS.top.pipeline(model, mb_args=(x[:2], shift[:2]))
    assert isinstance(pipe, OURS.top.Pipe)
    assert isinstance(pipe, TORCH.top.Pipe)
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x[:2], shift[:2])[0], model(x[:2], shift[:2]))
    for build in (pipe.build_stage, lambda k, device: OURS.top.build_stage(pipe.get_stage_module(k), k, pipe.info(), device)):
        held = [build(k, torch.device("cpu")) for k in range(2)]
        assert all(isinstance(stage, OURS.stage._PipelineStage) and isinstance(stage, OURS.stage._PipelineStageBase) for stage in held)
        made = OURS.schedules._PipelineScheduleRuntime(held, 4, loss_fn=functional.mse_loss)
        order = {
            0: [OURS.schedules._Action.from_str(f"{s}{kind}{m}") for m in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))]
        }
        made._prepare_schedule_with_comms(order)
        for stage in held:
            stage.submod.zero_grad()
        out = made.step(x, shift, target=y)
        whole = copy.deepcopy(model)
        torch.testing.assert_close(out, whole(x, shift))
        for k in range(4):
            (functional.mse_loss(whole(x[2 * k : 2 * k + 2], shift[2 * k : 2 * k + 2]), y[2 * k : 2 * k + 2]) / 4).backward()
        found = {name: parameter.grad for stage in held for name, parameter in stage.submod.named_parameters()}
        assert set(found) == set(dict(model.named_parameters()))
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.filterwarnings("ignore")
def test_split_spec() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    pipe = OURS.top.pipeline(model, mb_args=(torch.ones(2, 6),), split_spec={"2": OURS.top.SplitPoint.BEGINNING})
    assert pipe.num_stages == 2
    assert OURS._IR.Pipe.from_tracing(nn.Linear(2, 2), (torch.ones(1, 2),)).num_stages == 1
    with pytest.raises(ValueError, match="Cannot specify both"):
        OURS.top.pipeline(model, (torch.ones(2, 6),), split_spec={}, split_policy=lambda graph: graph)


# Sharded activations --------------------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """Takes and returns a DTensor."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)), mesh, [Replicate()]))

    def forward(self, x: Any) -> Any:
        return x @ self.weight


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_sharded_activations(name: str) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)])
    y = distribute_tensor(torch.randn(8, 6), mesh, [Replicate()])
    found = []
    for package in BOTH:
        modules = [Sharded(mesh), Sharded(mesh)]
        held = stages(package, modules, get_mesh=lambda names, layout: mesh)
        made = schedule(package, name, held, 4, loss_fn=functional.mse_loss)
        out = made.step(x, target=y)
        found.append((out.full_tensor(), [grad.full_tensor() for grad in grads(modules)]))  # type: ignore[union-attr]
    assert_same(found[1], found[0])


# Static shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_stage_metadata_after_a_step() -> None:
    modules, (x, y) = blocks(2), data(8)
    known = []
    for package in BOTH:
        held = stages(package, copy.deepcopy(modules))
        schedule(package, "ScheduleInterleaved1F1B", held, 4, loss_fn=functional.mse_loss).step(x, target=y)
        known.append([(s._stage_meta.inputs, s._inference_mode.value, s.chunks) for s in held])
        assert held[0]._stage_meta.outputs == held[1]._stage_meta.inputs
    assert [k[1:] for k in known[1]] == [k[1:] for k in known[0]]
    assert [(m.shape, m.dtype, m.requires_grad) for k in known[1] for m in k[0]] == [
        (m.shape, m.dtype, m.requires_grad) for k in known[0] for m in k[0]
    ]


@pytest.mark.usefixtures("alone")
def test_wrong_static_shapes() -> None:
    modules, (x, y) = blocks(2), data(8)
    for package in BOTH:
        made = package.top.PipelineStage
        held = [
            made(modules[0], 0, 2, torch.device("cpu"), input_args=torch.zeros(5, 6)),
            made(modules[1], 1, 2, torch.device("cpu")),
        ]
        with pytest.raises(package._utils.PipeliningMetadataError, match="shape mismatch"):
            schedule(package, "ScheduleInterleaved1F1B", held, 4, loss_fn=functional.mse_loss).step(x, target=y)


@pytest.mark.usefixtures("alone")
def test_values_between_stages_are_tensors() -> None:
    class Listing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x}

    for package in BOTH if VERSION >= (2, 12) else [OURS]:  # before, torch has no such error
        made = schedule(package, "ScheduleInterleaved1F1B", stages(package, [Listing(), *blocks(1)]), 4, loss_fn=functional.mse_loss)
        with pytest.raises(package._utils.PipeliningMetadataError):
            made.step(data()[0], target=data()[1])
        first = schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 4, loss_fn=functional.mse_loss)
        with pytest.raises(package._utils.PipeliningMetadataError, match=r"must be tensors|pass tensors to each other"):
            first.step(["text"], target=data()[1])
