"""Instructions run on virtual ranks, against the unpipelined model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from compat.deepspeed.training import WIDTH, assert_trained_alike, by_engine, by_loop, data, loss_fn, model, sgd
from penstock.compat.deepspeed import PipelineEngine, as_deepspeed
from penstock.compat.deepspeed import schedule as s
from penstock.runtime import launch, rank


class Gpipe(s.PipeSchedule):
    """A schedule of a user's own: all forwards, then all backwards, newest first."""

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        first, last = self.is_first_stage, self.is_last_stage
        for m in range(self.micro_batches):
            load = [s.LoadMicroBatch(m)] if first or last else []
            yield [*([] if first else [s.RecvActivation(m)]), *load, s.ForwardPass(m), *([] if last else [s.SendActivation(m)])]
        for m in reversed(range(self.micro_batches)):
            yield [*([] if last else [s.RecvGrad(m)]), s.BackwardPass(m), *([] if first else [s.SendGrad(m)])]
        yield [s.ReduceTiedGrads(), s.ReduceGrads(), s.OptimizerStep()]


class OneByOne(s.PipeSchedule):
    """No overlap at all: one microbatch goes up and down before the next begins."""

    def num_pipe_buffers(self) -> int:
        return 1

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        first, last = self.is_first_stage, self.is_last_stage
        for _ in range(self.micro_batches):
            load = [s.LoadMicroBatch(0)] if first or last else []
            yield [*load, *([] if first else [s.RecvActivation(0)]), s.ForwardPass(0), *([] if last else [s.SendActivation(0)])]
            yield [*([] if last else [s.RecvGrad(0)]), s.BackwardPass(0), *([] if first else [s.SendGrad(0)])]
        yield [s.ReduceTiedGrads(), s.ReduceGrads(), s.OptimizerStep()]


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (2, 4), (4, 2), (4, 7)])
def test_our_orders_train_like_the_unpipelined_model(order: str, stages: int, micro_batches: int) -> None:
    assert_trained_alike(model(), data(3 * micro_batches), micro_batches, stages, train_schedule=as_deepspeed(order))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (3, 1), (4, 7)])
def test_deepspeed_s_own_stream(stages: int, micro_batches: int) -> None:
    assert_trained_alike(model(), data(2 * micro_batches), micro_batches, stages)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (4, 5)])
def test_schedules_of_one_s_own(stages: int, micro_batches: int) -> None:
    assert_trained_alike(model(), data(2 * micro_batches), micro_batches, stages, train_schedule=OneByOne)
    whole, batches = model(dtype=torch.float64), data(2 * micro_batches, torch.float64)
    alone = copy.deepcopy(whole)
    wanted = by_loop(alone, batches, micro_batches)
    found = by_engine(whole, batches, micro_batches, stages, train_schedule=Gpipe, strict=False)
    for got, right in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(whole.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_data_parallel_is_one_stage() -> None:
    assert_trained_alike(model(), data(6), 3, 1, train_schedule=s.DataParallelSchedule)


def test_threads_that_really_run_at_once() -> None:
    whole, batches = model(), data(4)
    copies = [copy.deepcopy(whole) for _ in range(3)]

    def train() -> float:
        engine = PipelineEngine(copies[rank()], micro_batches=4, loss_fn=loss_fn, optimizer=sgd, deadline=20)
        return engine.train_batch(iter(batches)).item()

    assert launch(train, ranks=3, parallel=True) == [by_loop(whole, batches, 4)[0].item()] * 3


# Gradients and parameters ---------------------------------------------------------------------------------------------


def test_without_an_optimizer_the_gradients_are_left() -> None:
    whole, batches = model(), data(4)
    alone = copy.deepcopy(whole)
    by_engine(whole, batches, 4, 2, optimizer=None)
    for inputs, labels in batches:
        (loss_fn(alone(inputs), labels) / 4).backward()
    for mine, theirs in zip(whole.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Tied(nn.Module):
    """A linear map whose weight is shared with the one at the other end."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied_model() -> nn.Sequential:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
    middle = nn.Linear(WIDTH, WIDTH).double()
    return nn.Sequential(Tied(weight), middle, Tied(weight))


@pytest.mark.parametrize("shared", [True, False])
def test_tied_parameters(shared: bool) -> None:
    """One object that all ranks see, or a copy on each rank: the same training."""
    batches, whole = data(8, torch.float64), tied_model()
    alone = copy.deepcopy(whole)
    wanted = by_loop(alone, batches, 4)

    def train() -> tuple[list[Tensor], Tensor | None]:
        mine = whole if shared else tied_model()
        engine = PipelineEngine(mine, micro_batches=4, loss_fn=loss_fn, optimizer=sgd, split=[1, 1, 1], deadline=20)
        source = iter(batches)
        losses = [engine.train_batch(source) for _ in range(2)]
        return losses, next((p for name, p in mine.named_parameters() if engine.stage_id != 1), None)

    for losses, weight in launch(train, ranks=3):
        for got, right in zip(losses, wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
        if weight is not None:
            torch.testing.assert_close(weight, alone[0].weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_tied_gradients_that_are_accumulated_over_batches(shared: bool) -> None:
    """Without an optimizer they are left, and those of the next batch are added once."""
    batches, whole = data(8, torch.float64), tied_model()
    alone = copy.deepcopy(whole)

    def train() -> Tensor | None:
        mine = whole if shared else tied_model()
        engine = PipelineEngine(mine, micro_batches=4, loss_fn=loss_fn, split=[1, 1, 1], deadline=20)
        source = iter(batches)
        for _ in range(2):
            engine.train_batch(source)
        return mine[0].weight.grad if engine.stage_id != 1 else None

    for inputs, labels in batches:
        (loss_fn(alone(inputs), labels) / 4).backward()
    for grad in launch(train, ranks=3):
        if grad is not None:
            torch.testing.assert_close(grad, alone[0].weight.grad, rtol=1e-12, atol=1e-12)


def test_a_stage_s_parameters_have_the_model_s_names() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, layer)
    named = launch(lambda: [name for name, _ in PipelineEngine(whole, micro_batches=1, split=[1, 2]).named_parameters()], ranks=2)
    assert named == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


def test_an_optimizer_that_is_already_made() -> None:
    batches, whole = data(4), model(2)
    alone = copy.deepcopy(whole)
    wanted = by_loop(alone, batches, 4)

    def train() -> Tensor:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, optimizer=sgd(whole[rank()].parameters()), deadline=20)
        return engine.train_batch(iter(batches))

    assert [loss.item() for loss in launch(train, ranks=2)] == [wanted[0].item()] * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(whole.parameters(), alone.parameters(), strict=True))


class Pair(nn.Module):
    """Takes and gives a tuple with a tensor that cannot have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, given: Any) -> Any:
        x, mask = given
        return torch.tanh(self.map(x)) * mask, mask


def test_tuples_and_tensors_without_gradients_between_stages() -> None:
    torch.manual_seed(1)
    batches = [((torch.randn(3, WIDTH).double(), torch.tensor([[1], [0], [1]])), labels.double()) for _, labels in data(4)]
    whole = nn.Sequential(Pair(), Pair(), Pair())
    alone = copy.deepcopy(whole)

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return loss_fn(outputs[0], labels)

    wanted = by_loop(alone, batches, 4, loss)
    found = by_engine(whole, batches, 4, 3, loss_fn=loss)
    torch.testing.assert_close(found[0][0], wanted[0], rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(whole.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_microbatches_of_different_shapes() -> None:
    """Each microbatch has the same weight, as in DeepSpeed, independent of its size."""
    batches = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in (1, 5, 2, 3)]
    assert_trained_alike(model(), batches, 4, 3)


def test_without_a_loss_function_the_output_is_the_loss() -> None:
    class Total(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    whole, batches = nn.Sequential(nn.Linear(WIDTH, WIDTH), Total()), data(4)
    wanted = by_loop(copy.deepcopy(whole), batches, 4, lambda output, _: output)
    assert by_engine(whole, batches, 4, 2, loss_fn=None)[1][0].item() == wanted[0].item()


# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_evaluation(stages: int) -> None:
    whole, batches = nn.Sequential(*model(3), nn.Dropout(0.5)), data(6)

    def evaluate() -> dict[str, Any]:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, deadline=20)
        engine.set_dataiterator(iter(batches))
        return {
            "loss": engine.eval_batch(iter(batches)),
            "logits": engine.eval_batch(iter(batches), return_logits=True),
            "losses": engine.eval_batch(iter(batches), reduce_output=None),
            "mine": engine.eval_batch(iter(batches), bcast_loss=False),
            "outputs": engine.eval_batch(iter(batches), compute_loss=False, reduce_output=None),
            "more": engine.eval_batch(iter(batches), num_micro_batches=6),
            "trained": engine.train_batch() if stages == 1 else None,
        }

    found = launch(evaluate, ranks=stages)
    whole.eval()
    with torch.no_grad():
        outputs = [whole(inputs) for inputs, _ in batches]
        losses = [loss_fn(output, labels) for output, (_, labels) in zip(outputs, batches, strict=True)]
    for stage, each in enumerate(found):
        last = stage == stages - 1
        assert each["loss"].item() == (sum(losses[1:4], start=losses[0]) / 4).item()
        assert each["more"].item() == (sum(losses[1:], start=losses[0]) / 6).item()
        assert [loss.item() for loss in each["losses"]] == [loss.item() for loss in losses[:4]]
        assert each["logits"][0].item() == each["loss"].item()
        assert torch.equal(each["logits"][1], torch.cat(outputs[:4])) if last else each["logits"][1] is None
        assert each["mine"].item() == each["loss"].item() if last else each["mine"] is None
        assert all(map(torch.equal, each["outputs"], outputs[:4])) if last else each["outputs"] is None
    assert all(parameter.grad is None for parameter in whole.parameters()) or stages == 1


def test_training_and_evaluation_in_turn() -> None:
    whole, batches = model(), data(8)
    alone = copy.deepcopy(whole)

    def train() -> list[float]:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, optimizer=sgd, deadline=20)
        engine.set_dataloader(batches)
        first = engine.train_batch()
        between = engine.eval_batch(iter(batches))
        assert engine.program is not None
        assert engine.program.schedule() == ps.schedule("inference", 2, 4)
        second = engine.train_batch()
        assert engine.global_steps == 2
        return [first.item(), between.item(), second.item()]

    found = launch(train, ranks=2)
    first, second = by_loop(alone, batches, 4)
    assert found[0] == found[1]
    assert [found[0][0], found[0][2]] == [first.item(), second.item()]


# More of the surface --------------------------------------------------------------------------------------------------


def test_a_batch_function_and_stages_between() -> None:
    whole, batches = model(), data(4)
    wanted = by_loop(copy.deepcopy(whole), batches, 4)

    def train() -> float:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, optimizer=sgd, deadline=20)
        engine.set_batch_fn(lambda each: (each["x"], each["y"]))
        source = iter([{"x": x, "y": y} for x, y in batches]) if engine.is_first_stage() or engine.is_last_stage() else None
        return engine.train_batch(source).item()

    assert launch(train, ranks=3) == [wanted[0].item()] * 3


@pytest.mark.parametrize("by_class", [False, True])
def test_a_subclass_that_chooses_its_schedule_and_adds_an_instruction(by_class: bool) -> None:
    """An engine with a custom instruction, as users extend DeepSpeed's: its stream runs without a proof."""

    class Note(s.PipeInstruction):
        text: str

    class Noted(s.TrainSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            for number, step in enumerate(super().steps()):
                yield [*step, Note(text=f"step {number}")]

    class Mine(PipelineEngine):
        notes: list[str]

        def _train_schedule(self) -> s.PipeSchedule:
            return Noted(self.micro_batches, self.num_stages, self.stage_id)

        def _exec_note(self, text: str) -> None:
            self.notes.append(text)

        _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, (Note if by_class else "Note"): _exec_note}  # noqa: RUF012

    whole, batches = model(), data(3)
    wanted = by_loop(copy.deepcopy(whole), batches, 3)

    def train() -> tuple[float, list[str]]:
        engine = Mine(whole, micro_batches=3, loss_fn=loss_fn, optimizer=sgd, deadline=20)
        engine.notes = []
        loss = engine.train_batch(iter(batches)).item()
        assert engine.program is None
        return loss, engine.notes

    assert launch(train, ranks=2) == [(wanted[0].item(), [f"step {k}" for k in range(8)])] * 2


def test_a_subclass_that_wraps_a_known_instruction() -> None:
    class Counting(PipelineEngine):
        forwards = 0

        def _exec_counted_forward(self, buffer_id: int) -> None:
            self.forwards += 1
            self._exec_forward_pass(buffer_id)

        _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, "ForwardPass": _exec_counted_forward}  # noqa: RUF012

    whole, batches = model(), data(3)
    wanted = by_loop(copy.deepcopy(whole), batches, 3)

    def train() -> tuple[float, int]:
        engine = Counting(whole, micro_batches=3, loss_fn=loss_fn, optimizer=sgd, deadline=20)
        loss = engine.train_batch(iter(batches)).item()
        assert engine.program is not None
        return loss, engine.forwards

    assert launch(train, ranks=2) == [(wanted[0].item(), 3)] * 2


class LoadAndForward(s.BufferOpInstruction):
    """An instruction of a user's own that stands for two known ones."""


def merge_loads(schedule: Any) -> type[Any]:
    """The same stream with every load and the forward after it as one instruction."""

    class Merged(schedule):  # type: ignore[misc]
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            for step in super().steps():
                loads = any(each.name == "LoadMicroBatch" for each in step)
                kept = [each for each in step if each.name != "LoadMicroBatch"]
                yield [LoadAndForward(each.buffer_id) if loads and each.name == "ForwardPass" else each for each in kept]

    return Merged


class AllGradientsFirst(Gpipe):
    """Receives every gradient, newest first, before the first backward, oldest first."""

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        *forwards, closing = list(super().steps())
        forwards, backwards = forwards[: self.micro_batches], forwards[self.micro_batches :]
        yield from forwards
        yield [each for step in backwards for each in step if each.name == "RecvGrad"]
        yield from (
            [each for each in step if each.name != "RecvGrad"] for step in (backwards[::-1] if not self.is_last_stage else backwards)
        )
        yield closing


class Merging(PipelineEngine):
    def _exec_load_and_forward(self, buffer_id: int) -> None:
        self._exec_load_micro_batch(buffer_id)
        self._exec_forward_pass(buffer_id)

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, LoadAndForward: _exec_load_and_forward}  # noqa: RUF012


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 2), (2, 4), (2, 5)])
@pytest.mark.parametrize("schedule", [s.TrainSchedule, Gpipe, AllGradientsFirst])
def test_an_instruction_of_one_s_own_that_runs_known_ones(schedule: Any, stages: int, micro_batches: int) -> None:
    """Which microbatch a gradient belongs to is known when it is received, not before."""
    whole, batches = model(dtype=torch.float64), data(2 * micro_batches, torch.float64)
    alone = copy.deepcopy(whole)
    wanted = [loss.item() for loss in by_loop(alone, batches, micro_batches)]

    def train() -> list[float]:
        options: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": sgd, "strict": False, "deadline": 20}
        engine = Merging(whole, micro_batches=micro_batches, train_schedule=merge_loads(schedule), **options)
        source = iter(batches)
        return [engine.train_batch(source).item() for _ in range(2)]

    for losses in launch(train, ranks=stages):
        assert losses == pytest.approx(wanted, rel=1e-12)
    for mine, theirs in zip(whole.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_ranks_that_are_processes() -> None:
    """Each builds its own model, so that tied parameters are copies whose gradients are summed."""
    torch.manual_seed(5)
    batches = data(8, torch.float64)

    def train(make: Any, batches: Any, loss_fn: Any, optimizer: Any, order: Any) -> list[float]:
        engine = PipelineEngine(make(), micro_batches=4, loss_fn=loss_fn, optimizer=optimizer, train_schedule=order, split=[2, 1])
        source = iter(batches)
        losses = [engine.train_batch(source).item() for _ in range(2)]
        return [*losses, engine.eval_batch(iter(batches)).item()]

    alone = tied_model()
    wanted = [loss.item() for loss in by_loop(alone, batches, 4)]
    with torch.no_grad():
        wanted.append(sum(loss_fn(alone(inputs), labels).item() for inputs, labels in batches[:4]) / 4)
    for found in launch(train, ranks=2, backend="gloo", args=(tied_model, batches, loss_fn, sgd, as_deepspeed("eager-1f1b"))):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("call", ["train_batch", "eval_batch", "set_dataiterator"])
def test_data_that_would_begin_anew_with_every_batch_are_refused(call: str) -> None:
    def train() -> str:
        engine = PipelineEngine(model(2), micro_batches=2, loss_fn=loss_fn, deadline=20)
        with pytest.raises(TypeError, match=r"the data are a list.*give iter\(\.\.\.\)") as refused:
            getattr(engine, call)(data(4))
        return type(refused.value).__name__

    assert launch(train, ranks=2) == ["NotAnIteratorError"] * 2
