"""The behaviour that torch's own tests of schedules, orders and lowering require, on both packages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from compat.torch.both import BOTH, LOOPED, ON_A_V, SINGLE, Package, made, mock_stages, parse, texts, with_waits
from compat.torch.models import assert_same, blocks, chunks_of, data, grads, loop, schedule, stages

both = pytest.mark.parametrize("package", BOTH, ids=repr)
ALL = [*SINGLE, *LOOPED, *ON_A_V]
SPLIT = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


@pytest.fixture
def fake() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Classes --------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "name", ["1F1B", "1f1b", "Interleaved1F1B", "INTERLEAVED1F1B", "GPipe", "LoopedBFS", "PipelineScheduleSingle", "PipelineScheduleMulti"]
)
def test_classes_by_name(package: Package, name: str) -> None:
    found = package.schedules.get_schedule_class(name)
    assert issubclass(found, package.schedules._PipelineSchedule)


@both
def test_unknown_class_names(package: Package) -> None:
    with pytest.raises(ValueError, match="Unknown schedule name"):
        package.schedules.get_schedule_class("ScheduleThatDoesNotExist")


@both
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.usefixtures("fake")
@pytest.mark.filterwarnings("ignore")
def test_compiled_stages_are_refused(package: Package, name: str) -> None:
    held = stages(package, [torch.compile(module) for module in blocks(2)])  # type: ignore[misc]
    with pytest.raises(RuntimeError, match=r"not supported with stage modules that have used torch\.compile"):
        schedule(package, name, held, 4)


# Steps of one process -------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.usefixtures("fake")
def test_one_stage_on_a_fake_process_group(package: Package, name: str) -> None:
    modules, (x, y) = blocks(1), data(8)
    held, losses = copy.deepcopy(modules), list[Tensor]()
    step = schedule(package, name, stages(package, held), 2, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False)
    out = step.step(x, target=y, losses=losses)
    alone = copy.deepcopy(modules[0])
    loss = functional.mse_loss(alone(x), y, reduction="sum")
    loss.backward()
    assert_same([out, torch.stack(losses).sum(), grads(held)], [alone(x), loss, grads([alone])])


@both
@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.usefixtures("fake")
def test_evaluation_then_training(package: Package, name: str) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data(8)
    held = copy.deepcopy(modules)
    step = schedule(package, name, stages(package, held), 4, loss_fn=functional.mse_loss)
    for _ in range(2):
        step.eval(x, target=y)
        for module in held:
            module.zero_grad()
        out = step.step(x, target=y)
        assert_same(grads(held), loop(modules, x, y, 4).grads)
        assert_same(out, loop(modules, x, y, 4).output)


@both
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("fake")
def test_training_without_gradients_is_refused(package: Package, name: str) -> None:
    x, y = data(8)
    step = schedule(package, name, stages(package, blocks(chunks_of(name))), 4, loss_fn=functional.mse_loss)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"should not be used under torch\.no_grad"):
        step.step(x, target=y)


@both
@pytest.mark.parametrize("name", ALL)
@pytest.mark.usefixtures("fake")
def test_weights_that_change_between_steps(package: Package, name: str) -> None:
    modules, batches = blocks(chunks_of(name)), [data(8) for _ in range(3)]
    held, alone = copy.deepcopy(modules), copy.deepcopy(modules)
    step = schedule(package, name, stages(package, held), 4, loss_fn=functional.mse_loss)
    mine, plain = (torch.optim.SGD([p for module in each for p in module.parameters()], 0.1) for each in (held, alone))
    for x, y in batches:
        mine.zero_grad()
        plain.zero_grad()
        step.step(x, target=y)
        functional.mse_loss(nn.Sequential(*alone)(x), y).backward()
        mine.step()
        plain.step()
    for one, other in zip(held, alone, strict=True):
        assert_same(list(one.parameters()), list(other.parameters()))


@both
@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
@pytest.mark.usefixtures("fake")
def test_loss_kwargs(package: Package, name: str) -> None:
    def loss_fn(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
        return factor * functional.mse_loss(output, target)

    modules, (x, y) = blocks(chunks_of(name)), data(8)
    held = copy.deepcopy(modules)
    step = schedule(package, name, stages(package, held), 4, loss_fn=loss_fn)
    step.step(x, target=y, loss_kwargs={"factor": 3.0})
    assert_same(grads(held), [3 * grad for grad in loop(modules, x, y, 4).grads if grad is not None])


# Handwritten orders ---------------------------------------------------------------------------------------------------

BY_HAND = {
    "v": "0F0 0F1 1F0 1F1 1I0 1W0 1I1 1W1 0B0 0B1",
    "split": "0F0 0F1 1F0 1F1 1I0 1I1 1W0 1W1 0I0 0I1 0W0 0W1",
    "whole": "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",
    "unsharding": "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1 0RESHARD 1RESHARD",
    "reducing": "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
    "overlapped": "0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 (1I1;0B0)OVERLAP_F_B 1W1 0B1",
}


@both
@pytest.mark.parametrize("order", BY_HAND)
@pytest.mark.usefixtures("fake")
def test_gradients_of_handwritten_orders(package: Package, order: str) -> None:
    modules, (x, y) = blocks(2), data(8)
    held, losses = copy.deepcopy(modules), list[Tensor]()
    step = package.schedules._PipelineScheduleRuntime(stages(package, held), 2, loss_fn=functional.mse_loss, scale_grads=False)
    step._prepare_schedule_with_comms(parse(package, with_waits(BY_HAND[order])), format="compute_comms")
    out = step.step(x, target=y, losses=losses)
    wanted = loop(modules, x, y, 2, scale=False)
    assert_same([out, losses, grads(held)], [wanted.output, wanted.losses, wanted.grads])


@both
@pytest.mark.parametrize("kind", ["FORWARD", "FULL_BACKWARD", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B"])
@pytest.mark.usefixtures("fake")
def test_custom_functions_are_called(package: Package, kind: str) -> None:
    schedules, seen = package.schedules, list[str]()
    modules, (x, y) = blocks(2), data(8)
    row = "0UNSHARD 1UNSHARD 0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD 0RESHARD 1RESHARD"
    row = "0F0 1F0 (0F1;1B0)OVERLAP_F_B 1F1 1B1 0B0 0B1" if kind == "OVERLAP_F_B" else row
    step = schedules._PipelineScheduleRuntime(stages(package, modules), 2, loss_fn=functional.mse_loss, scale_grads=False)
    step._prepare_schedule_with_comms(parse(package, with_waits(row)), format="compute_comms")
    held = {stage.stage_index: stage for stage in step._stages}

    def run(action: Any, ctx: Any) -> None:
        seen.append(str(action))
        assert ctx.schedule_ref is step
        assert len(ctx.arg_mbs) == len(ctx.kwarg_mbs) == len(ctx.target_mbs) == 2
        for part in action.sub_actions or (action,):
            stage, k = held[part.stage_index], part.microbatch_index
            if part.computation_type == schedules.FORWARD:
                output = stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
                step._maybe_compute_loss(stage, output, ctx.target_mbs, k)
                if not stage.is_last:
                    held[1].set_local_fwd_input(output, k)
            elif part.computation_type == schedules.FULL_BACKWARD:
                step.backward_counter[part.stage_index] += 1
                stage.backward_one_chunk(k, loss=step._maybe_get_loss(stage, k), full_backward=True)
                if not stage.is_first:
                    held[0].set_local_bwd_input(stage.get_local_bwd_output(k), k)

    step.register_custom_function(getattr(schedules, kind), run)
    out = step.step(x, target=y)
    assert seen == [str(action) for action in step.pipeline_order_with_comms[0] if action.computation_type == getattr(schedules, kind)]
    wanted = loop(modules, x, y, 2, scale=False)
    assert_same(out, wanted.output)
    assert_same(grads(modules), wanted.grads)


@both
@pytest.mark.usefixtures("fake")
def test_custom_functions_for_messages_are_refused(package: Package) -> None:
    step = package.schedules._PipelineScheduleRuntime(stages(package, blocks(2)), 2)
    for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        with pytest.raises(ValueError, match="Invalid computation type"):
            step.register_custom_function(getattr(package.schedules, kind), lambda action, ctx: None)


# Orders ---------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 4), (4, 8), (4, 12), (3, 3), (8, 16)])
def test_orders_of_interleaved_schedules(package: Package, name: str, chunks: int, ranks: int, count: int) -> None:
    step = made(package, name, ranks, chunks, count)
    package.schedules._validate_schedule(step.pipeline_order, ranks, ranks * chunks, count)
    assert "F" in package.schedules._format_pipeline_order(step.pipeline_order)
    parts = [action for row in step.pipeline_order.values() for action in row if action is not None]
    assert len(set(parts)) == len(parts) == 2 * ranks * chunks * count


@both
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"])
@pytest.mark.parametrize(("ranks", "count"), [(4, 2), (4, 3), (4, 10), (2, 5), (8, 4), (4, 16)])
def test_orders_of_flexible_microbatch_counts(package: Package, name: str, ranks: int, count: int) -> None:
    step = made(package, name, ranks, 2, count)
    if isinstance(step, type):
        assert package is BOTH[0]  # torch refuses the count
        return
    package.schedules._validate_schedule(step.pipeline_order, ranks, 2 * ranks, count)


@both
@pytest.mark.parametrize("name", ON_A_V)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 12), (3, 6), (8, 16)])
def test_orders_of_v_schedules(package: Package, name: str, ranks: int, count: int) -> None:
    step = made(package, name, ranks, 2, count)
    where = package.schedules._validate_schedule(step.pipeline_order, ranks, 2 * ranks, count)
    assert where == {stage: min(stage, 2 * ranks - 1 - stage) for stage in range(2 * ranks)}


@both
@pytest.mark.parametrize("name", ON_A_V)
def test_v_schedules_need_two_stages_per_rank(package: Package, name: str) -> None:
    with pytest.raises(ValueError, match="2 stages per rank"):
        getattr(package.schedules, name)(mock_stages(2, 3), 8)


@both
def test_stage_to_rank_mappings(package: Package) -> None:
    stage_to_rank = package._utils.generate_stage_to_rank_mapping
    assert stage_to_rank(2, 4) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert stage_to_rank(2, 4, style="v") == {0: 0, 1: 1, 2: 1, 3: 0}
    assert package._utils.generate_rank_to_stage_mapping(2, 4) == {0: [0, 2], 1: [1, 3]}
    assert package._utils.generate_rank_to_stage_mapping(2, 4, style="v") == {0: [0, 3], 1: [1, 2]}
    for bad in ((2, 3, "v"), (2, 4, "zigzag")):
        with pytest.raises(ValueError, match=r"evenly divisible|not supported"):
            stage_to_rank(*bad)


# Validation -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("rows", "stages_", "count"),
    [
        (("0F0 0B0",), 1, 1),
        (("0F0 . . 0B0", ". 1F0 1B0 ."), 2, 1),
        (("0F0 0I0 0W0",), 1, 1),
        (("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",), 2, 2),
        (("0F0 . . . 0I0 0W0", ". 1F0 1I0 1W0"), 2, 1),
    ],
)
def test_valid_orders(package: Package, rows: tuple[str, ...], stages_: int, count: int) -> None:
    where = package.schedules._validate_schedule(parse(package, *rows), len(rows), stages_, count)
    assert set(where) == set(range(stages_))


@both
@pytest.mark.parametrize(
    ("rows", "ranks", "stages_", "count"),
    [
        (("0F0 0B0",), 2, 1, 1),
        (("0F0",), 1, 1, 1),
        (("0F0 0B0 1F0",), 1, 2, 1),
        (("0B0 0F0",), 1, 1, 1),
        (("0F0 0B0", "0F1 0B1"), 2, 1, 2),
        (("0F0 0I0",), 1, 1, 1),
        (("0F0 0W0 0I0",), 1, 1, 1),
    ],
)
def test_invalid_orders(package: Package, rows: tuple[str, ...], ranks: int, stages_: int, count: int) -> None:
    with pytest.raises(AssertionError):
        package.schedules._validate_schedule(parse(package, *rows), ranks, stages_, count)


# Actions --------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("1F0", (1, "FORWARD", 0)),
        ("2I1", (2, "BACKWARD_INPUT", 1)),
        ("0W3", (0, "BACKWARD_WEIGHT", 3)),
        ("0B3", (0, "FULL_BACKWARD", 3)),
        ("1UNSHARD", (1, "UNSHARD", None)),
        ("3RESHARD", (3, "RESHARD", None)),
        ("0REDUCE_GRAD", (0, "REDUCE_GRAD", None)),
        ("2SEND_B2", (2, "SEND_B", 2)),
        ("1RECV_F1", (1, "RECV_F", 1)),
        ("12SEND_F34", (12, "SEND_F", 34)),
        ("0RECV_B0", (0, "RECV_B", 0)),
    ],
)
def test_text_of_actions(package: Package, text: str, fields: tuple[Any, ...]) -> None:
    action = package.schedules._Action.from_str(text)
    stage, kind, microbatch = fields
    assert action == package.schedules._Action(stage, getattr(package.schedules._ComputationType, kind), microbatch)
    assert repr(action) == str(action) == text
    assert action.is_compute_op == (kind in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"))


@both
def test_text_of_overlaps(package: Package) -> None:
    text = "(1F1;0B0)OVERLAP_F_B"
    action = package.schedules._Action.from_str(text)
    assert repr(action) == text
    assert [str(part) for part in action.sub_actions] == ["1F1", "0B0"]
    assert action.is_compute_op


@both
@pytest.mark.parametrize("text", ["x", "F1", "1Q0", "1"])
def test_invalid_action_text(package: Package, text: str) -> None:
    with pytest.raises(RuntimeError, match="Invalid action string"):
        package.schedules._Action.from_str(text)


# Lowering -------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ("0F0 0F1 . . . 0B0 0B1", "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD"),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"),
        ("", ""),
    ],
)
def test_unshard_and_reshard(package: Package, row: str, wanted: str) -> None:
    found = package.schedules._add_unshard_reshard(parse(package, row)[0])
    assert sorted(map(str, found)) == sorted(wanted.split())
    compute = [str(action) for action in found if action.is_compute_op]
    assert compute == [each for each in row.split() if each != "."]
    for at, action in enumerate(found):
        if action.is_compute_op:
            kinds = [each.computation_type.value for each in found[:at] if each.stage_index == action.stage_index]
            assert [kind for kind in kinds if "SHARD" in kind][-1:] == ["UNSHARD"]


@both
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ("0F0 0I0 0W0", "0F0 0B0"),
        ("0F0 0I0 . 0W0", "0F0 0B0"),
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0I1 0W0 0W1"),
        ("0F0 1F0 1I0 0W0 1W0", "0F0 1F0 1I0 0W0 1W0"),
        ("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_merge_backward(package: Package, row: str, wanted: str) -> None:
    assert [str(action) for action in package.schedules._merge_bw(parse(package, row)[0])] == wanted.split()


@both
@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (("0F0 0B0",), ("0F0 0B0",)),
        (
            ("0F0 0B0", "1F0 1B0"),
            ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        ),
        (
            ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"),
            (
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1",
                "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1W0 1F1 1I1 1SEND_B1 1W1",
            ),
        ),
    ],
)
def test_send_and_receive(package: Package, rows: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    found = package.schedules._add_send_recv(parse(package, *rows), stage_to_rank=lambda stage: stage, num_stages=len(rows))
    for rank, row in texts(found).items():
        assert sorted(map(str, row)) == sorted(wanted[rank].split())
        assert [each for each in row if each and "_" not in each] == [each for each in wanted[rank].split() if "_" not in each]
    simulated = package.schedules._simulate_comms_compute(found, lambda stage: stage, len(rows))
    assert {rank: [each for each in row if each is not None] for rank, row in simulated.items()} == found


@both
def test_no_messages_between_stages_of_one_rank(package: Package) -> None:
    rows = parse(package, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    found = texts(package.schedules._add_send_recv(rows, stage_to_rank=lambda stage: [0, 1, 1, 0][stage], num_stages=4))
    assert not any(each in found[1] for each in ("1SEND_F0", "2RECV_F0", "2SEND_B0", "1RECV_B0"))
    assert {"0SEND_F0", "3RECV_F0", "3SEND_B0", "0RECV_B0"} <= set(found[0])


@both
@pytest.mark.parametrize("name", [*LOOPED, "ScheduleZBVZeroBubble"])
def test_dry_run_of_lowered_orders(package: Package, name: str) -> None:
    step = made(package, name, 4, 2, 8)
    compute = {rank: [action for action in row if action is not None] for rank, row in step.pipeline_order.items()}
    where = step.stage_index_to_group_rank
    lowered = package.schedules._add_send_recv(compute, stage_to_rank=lambda stage: where[stage], num_stages=8)
    simulated = package.schedules._simulate_comms_compute(lowered, lambda stage: where[stage], 8)
    assert {rank: [each for each in row if each is not None] for rank, row in simulated.items()} == lowered


@both
@pytest.mark.parametrize("count", [1, 2])
def test_reduce_grad(package: Package, count: int) -> None:
    row = "0F0 0F1 0B0 0B1" if count == 2 else "0F0 0I0 0W0"
    found = [str(action) for action in package.schedules._add_reduce_grad(parse(package, row)[0], count)]
    assert found == with_waits(f"{row} 0REDUCE_GRAD").split()


@both
@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_deferred_receives(package: Package, name: str) -> None:
    early, late = made(package, name, 2, 2, 4), made(package, name, 2, 2, 4, defer_pp_recv=True)
    for rank in range(2):
        one, other = texts(early.pipeline_order_with_comms)[rank], texts(late.pipeline_order_with_comms)[rank]
        assert sorted(map(str, one)) == sorted(map(str, other))
        assert [each for each in one if each and "RECV" not in each] == [each for each in other if each and "RECV" not in each]


@both
@pytest.mark.parametrize("format_", ["compute_only", "compute_comms"])
def test_csv_files(package: Package, format_: str, tmp_path: Path) -> None:
    step = made(package, "ScheduleInterleaved1F1B", 2, 2, 4)
    step._dump_csv(tmp_path / "order.csv", format=format_)
    other = package.schedules._PipelineScheduleRuntime(mock_stages(2, 2), 4)
    other._load_csv(tmp_path / "order.csv", format=format_)
    assert other.pipeline_order_with_comms == step.pipeline_order_with_comms


@both
def test_unknown_formats(package: Package, tmp_path: Path) -> None:
    step = package.schedules._PipelineScheduleRuntime(mock_stages(1, 1), 1)
    with pytest.raises(NotImplementedError):
        step._prepare_schedule_with_comms(parse(package, "0F0 0B0"), format="words")
    with pytest.raises(ValueError, match="compute-only schedule but found communication"):
        step._prepare_schedule_with_comms(parse(package, "0F0 0B0 0UNSHARD"))


@both
def test_formatted_order(package: Package) -> None:
    table = package.schedules._format_pipeline_order(parse(package, "0F0 . 0B0", ". 1F0 1B0"), error_step_number=1)
    lines = table.splitlines()
    assert lines[0].split() == ["Rank", "0", "Rank", "1"]
    assert [line.startswith(f"Step {k}:") for k, line in enumerate(lines[1:])] == [True] * 3
    assert [line.endswith("<-- ERROR HERE") for line in lines] == [False, False, True, False]


# Helpers of steps -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.usefixtures("fake")
def test_checks_of_step_inputs(package: Package) -> None:
    x, y = data(8)
    step = schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 4, loss_fn=functional.mse_loss)
    with pytest.raises(TypeError, match="losses must be a list"):
        step.step(x, target=y, losses={})
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 1"):
        step._step_microbatches([(x,)])
    with pytest.raises(TypeError, match="target_mbs must be a list"):
        step._step_microbatches([(x,)] * 4, None, (y,) * 4)
    args, kwargs = step._check_inputs()
    assert (args, kwargs) == ([()] * 4, [{}] * 4)


@both
@pytest.mark.usefixtures("fake")
def test_losses_of_microbatches(package: Package) -> None:
    step = schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 2, loss_fn=functional.mse_loss)
    last, inner = SimpleNamespace(is_last=True), SimpleNamespace(is_last=False)
    assert step._maybe_get_loss(last, 0) is None
    step._maybe_compute_loss(inner, None, None, 0)
    step._maybe_compute_loss(last, torch.ones(2), [torch.zeros(2)] * 2, 0)
    assert step._maybe_get_loss(last, 0) == 1
    with pytest.raises(RuntimeError, match="Loss for microbatch 1 is not available"):
        step._maybe_get_loss(last, 1)
    losses = [7]
    with pytest.raises(RuntimeError, match="Expecting 2 losses but got 1"):
        step._update_losses([last], losses)
    step._internal_losses.append(torch.tensor(2.0))
    step._update_losses(last, losses)
    assert losses == [1, 2]
    assert step._internal_losses == []


@both
@pytest.mark.usefixtures("fake")
def test_non_adjacent_stages_are_refused(package: Package) -> None:
    """A schedule of several stages per rank sends messages only between adjacent stages."""
    held = stages(package, blocks(3))
    step = package.schedules.PipelineScheduleMulti(held, 2)
    for k, stage in enumerate(held):
        stage.args_recv_info = {0: ()}
        stage.act_send_info = {0: [k + 2]} if k == 0 else {}
    with pytest.raises(RuntimeError, match="only supports adjacent-stage communication"):
        step._validate_adjacent_stage_communication()


@both
def test_mock_stages(package: Package) -> None:
    """A subclass of a stage that skips the base constructor has all attributes that a schedule's constructor reads."""

    class Mock(package.stage._PipelineStageBase):  # type: ignore[misc,name-defined]
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(submod=None, group=None, **attributes)

        def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> tuple[()]:
            return ()

        def _prepare_forward_infra(self, n_microbatches: int) -> None:
            pass

        def _prepare_backward_infra(self, n_microbatches: int) -> None:
            pass

    for name in [*LOOPED, *ON_A_V]:
        held = [Mock(num_stages=8, group_size=4, group_rank=0) for _ in range(2)]
        assert getattr(package.schedules, name)(held, 8).pipeline_order[0]
