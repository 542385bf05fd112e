"""Extension points that programs use as in torch: overrides, own orders, helpers by name, logs and profiler ranges."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn import functional

from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, Package, later, made, parse, texts
from compat.torch.models import assert_same, blocks, chunks_of, data, grads, loop, schedule, stages

both = pytest.mark.parametrize("package", BOTH, ids=repr)
ALL = [*SINGLE, *LOOPED, *ON_A_V]


# Overrides ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
class TestOverrides:
    """Subclasses whose methods have the parameters of earlier torch versions."""

    @pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
    def test_overrides_with_fewer_parameters(self, name: str) -> None:
        called = []

        class Older(getattr(OURS.schedules, name)):  # type: ignore[misc]
            def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None) -> None:
                called.append("step")
                super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses)

            def _maybe_compute_loss(self, stage: Any, output: Any, target_mbs: Any, mb_index: int) -> None:
                called.append("maybe")
                super()._maybe_compute_loss(stage, output, target_mbs, mb_index)

            def _compute_loss(self, output: Any, target: Any) -> Any:
                called.append("loss")
                return super()._compute_loss(output, target)

            def _initialize_stage(self, args: Any, kwargs: Any) -> None:
                called.append("initialize")
                super()._initialize_stage(args, kwargs)

            def _initialize_stages(self, args: Any, kwargs: Any) -> None:
                called.append("initialize")
                super()._initialize_stages(args, kwargs)

        modules, (x, y) = blocks(chunks_of(name)), data()
        held, losses = copy.deepcopy(modules), list[Tensor]()
        own = stages(OURS, held)
        out = Older(own[0] if name in SINGLE else own, 4, loss_fn=functional.mse_loss).step(x, target=y, losses=losses)
        wanted = loop(modules, x, y, 4)
        assert_same([out, losses, grads(held)], [wanted.output, wanted.losses, wanted.grads])
        assert set(called) == {"step", "maybe", "loss", "initialize"}

    @both
    @pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
    def test_overridden_preparations(self, package: Package, name: str) -> None:
        prepared = []

        class Own(package.top.PipelineStage):  # type: ignore[misc,name-defined]
            def _prepare_forward_infra(self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False) -> Any:
                prepared.append(("forward", self.stage_index, num_microbatches, has_backward))
                return super()._prepare_forward_infra(num_microbatches, args, kwargs, *later((2, 12), has_backward))

            def _prepare_backward_infra(self, num_microbatches: int, **more: Any) -> Any:
                prepared.append(("backward", self.stage_index, num_microbatches, more.get("loss_fn") is functional.mse_loss))
                return super()._prepare_backward_infra(num_microbatches, **more)

        total = chunks_of(name)
        modules, (x, y) = blocks(total), data()
        held = copy.deepcopy(modules)
        own = [Own(module, k, total, torch.device("cpu")) for k, module in enumerate(held)]
        step = getattr(package.schedules, name)(own[0] if name in SINGLE else own, 4, loss_fn=functional.mse_loss)
        for _ in range(2):
            for module in held:
                module.zero_grad()
            step.step(x, target=y)
        assert_same(grads(held), loop(modules, x, y, 4).grads)
        there, back = range(total), reversed(range(total))
        assert prepared == [("forward", k, 4, True) for k in there] + [("backward", k, 4, True) for k in back]

    def test_an_overridden_preparation_without_has_backward(self) -> None:
        seen = []

        class Own(OURS.top.PipelineStage):  # type: ignore[misc,name-defined]
            def _prepare_forward_infra(self, num_microbatches: int, args: Any, kwargs: Any = None) -> Any:
                seen.append(args)
                return super()._prepare_forward_infra(num_microbatches, args, kwargs)

        (x, y), module = data(), blocks(1)[0]
        OURS.schedules.ScheduleGPipe(Own(module, 0, 1, torch.device("cpu")), 4, loss_fn=functional.mse_loss).step(x, target=y)
        assert_same(seen, [(x[:3],)])


@both
def test_messages_of_several_groups_in_one_batch(package: Package) -> None:
    """Batches of only sends or only receives start one by one in their groups; ours starts a mixed batch as one batch per group."""
    sent = mock.Mock(side_effect=lambda tensor, **named: named["group"].group_name)
    batch = mock.Mock(side_effect=lambda ops: [op.group.group_name for op in ops])
    groups = {name: SimpleNamespace(group_name=name) for name in "ab"}
    schedules = package.schedules
    received = mock.Mock(side_effect=lambda tensor, **named: named["group"].group_name)
    with mock.patch.multiple(dist, isend=sent, irecv=received, batch_isend_irecv=batch):

        def op(function: Any, group: str) -> Any:
            return SimpleNamespace(op=function, tensor=torch.ones(1), group=groups[group], group_peer=1, peer=1, tag=3)

        assert schedules._batch_p2p([]) == []
        assert schedules._batch_p2p([op(dist.isend, "a"), op(dist.isend, "b")]) == ["a", "b"]
        assert [call.kwargs for call in sent.call_args_list] == [{"group": groups[name], "tag": 3, "group_dst": 1} for name in "ab"]
        mixed = [op(dist.isend, "a"), op(dist.irecv, "b"), op(dist.irecv, "a")]
        works = schedules._batch_p2p(mixed)
        assert sorted(works) == ["a", "a", "b"]
        if package is OURS:
            assert [[each.group.group_name for each in call.args[0]] for call in batch.call_args_list] == [["a", "a"], ["b"]]


# Orders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
class TestOrders:
    def runtime(self, package: Package, modules: list[nn.Module], row: str) -> Any:
        held = package.schedules._PipelineScheduleRuntime(stages(package, modules), 2, loss_fn=functional.mse_loss, scale_grads=False)
        held.pipeline_order_with_comms = parse(package, row)
        return held

    @both
    @pytest.mark.filterwarnings("ignore:the order has no backward")
    def test_an_empty_order_does_nothing(self, package: Package) -> None:
        modules, (x, y) = blocks(2), data()
        assert self.runtime(package, modules, "").step(x, target=y, return_outputs=False) is None
        assert grads(modules) == [None] * 8

    @both
    @pytest.mark.filterwarnings("ignore:the order has no backward")
    def test_a_forward_only_order(self, package: Package) -> None:
        modules, (x, y) = blocks(2), data()
        losses: list[Tensor] = []
        out = self.runtime(package, modules, "0F0 1F0 0F1 1F1").step(x, target=y, losses=losses)
        wanted = loop(modules, x, y, 2)
        assert_same([out, losses], [wanted.output, wanted.losses])
        assert grads(modules) == [None] * 8

    def test_training_without_backwards_warns(self) -> None:
        modules, (x, y) = blocks(2), data()
        held = self.runtime(OURS, modules, "0F0 1F0 0F1 1F1")
        held.eval(x)
        with pytest.warns(UserWarning, match="trains nothing"):
            held.step(x, target=y)

    @both
    def test_a_subclass_that_builds_its_rows(self, package: Package) -> None:
        """A program uses torch's helpers for interleaved rows."""
        schedules = package.schedules

        class Own(schedules.ScheduleInterleavedZeroBubble):  # type: ignore[misc,name-defined]
            def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
                count = self.n_local_stages * self._n_microbatches
                warm_up = schedules._get_warmup_ops(rank, self.n_local_stages, self._n_microbatches, 1, self._n_microbatches)
                return schedules._get_1f1b_rank_ops(  # type: ignore[no-any-return]
                    self.n_local_stages,
                    self.pp_group_size,
                    warm_up,
                    count - warm_up,
                    warm_up,
                    rank,
                    lambda at: at // self._n_microbatches,
                    lambda at: self.n_local_stages - 1 - (at - warm_up) // self._n_microbatches,
                )

        modules, (x, y) = blocks(2), data()
        held = copy.deepcopy(modules)
        own = Own(stages(package, held), 4, loss_fn=functional.mse_loss)
        own.step(x, target=y)
        assert_same(grads(held), loop(modules, x, y, 4).grads)
        assert all("I" not in str(action) for action in own.pipeline_order[0])


# Helpers by name ------------------------------------------------------------------------------------------------------


ROWS = [
    ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
    ("0F0 2F0 2I0 0I0 0W0 2W0", "1F0 3F0 3I0 1I0 1W0 3W0"),
    ("0F0 . . 0B0", "1F0 1B0"),
]


@pytest.mark.parametrize("rows", ROWS)
def test_bubbles(rows: tuple[str, ...]) -> None:
    spaced = []
    for package in BOTH:
        held = made(package, "ScheduleInterleavedZeroBubble", 2, 2, 2)
        held.pipeline_order = parse(package, *rows)
        total = 2 if len(rows[0].split()) == 4 else 4
        spaced.append(texts(held._add_bubbles_to_actions(total)))
    assert spaced[1] == spaced[0]


def test_bubbles_with_a_missing_input() -> None:
    """Torch never returns if no action produces an input."""
    held = made(OURS, "ScheduleInterleavedZeroBubble", 2, 2, 2)
    held.pipeline_order = parse(OURS, "0F0 2F1", "1F0")
    assert texts(held._add_bubbles_to_actions(4)) == {0: ["0F0", None, "2F1"], 1: [None, "1F0"]}


def test_small_helpers() -> None:
    theirs, mine = TORCH.schedules, OURS.schedules
    if VERSION >= (2, 13):
        assert mine._TARGET_CHUNK_SPEC.split_dim == theirs._TARGET_CHUNK_SPEC.split_dim == 0
    for kind in mine._ComputationType:
        assert mine._requires_reduce_grad(kind) == (kind.value in ("W", "B"))
    for text in ("1F0", "12RECV_B3", "0UNSHARD", "3REDUCE_GRAD", "2W11", "4I0x", "x", "OVERLAP_F_B"):
        found = [package.schedules._action_regex.match(text) for package in BOTH]
        assert (found[1] and found[1].groups()) == (found[0] and found[0].groups())


@both
def test_move_placeholders_to_front(package: Package) -> None:
    graph = fx.Graph()
    first = graph.placeholder("first")
    middle = graph.call_function(torch.neg, (first,))
    with graph.inserting_after(middle):
        second = graph.placeholder("second")
    graph.output(graph.call_function(torch.add, (middle, second)))
    package._IR._move_placeholders_to_front(graph)
    assert sorted(node.name for node in list(graph.nodes)[:2]) == ["first", "second"]


# Logs and profiler ranges ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
class TestProfilerRanges:
    def names(self, package: Package, name: str) -> list[str]:
        modules, (x, y) = blocks(chunks_of(name)), data()
        held = schedule(package, name, stages(package, modules), 4, loss_fn=functional.mse_loss)
        held.step(x, target=y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            held.step(x, target=y)
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        return [event.name for event in events if event.name.startswith(("PP:", "Forward ", "Backward "))]

    @pytest.mark.parametrize("name", [*LOOPED, *ON_A_V])
    def test_several_stages_per_rank(self, name: str) -> None:
        """Every action of the order appears in order, also those with nothing to do."""
        assert self.names(OURS, name) == self.names(TORCH, name)

    def test_gpipe(self) -> None:
        mine = [name for name in self.names(OURS, "ScheduleGPipe") if not name.startswith("PP:")]
        assert mine == self.names(TORCH, "ScheduleGPipe")


class Broken(nn.Module):
    """Fails at its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("third call")
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("alone")
class TestErrorTables:
    def said(self, package: Package, caplog: pytest.LogCaptureFixture, build: Any) -> list[str]:
        modules, (x, y) = [blocks(1)[0], Broken()], data()
        known = [package.top.PipelineStage(module, k, 2, torch.device("cpu"), x[:3], x[:3]) for k, module in enumerate(modules)]
        held = build(package, known)
        caplog.clear()
        with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError):
            held.step(x, target=y)
        return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]

    def test_an_order_with_messages(self, caplog: pytest.LogCaptureFixture) -> None:
        def build(package: Package, held: list[Any]) -> Any:
            return package.schedules.ScheduleInterleaved1F1B(held, 4, loss_fn=functional.mse_loss)

        mine = self.said(OURS, caplog, build)
        table = next(text for text in mine if "ERROR HERE" in text)
        assert [line.split(":")[1].split()[0] for line in table.splitlines() if "<-- ERROR HERE" in line] == ["1F2"]
        assert any("when running action 1F2.  Full Schedule:" in text for text in mine)

    def test_a_compute_order(self, caplog: pytest.LogCaptureFixture) -> None:
        def build(package: Package, held: list[Any]) -> Any:
            own = package.schedules.PipelineScheduleMulti(held, 4, loss_fn=functional.mse_loss)
            own.pipeline_order = parse(package, " ".join(f"0F{k} 1F{k} . 1B{k} 0B{k}" for k in range(4)))
            return own

        mine = self.said(OURS, caplog, build)
        assert "[Rank 0] pipeline schedule PipelineScheduleMulti caught the following exception" in mine[0]
        assert "at time_step 11 when running action 1F2" in mine[0]
        assert next(line for line in mine[1].splitlines() if "<-- ERROR HERE" in line).startswith("Step 11: 1F2")


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from {name} import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(4, 6)
for made, count in ((ScheduleGPipe, 1), (ScheduleInterleaved1F1B, 2)):
    held = [PipelineStage(nn.Linear(6, 6), k, count, torch.device("cpu")) for k in range(count)]
    made(held[0] if count == 1 else held, 2, loss_fn=nn.functional.mse_loss).step(x, target=x)
"""
LINES = ("Using Schedule", "warded microbatch", "warded chunk", "running time_step")


def test_log_lines() -> None:
    """`TORCH_LOGS=+pp` shows the same lines in the same order as torch."""
    said = []
    for package in BOTH:
        environment = {**os.environ, "TORCH_LOGS": "+pp"}
        command = [sys.executable, "-c", SCRIPT.format(name=package.name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines = [line.partition("] ")[2] for line in done.stderr.splitlines() if any(each in line for each in LINES)]
        said.append(lines)
    assert said[1] == said[0]
    assert len(said[0]) > 30
