"""The behaviour that torch's own tests of stages require, on both packages."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.torch.both import BOTH, VERSION, Package, fill, forward_cache, prepare
from compat.torch.models import assert_same, block, blocks, data, grads, loop, schedule, stages

both = pytest.mark.parametrize("package", BOTH, ids=repr)
CPU = torch.device("cpu")


@pytest.fixture(params=["gloo", "fake"])
def one_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of one, with gloo or torch's fake backend."""
    store: Any = dist.HashStore() if request.param == "gloo" else FakeStore()
    dist.init_process_group(request.param, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def middle_of_three() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


class Named(nn.Module):
    """Takes a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x)
        return out if y is None else out + y


# Steps ----------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("one_rank")
def test_manual_stage(package: Package) -> None:
    modules, (x, y) = blocks(1), data(8)
    held = copy.deepcopy(modules)
    stage = package.top.PipelineStage(held[0], 0, 1, CPU)
    made = schedule(package, "ScheduleGPipe", [stage], 4, loss_fn=functional.mse_loss)
    losses: list[Tensor] = []
    out = made.step(x, target=y, losses=losses)
    wanted = loop(modules, x, y, 4)
    assert_same([out, losses, grads(held)], [wanted.output, wanted.losses, wanted.grads])
    assert list(stage.submod.state_dict()) == list(modules[0].state_dict())


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_traced_stage(package: Package) -> None:
    modules, (x, y) = blocks(1), data(8)
    pipe = package.top.pipeline(copy.deepcopy(modules[0]), (x[:2],))
    stage = pipe.build_stage(0, CPU)
    made = schedule(package, "ScheduleGPipe", [stage], 4, loss_fn=functional.mse_loss)
    wanted = loop(modules, x, y, 4)
    assert_same(made.step(x, target=y), wanted.output)
    assert_same(grads([stage.submod]), wanted.grads)
    assert set(stage.submod.state_dict()) == set(modules[0].state_dict())


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("traced", [False, True])
def test_keyword_arguments(package: Package, traced: bool) -> None:
    model, (x, y) = Named(), data(8)
    if traced:
        stage = package.top.pipeline(copy.deepcopy(model), (x[:2],), {"y": y[:2]}).build_stage(0, CPU)
    else:
        stage = package.top.PipelineStage(copy.deepcopy(model), 0, 1, CPU)
    made = schedule(package, "ScheduleGPipe", [stage], 4)
    assert_same(made.step(x, y=y), model(x, y))


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shapes", [{}, {"input": True}, {"input": True, "output": True}])
def test_static_shapes(package: Package, shapes: dict[str, bool]) -> None:
    modules, (x, y) = blocks(2), data(8)
    held = copy.deepcopy(modules)

    def given(k: int) -> dict[str, Any]:
        inner = {"input_args": x[:2].clone().requires_grad_(k > 0)} if shapes.get("input") else {}
        return inner | ({"output_args": x[:2].clone().requires_grad_()} if shapes.get("output") else {})

    own = [package.top.PipelineStage(module, k, 2, CPU, **given(k)) for k, module in enumerate(held)]
    made = schedule(package, "ScheduleInterleaved1F1B", own, 4, loss_fn=functional.mse_loss)
    assert_same(made.step(x, target=y), loop(modules, x, y, 4).output)


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
def test_dw_builder(package: Package, name: str) -> None:
    """`dw_builder` is called once per microbatch and stage, and its result runs once."""
    asked, ran = [0], [0]

    def build() -> Any:
        asked[0] += 1

        def run() -> None:
            ran[0] += 1

        return run

    single = name in ("ScheduleGPipe", "Schedule1F1B")
    modules, (x, y) = blocks(1 if single else 2), data(8)
    held = copy.deepcopy(modules)
    made = schedule(package, name, stages(package, held, dw_builder=build), 4, loss_fn=functional.mse_loss)
    made.step(x, target=y)
    assert asked == ran == [4 * len(modules)]
    assert_same(grads(held), loop(modules, x, y, 4).grads)


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kept", [True, False])
def test_outputs_are_kept_on_request(package: Package, kept: bool) -> None:
    """Outputs are kept only if the caller asks for them."""
    alive: list[Any] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            alive.append(weakref.ref(out))
            return out

    x, y = data(8)
    stage = package.top.PipelineStage(Watching(), 0, 1, CPU, x[:2], x[:2])
    made = schedule(package, "Schedule1F1B", [stage], 4, loss_fn=functional.mse_loss)
    out = made.step(x, target=y, return_outputs=kept)
    assert len(stage.output_chunks) == (4 if kept else 0)
    assert (out is None) != kept
    gc.collect()
    assert sum(each() is not None for each in alive) == (4 if kept else 0)


@both
@pytest.mark.usefixtures("one_rank")
def test_outputs_are_cleared_by_the_next_step(package: Package) -> None:
    x, _ = data(8)
    (stage,) = stages(package, blocks(1))
    made = schedule(package, "ScheduleGPipe", [stage], 4)
    for _ in range(3):
        made.step(x)
        assert len(stage.output_chunks) == 4
    stage.clear_runtime_states()
    assert (stage.output_chunks, forward_cache(stage)) == ([], {})


# By hand --------------------------------------------------------------------------------------------------------------


def by_hand(package: Package, module: nn.Module, x: Tensor) -> Any:
    """Build a stage with static shapes, set up for two microbatches."""
    stage = package.top.PipelineStage(module, 0, 1, CPU, x, x.clone().requires_grad_())
    prepare(package, stage, (x,), {})
    return stage


@both
@pytest.mark.usefixtures("one_rank")
def test_driving_a_stage_by_hand(package: Package) -> None:
    modules, (x, y) = blocks(1), data(8)
    held = copy.deepcopy(modules)
    stage = by_hand(package, held[0], x[:4])
    for k, (part, wanted) in enumerate(zip(x.split(4), y.split(4), strict=True)):
        out = stage.forward_one_chunk(k, (part,), {})
        assert_same(out, modules[0](part))
        stage.backward_one_chunk(k, loss=functional.mse_loss(out, wanted), last_backward=k == 1)
    assert_same(grads(held), loop(modules, x, y, 2, scale=False).grads)
    stage.scale_grads(2)
    assert_same(grads(held), loop(modules, x, y, 2).grads)


@both
@pytest.mark.usefixtures("one_rank")
def test_driving_a_split_backward_by_hand(package: Package) -> None:
    modules, (x, y) = blocks(1), data(8)
    held = copy.deepcopy(modules)
    stage = by_hand(package, held[0], x[:4])
    outs = [stage.forward_one_chunk(k, (part,), {}) for k, part in enumerate(x.split(4))]
    for k, wanted in enumerate(y.split(4)):
        stage.backward_one_chunk(k, loss=functional.mse_loss(outs[k], wanted), full_backward=False)
    for k in range(2):
        stage.backward_weight_one_chunk(k, last_backward=k == 1)
    assert_same(grads(held), loop(modules, x, y, 2, scale=False).grads)


@both
@pytest.mark.usefixtures("one_rank")
def test_backward_weight_before_backward_input_is_refused(package: Package) -> None:
    (stage,) = stages(package, blocks(1))
    stage.has_backward = True
    with pytest.raises(AssertionError, match="without first calling `backward_one_chunk"):
        stage.backward_weight_one_chunk(0)


@both
@pytest.mark.usefixtures("one_rank")
def test_backward_without_has_backward_does_nothing(package: Package) -> None:
    (stage,) = stages(package, blocks(1))
    stage.has_backward = False
    stage.forward_one_chunk(0, (torch.ones(2, 6),))
    stage.backward_one_chunk(0)
    stage.backward_weight_one_chunk(0)
    assert stage.get_bwd_send_ops(0) == stage.get_bwd_recv_ops(0) == []
    assert grads([stage.submod]) == [None] * 4


@both
@pytest.mark.usefixtures("one_rank")
def test_local_values_between_stages_of_one_rank(package: Package) -> None:
    modules, (x, y) = blocks(2), data(4)
    held = copy.deepcopy(modules)
    first, second = (
        package.top.PipelineStage(module, k, 2, CPU, x.clone().requires_grad_(k > 0), x.clone().requires_grad_())
        for k, module in enumerate(held)
    )
    made = schedule(package, "ScheduleInterleaved1F1B", [first, second], 1, loss_fn=functional.mse_loss)
    made.step(x, target=y)  # sets up the stages
    for module in held:
        module.zero_grad()
    for stage in (first, second):
        stage.clear_runtime_states()
    second.set_local_fwd_input(first.forward_one_chunk(0, (x,), {}), 0)
    out = second.forward_one_chunk(0, ())
    second.backward_one_chunk(0, loss=functional.mse_loss(out, y))
    first.set_local_bwd_input(second.get_local_bwd_output(0), 0)
    first.backward_one_chunk(0)
    assert_same(grads(held), loop(modules, x, y, 1).grads)


@both
@pytest.mark.usefixtures("one_rank")
def test_local_values_are_checked(package: Package) -> None:
    (first, second) = stages(package, blocks(2))
    first.has_backward = second.has_backward = True
    with pytest.raises(AssertionError, match=r"[Ee]xpected tuple"):
        first.set_local_bwd_input(torch.ones(1), 0)
    with pytest.raises(AssertionError, match="is last"):
        second.set_local_bwd_input((torch.ones(1),), 0)


# Descriptions ---------------------------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("middle_of_three")
def test_first_and_last_stage(package: Package) -> None:
    for k, (first, last) in enumerate([(True, False), (False, False), (False, True)]):
        stage = package.top.PipelineStage(nn.Linear(6, 6), k, 3, CPU)
        assert (stage.is_first, stage.is_last, stage.group_rank, stage.group_size) == (first, last, 1, 3)
        assert stage.stage_index_to_group_rank == {0: 0, 1: 1, 2: 2}
        assert f"Stage {k}" in stage.log_prefix


@both
@pytest.mark.usefixtures("middle_of_three")
def test_messages_of_a_middle_stage(package: Package) -> None:
    """A middle stage receives from both neighbours and sends to both."""
    x = torch.zeros(2, 6, requires_grad=True)
    options = {"output_grads": torch.zeros(2, 6), "input_grads": torch.zeros(2, 6)} if VERSION >= (2, 12) else {}
    stage = package.top.PipelineStage(nn.Linear(6, 6), 1, 3, CPU, x, x, **options)
    prepare(package, stage)

    def told(ops: list[Any]) -> list[Any]:
        return [(op.op is dist.isend, tuple(op.tensor.shape), op.peer) for op in ops]

    assert told(stage.get_fwd_recv_ops(0)) == [(False, (2, 6), 0)]
    fill(stage.args_recv_info[0][0])
    stage.forward_one_chunk(0, ())
    assert told(stage.get_fwd_send_ops(0)) == [(True, (2, 6), 2)]
    assert told(stage.get_bwd_recv_ops(0)) == [(False, (2, 6), 2)]
    fill(stage.grad_recv_info[0][0])
    stage.backward_one_chunk(0)
    assert told(stage.get_bwd_send_ops(0)) == [(True, (2, 6), 0)]
    assert all(grad is not None for grad in grads([stage.submod]))
    assert stage.act_send_info == {0: [2]}


@both
@pytest.mark.usefixtures("middle_of_three")
def test_invalid_stages(package: Package) -> None:
    with pytest.raises(ValueError, match="out of range"):
        package.top.PipelineStage(nn.Linear(6, 6), 3, 3, CPU)
    with pytest.raises(RuntimeError, match="cannot be larger"):
        package.top.PipelineStage(nn.Linear(6, 6), 0, 2, CPU)


@both
def test_recv_info(package: Package) -> None:
    meta = package._utils.extract_tensor_meta(torch.ones(2, 3))
    buffers = () if VERSION >= (2, 15) else (torch.ones(2, 3),)
    info = package.stage._RecvInfo("a", 1, *buffers, meta)
    assert (info.input_name, info.source, info.is_root_arg) == ("a", 1, False)
    assert "source=1" in repr(info)
    root = package.stage._RecvInfo("x", None, *(None for _ in buffers), meta, is_root_arg=True)
    assert root.is_root_arg


@both
def test_normalized_outputs(package: Package) -> None:
    normal = package.stage._normalize_model_output_as_tuple
    x = torch.ones(1)
    assert normal(x) == (x,)
    assert normal([x]) == (x,)
    assert normal((x, x)) == (x, x)


@both
def test_tensor_metadata(package: Package) -> None:
    utils = package._utils
    meta = utils._TensorMeta.from_tensor(torch.ones(2, 3, requires_grad=True))
    assert (tuple(meta.shape), meta.dtype, meta.requires_grad) == ((2, 3), torch.float32, True)
    assert meta.get_diff(utils._TensorMeta.from_tensor(torch.ones(2, 3, requires_grad=True))) == []
    assert len(meta.get_diff(utils._TensorMeta.from_tensor(torch.ones(3, 2, dtype=torch.float64)))) >= 2
    assert meta.to_tensor("meta").shape == (2, 3)
    assert utils.extract_tensor_metas((torch.ones(1), torch.ones(2)))[1].shape == (2,)
    assert utils.validate_and_normalize_to_tuple(torch.ones(1))[0].shape == (1,)


@both
def test_flattened_arguments(package: Package) -> None:
    x = torch.ones(2, requires_grad=True) * 2
    assert package._utils.flatten_args(((x, 1), {"a": [x]})) == [x, 1, x]
    flat = package._utils.flatten_args((x, 1), detach=True)
    assert flat[1][0].grad_fn is None if isinstance(flat, tuple) else flat[0].grad_fn is None


# Metadata that does not match -----------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("one_rank")
def test_a_batch_of_another_width(package: Package) -> None:
    made = schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 4, loss_fn=functional.mse_loss)
    with pytest.raises(RuntimeError):
        made.step(torch.ones(8, 5), target=torch.ones(8, 6))


@both
@pytest.mark.usefixtures("one_rank")
def test_a_module_that_fails(package: Package) -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    x = torch.ones(8, 6)
    made = schedule(
        package, "ScheduleGPipe", [package.top.PipelineStage(Failing(), 0, 1, CPU, x[:2], x[:2])], 4, loss_fn=functional.mse_loss
    )
    with pytest.raises(RuntimeError, match="failed to run forward") as error:
        made.step(x, target=x)
    assert isinstance(error.value.__cause__, ValueError)


@both
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", [nn.Identity(), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Dropout(0.0)])
def test_various_modules(package: Package, module: nn.Module) -> None:
    (x, y), held = data(8), copy.deepcopy(module)
    made = schedule(package, "ScheduleGPipe", stages(package, [held]), 2, loss_fn=functional.mse_loss)
    out = made.step(x.requires_grad_(), target=y)
    assert_same(out, torch.cat([module(part) for part in x.split(4)]))


@both
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_sharded_activations(package: Package, placement: Any) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(6, 6) / 6, mesh, [Replicate()]))

        def forward(self, x: Any) -> Any:
            return x @ self.weight

    x = distribute_tensor(torch.randn(8, 6), mesh, [placement])
    held = [package.top.PipelineStage(Product(), k, 2, CPU, get_mesh=lambda names, layout: mesh) for k in range(2)]
    made = schedule(
        package, "ScheduleInterleaved1F1B", held, 4, loss_fn=lambda out, y: (out.full_tensor() - y.full_tensor()).square().mean()
    )
    out = made.step(x, target=x)
    assert isinstance(out, DTensor)
    assert_same(out.full_tensor(), x.full_tensor() @ (torch.ones(6, 6) / 6) @ (torch.ones(6, 6) / 6))
    assert all(isinstance(stage.submod.weight.grad, DTensor) for stage in held)


@both
@pytest.mark.usefixtures("one_rank")
def test_stage_metadata_after_a_step(package: Package) -> None:
    x, y = data(8)
    first, last = held = stages(package, blocks(2))
    step = schedule(package, "ScheduleInterleaved1F1B", held, 4, loss_fn=functional.mse_loss)
    step.step(x, target=y)
    for k in range(4):
        assert [(info.is_root_arg, info.source) for info in first.args_recv_info[k]] == [(True, None)]
    assert tuple(first.args_recv_info[0][0].tensor_meta.shape) == (2, 6)
    assert (first.act_send_info, last.act_send_info) == ({0: [1]}, {0: []})
    for stage in held:
        assert [tuple(meta.shape) for meta in (*stage._stage_meta.inputs, *stage._stage_meta.outputs)] == [(2, 6)] * 2
        assert (stage.chunks, stage.has_backward, forward_cache(stage)) == (4, True, {})
    assert last._stage_meta.input_grads[0].shape == first._stage_meta.output_grads[0].shape == (2, 6)
    assert (step._stages_forward_initialized, step._stages_backward_initialized) == (True, True)
