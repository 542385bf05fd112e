"""The keywords, options and stage methods of torch 2.15, which work on every supported torch."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from compat.torch.both import LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, made, mock_stages, parse, texts
from compat.torch.models import Outcome, assert_same, blocks, chunks_of, data, grads, loop, run, schedule, stages

MULTI = [*LOOPED, *ON_A_V]
since_2_15 = pytest.mark.skipif(VERSION < (2, 15), reason="compares with torch's own, which came with 2.15")


def pairs(x: Tensor, y: Tensor, count: int) -> dict[str, Any]:
    return {"arg_mbs": [(part,) for part in x.chunk(count)], "target_mbs": list(y.chunk(count))}


# Microbatches as lists ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
class TestMicrobatchLists:
    @pytest.mark.parametrize("name", [*SINGLE, *MULTI])
    def test_numbers_equal_the_unpipelined_model(self, name: str) -> None:
        modules, (x, y) = blocks(chunks_of(name)), data()
        held, losses = copy.deepcopy(modules), list[Tensor]()
        step = schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss)
        output = step.step(**pairs(x, y, 4), losses=losses)
        assert_same(Outcome(output, losses, grads(held)), loop(modules, x, y, 4))
        losses.clear()
        assert_same(step.eval(**pairs(x, y, 4), losses=losses), loop(modules, x, y, 4).output)
        assert_same(losses, loop(modules, x, y, 4).losses)

    def test_the_call_of_torchtitan(self) -> None:
        def loss_fn(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
            return factor * functional.mse_loss(output, target, reduction="sum")

        class Biased(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(6, 6)

            def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
                out: Tensor = self.layer(x)
                return out if shift is None else out + shift.tanh()

        modules, (x, y) = [Biased(), Biased()], data(8)
        shifts = torch.randn(8, 6)
        held, losses = copy.deepcopy(modules), list[Tensor]()
        step = schedule(OURS, "ScheduleInterleaved1F1B", stages(OURS, held), 4, loss_fn=loss_fn, scale_grads=False)
        kwarg_mbs = [{"shift": shift} for shift in shifts.chunk(4)]
        out = step.step(**pairs(x, y, 4), kwarg_mbs=kwarg_mbs, losses=losses, loss_kwargs={"factor": 0.5}, return_outputs=False)
        assert out is None
        whole = loss_fn(modules[1](modules[0](x, shift=shifts), shift=shifts), y, 0.5)
        whole.backward()
        assert_same(sum(losses), whole)
        assert_same(grads(held), grads(modules))

    def test_targets_alone_on_a_later_rank(self) -> None:
        """A rank without the first stage passes no arguments."""
        step = schedule(OURS, "ScheduleGPipe", stages(OURS, blocks(1)), 2, loss_fn=functional.mse_loss)
        args, kwargs, targets = step._get_microbatch_inputs((), {}, None, None, None, [1, 2])
        assert (args, kwargs, targets) == ([(), ()], [{}, {}], [1, 2])

    def test_mistakes_are_refused(self) -> None:
        step = schedule(OURS, "ScheduleGPipe", stages(OURS, blocks(1)), 2, loss_fn=functional.mse_loss)
        x = torch.ones(2, 6)
        cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (ValueError, (x,), {"arg_mbs": [(x,), (x,)]}),
            (ValueError, (), {"arg_mbs": [(x,), (x,)], "target": x}),
            (ValueError, (), {"arg_mbs": [(x,), (x,)], "mask": x}),
            (ValueError, (), {"arg_mbs": [(x,)]}),
            (TypeError, (), {"arg_mbs": ((x,), (x,))}),
            (TypeError, (), {"arg_mbs": [x, x]}),
            (TypeError, (), {"kwarg_mbs": [(), ()]}),
        ]
        for error, args, kwargs in cases:
            with pytest.raises(error):
                step.step(*args, **kwargs)


# Stage methods --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
class TestForwardContexts:
    @pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
    def test_each_forward_runs_in_its_context(self, name: str) -> None:
        inside, seen = list[Any](), list[tuple[int, int]]()
        modules, (x, y) = blocks(chunks_of(name)), data()
        held = stages(OURS, copy.deepcopy(modules))
        for stage in held:
            stage.submod.register_forward_pre_hook(lambda *_: seen.append(inside[-1]))

        @contextmanager
        def context(info: Any) -> Iterator[None]:
            assert not info.is_metadata_inference
            inside.append((info.stage_index, info.microbatch_index))
            yield
            inside.pop()

        handles = [stage.register_forward_context(context) for stage in held]
        step = schedule(OURS, name, held, 4, loss_fn=functional.mse_loss)
        step.step(x, target=y)
        assert sorted(seen) == list(itertools.product(range(len(held)), range(4)))
        assert_same(grads([stage.submod for stage in held]), loop(modules, x, y, 4).grads)
        with pytest.raises(RuntimeError, match="already registered"):
            held[0].register_forward_context(context)
        for handle in handles:
            handle.remove()
        for stage in held:
            stage.submod._forward_pre_hooks.clear()
        step.step(x, target=y)
        assert len(seen) == len(held) * 4

    def test_a_context_that_hides_a_failure(self) -> None:
        @contextmanager
        def hide(info: Any) -> Iterator[None]:
            with pytest.raises(RuntimeError):
                yield

        held = stages(OURS, blocks(1))
        held[0].register_forward_context(hide)
        with pytest.raises(RuntimeError, match="suppressed an exception"):
            schedule(OURS, "ScheduleGPipe", held, 2).eval(torch.ones(4, 5))


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """Rank 0 of two, whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("split", [False, True])
def test_released_outputs(split: bool) -> None:
    """After a release nothing holds the sent output, and the backward has the same numbers."""
    torch.manual_seed(0)
    module, x, grad = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(2, 6), torch.randn(2, 6)
    found = []
    for release in (False, True):
        stage = OURS.top.PipelineStage(copy.deepcopy(module), 0, 2, torch.device("cpu"))
        stage.has_backward = True
        assert stage.use_messages(1, True)
        output = stage.forward_one_chunk(0, (x,))
        stage.get_fwd_send_ops(0)
        alive = weakref.ref(output)
        del output
        if release:
            stage.release_fwd_send_outputs(0)
        assert (alive() is None) == release
        stage.grad_recv_info[0] = stage._build_recv_infos("recv_grad", 1, [grad])
        stage.backward_one_chunk(0, full_backward=not split)
        if split:
            stage.backward_weight_one_chunk(0)
        stage.release_fwd_send_outputs(0)  # after the backward there is nothing left to release
        found.append(grads([stage.submod]))
    wanted = copy.deepcopy(module)
    wanted(x).backward(grad)
    assert_same(found[0], grads([wanted]))
    assert_same(found[1], found[0], exact=True)


# Sharded stages -------------------------------------------------------------------------------------------------------


def shard(modules: list[nn.Module]) -> list[nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = copy.deepcopy(modules)
    for module in held:
        fully_shard(module[0], mesh=mesh)  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    return held


def whole(modules: list[nn.Module]) -> list[Any]:
    return [grad.full_tensor() for grad in grads(modules)]  # type: ignore[union-attr]


@pytest.mark.usefixtures("alone")
class TestShardedStages:
    @pytest.mark.parametrize("name", [*SINGLE, *MULTI])
    @pytest.mark.parametrize("scale", [True, False])
    def test_gradients_are_reduced_by_the_step_that_finalizes(self, name: str, scale: bool) -> None:
        modules = blocks(chunks_of(name))
        batches = [data() for _ in range(4)]
        held = shard(modules)
        step = schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss, scale_grads=scale)
        summed: list[Any] = []
        for k, (x, y) in enumerate(batches):
            wanted = loop(modules, x, y, 4, scale=scale)
            summed = [a + b for a, b in zip(summed, wanted.grads, strict=True)] if summed else wanted.grads
            assert_same(step.step(x, target=y, finalize_gradients=k in (0, 3)), wanted.output)
            if k in (0, 3):
                assert_same(whole(held), summed)
        step.step(*batches[0][:1], target=batches[0][1])  # a step by itself afterwards
        assert_same(whole(held), [a + b for a, b in zip(summed, loop(modules, *batches[0], 4, scale=scale).grads, strict=True)])

    @since_2_15
    @pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
    def test_deferred_gradients_equal_torch(self, name: str) -> None:
        modules, batches = blocks(chunks_of(name)), [data() for _ in range(3)]
        found = []
        for package in (TORCH, OURS):
            held = shard(modules)
            step = schedule(package, name, stages(package, held), 4, loss_fn=functional.mse_loss)
            for k, (x, y) in enumerate(batches):
                step.step(x, target=y, finalize_gradients=k == 2)
            found.append(whole(held))
        assert_same(found[1], found[0])

    @pytest.mark.parametrize("name", MULTI)
    @pytest.mark.parametrize("defer", [True, False])
    def test_waits_for_reductions(self, name: str, defer: bool) -> None:
        modules, (x, y) = blocks(chunks_of(name)), data()
        held = shard(modules)
        step = schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss, defer_reduce_grad_wait=defer)
        events: list[str] = []
        for stage in step._stages:
            for method in ("start_gradient_reduction", "wait_for_gradient_reduction"):
                own = getattr(stage, method)

                def noted(*args: Any, own: Any = own, note: str = f"{method[:4]}{stage.stage_index}") -> None:
                    events.append(note)
                    own(*args)

                setattr(stage, method, noted)
        step.step(x, target=y)
        assert_same(whole(held), loop(modules, x, y, 4).grads)
        assert sorted(events) == sorted(f"{what}{k}" for k in range(len(modules)) for what in ("star", "wait"))
        row = [str(action) for action in step.pipeline_order_with_comms[0]]
        if defer:
            kinds = [text.lstrip("0123456789") for text in row if "REDUCE" in text]
            assert kinds == ["REDUCE_GRAD", "WAIT_REDUCE_GRAD"] * len(modules)
            last = max(k for k, text in enumerate(row) if text.endswith("REDUCE_GRAD") and "WAIT" not in text)
            assert row[last + 1].endswith("RESHARD") or row[-1].endswith("WAIT_REDUCE_GRAD")

    def test_stages_without_fsdp_have_nothing_to_reduce(self) -> None:
        stage = stages(OURS, blocks(1))[0]
        for method in (stage.start_gradient_reduction, lambda: stage.wait_for_gradient_reduction(2)):
            with pytest.raises(RuntimeError, match="requires FSDP"):
                method()
        held = stages(OURS, shard(blocks(1)))[0]
        with pytest.raises(RuntimeError, match="No gradient reduction is pending"):
            held.wait_for_gradient_reduction(2)

    @pytest.mark.parametrize("lookahead", ["full", "auto", (1,), (2,)])
    @pytest.mark.parametrize("active", [2, 3, 5])
    def test_options_of_sharding_keep_the_numbers(self, lookahead: Any, active: int) -> None:
        modules, (x, y) = blocks(5), data()
        held = shard(modules)
        options = {"max_active_stages": active, "unshard_lookahead": lookahead}
        step = schedule(OURS, "ScheduleLoopedBFS", stages(OURS, held), 4, loss_fn=functional.mse_loss, **options)
        step.step(x, target=y)
        assert_same(whole(held), loop(modules, x, y, 4).grads)


# Orders ---------------------------------------------------------------------------------------------------------------


def count_under_way(row: list[Any]) -> int:
    """Count the sends that are under way at once, at most."""
    now = most = 0
    for text in map(str, row):
        now += "SEND" in text and "WAIT" not in text
        now -= "WAIT_SEND" in text
        most = max(most, now)
    return most


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 6), (4, 8)])
def test_outstanding_sends_stay_within_the_limit(name: str, ranks: int, count: int) -> None:
    unlimited = made(OURS, name, ranks, 2, count)
    least = None
    for limit in range(12):
        limited = made(OURS, name, ranks, 2, count, max_outstanding_sends=limit)
        if isinstance(limited, type):
            assert limited is ValueError
            assert least is None  # once a limit can be kept, so can every larger one
            continue
        least = limit if least is None else least
        order = limited.pipeline_order_with_comms
        for rank, row in order.items():
            assert count_under_way(row) <= limit
            kept, wanted = ([str(a) for a in each if "WAIT" not in str(a)] for each in (row, unlimited.pipeline_order_with_comms[rank]))
            if VERSION >= (2, 15):
                assert kept == wanted
            else:  # without the option there are no waits, whose turns shift the receives
                assert sorted(kept) == sorted(wanted)
        simulated = OURS.schedules._simulate_comms_compute(
            {rank: [a for a in row if "SHARD" not in str(a) and "REDUCE" not in str(a)] for rank, row in order.items()},
            limited.stage_index_to_group_rank.__getitem__,
            2 * ranks,
        )
        assert sum(a is not None for row in simulated.values() for a in row) > 0  # every wait ends
    assert least is not None
    assert least > 0


@since_2_15
@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(
    "options",
    [
        {"max_outstanding_sends": 2},
        {"max_outstanding_sends": 5, "defer_pp_recv": True},
        {"defer_reduce_grad_wait": True},
        {"max_active_stages": 3, "unshard_lookahead": "auto"},
        {"max_active_stages": 3, "unshard_lookahead": (1, 2, 3)},
    ],
    ids=str,
)
def test_lowered_orders_equal_torch(name: str, options: dict[str, Any]) -> None:
    for chunks in (2,) if name in ON_A_V else (2, 4):
        theirs, mine = (made(package, name, 3, chunks, 6, **options) for package in (TORCH, OURS))
        assert isinstance(mine, type) == isinstance(theirs, type)
        if not isinstance(mine, type) and (chunks == 2 or "unshard_lookahead" in options):  # else ours unshards less often
            assert texts(mine.pipeline_order_with_comms) == texts(theirs.pipeline_order_with_comms)


def test_bad_options_are_refused() -> None:
    for options in (
        {"max_outstanding_sends": -1},
        {"max_outstanding_sends": True},
        {"max_active_stages": 0},
        {"unshard_lookahead": "some"},
        {"unshard_lookahead": (1,)},
        {"unshard_lookahead": (1, 4)},
    ):
        assert made(OURS, "ScheduleInterleaved1F1B", 2, 2, 4, **options) is ValueError
    assert made(OURS, "ScheduleDualPipeV", 2, 2, 4, max_active_stages=1) is ValueError


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MULTI)
def test_files_with_waits_run(name: str, tmp_path: Path) -> None:
    """An order as torch 2.15 writes it: with a wait for every send and reduction."""
    source = made(OURS, name, 1, chunks_of(name), 4, max_outstanding_sends=4, defer_reduce_grad_wait=True)
    file = tmp_path / "order.csv"
    source._dump_csv(str(file))
    assert "WAIT_REDUCE_GRAD" in file.read_text()
    modules, (x, y) = blocks(chunks_of(name)), data()
    held = copy.deepcopy(modules)
    step = OURS.schedules._PipelineScheduleRuntime(stages(OURS, held), 4, loss_fn=functional.mse_loss)
    step._load_csv(str(file), "compute_comms")
    step.step(x, target=y)
    assert_same(grads(held), loop(modules, x, y, 4).grads)


def test_waits_that_do_not_fit_are_refused() -> None:
    rows = {
        "no pending send": ("0F0 0WAIT_SEND_F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0"),
        "no matching wait": ("0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
        "without a pending reduction": (
            "0F0 0SEND_F0 0RECV_B0 0B0 0WAIT_REDUCE_GRAD 0REDUCE_GRAD",
            "1RECV_F0 1F0 1B0 1SEND_B0",
        ),
    }
    for message, order in rows.items():
        runtime = OURS.schedules._PipelineScheduleRuntime(mock_stages(2, 1), 1)
        with pytest.raises(ValueError, match=message):
            runtime._prepare_schedule_with_comms(parse(OURS, *order), format="compute_comms")


def test_waits_that_never_end_are_refused() -> None:
    """Rank 0 waits for its second send, which rank 1 receives after a wait for its own send, which rank 0 receives after its wait."""
    rest = (
        "2RECV_F1 2F0 2F1 2SEND_F0 2SEND_F1 2RECV_B0 2B0 2RECV_B1 2B1 2SEND_B0 2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1 "
        "2WAIT_SEND_F0 2WAIT_SEND_F1 2WAIT_SEND_B0 2WAIT_SEND_B1"
    )
    other = (
        "1RECV_F0 1F0 1SEND_F0 1WAIT_SEND_F0 1RECV_F1 1F1 1SEND_F1 1WAIT_SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B0 3SEND_B0 3B1 3SEND_B1 "
        "1RECV_B0 1B0 1RECV_B1 1B1 1SEND_B0 1SEND_B1 3WAIT_SEND_B0 3WAIT_SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1"
    )
    good, bad = (
        f"0F0 0SEND_F0 0F1 0SEND_F1 {middle} {rest}"
        for middle in ("2RECV_F0 0WAIT_SEND_F0 0WAIT_SEND_F1", "0WAIT_SEND_F0 0WAIT_SEND_F1 2RECV_F0")
    )
    runtime = OURS.schedules._PipelineScheduleRuntime(mock_stages(2, 2), 2)
    runtime._prepare_schedule_with_comms(parse(OURS, good, other), format="compute_comms")
    with pytest.raises(ValueError, match="form a cycle"):
        runtime._prepare_schedule_with_comms(parse(OURS, bad, other), format="compute_comms")


# Liveness -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch"])
def test_activation_liveness(name: str, granularity: Any) -> None:
    step = made(OURS, name, 2, 2, 6)
    analyze = OURS.top.analyze_pipeline_activation_liveness
    for rank in range(2):
        held = [stage for stage, owner in step.stage_index_to_group_rank.items() if owner == rank]
        found = analyze(step, pp_rank=rank, stage_indices=held, granularity=granularity)
        keys = list(itertools.product(held, range(6)))
        row = [(k, str(part)) for k, action in enumerate(step.pipeline_order_with_comms[rank]) for part in action.sub_actions or (action,)]
        where = {text: k for k, text in row}
        for stage, microbatch in keys:
            together = held if granularity == "microbatch" else [stage]
            ends = [where[f"{s}{kind}{microbatch}"] for s in together for kind in "BW" if f"{s}{kind}{microbatch}" in where]
            want = min(where[f"{s}F{microbatch}"] for s in together), max(ends)
            assert found.get_activation_lifetime(stage, microbatch) == want
        lifetimes = {key: found.get_activation_lifetime(*key) for key in keys}
        slots = {key: found.slot_for(*key) for key in keys}
        for one, other in itertools.combinations(keys, 2):
            apart = granularity == "stage_microbatch" or one[1] != other[1]
            if apart and slots[one] == slots[other]:  # never alive at the same time
                assert lifetimes[one][1] < lifetimes[other][0] or lifetimes[other][1] < lifetimes[one][0]
        groups = {key: lifetimes[key] for key in keys if granularity == "stage_microbatch" or key[0] == held[0]}
        alive = max(sum(a <= k <= b for a, b in groups.values()) for k in range(len(step.pipeline_order_with_comms[rank])))
        assert found.num_slots == alive == len(set(slots.values()))  # no plan needs fewer
        if VERSION >= (2, 15):
            theirs = TORCH.top.analyze_pipeline_activation_liveness(
                made(TORCH, name, 2, 2, 6), pp_rank=rank, stage_indices=held, granularity=granularity
            )
            assert dict(theirs.slot_by_stage_and_microbatch) == dict(found.slot_by_stage_and_microbatch)


def test_liveness_refuses_what_it_cannot_answer() -> None:
    step = made(OURS, "ScheduleInterleaved1F1B", 2, 2, 4)
    analyze = OURS.top.analyze_pipeline_activation_liveness
    good = {"pp_rank": 0, "stage_indices": [0, 2], "granularity": "microbatch"}
    for change in ({"granularity": "layer"}, {"stage_indices": []}, {"stage_indices": [0, 0]}, {"pp_rank": 5}, {"stage_indices": [1]}):
        with pytest.raises(ValueError):  # noqa: PT011 - each has its own message
            analyze(step, **{**good, **change})
    with pytest.raises(ValueError, match="stage 1, microbatch 0"):
        analyze(step, **good).slot_for(1, 0)


@pytest.mark.usefixtures("alone")
def test_every_option_keeps_the_numbers() -> None:
    options = {
        "max_active_stages": 2,
        "unshard_lookahead": "auto",
        "defer_reduce_grad_wait": True,
        "max_outstanding_sends": 3,
        "defer_pp_recv": True,
    }
    modules, (x, y) = blocks(3), data()
    assert_same(run(OURS, "ScheduleInterleavedZeroBubble", modules, x, y, 4, **options), loop(modules, x, y, 4))
