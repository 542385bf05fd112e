"""Programs that move activations to the host: the same numbers to the last bit, and the memory that was predicted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PassError, PipelineError, ScheduleError
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.passes.offload import Offload
from penstock.runtime import Pipeline, launch, prefix_of
from penstock.runtime.measure.layer import watch_saved_tensors
from runtime.live import Live
from runtime.sequences import decoder, sliced_step, words

WIDTH = 16


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width), nn.Dropout(0.1))


def train(model: nn.Module, table: Any, **options: Any) -> list[Any]:
    x, y = torch.randn(24, WIDTH), torch.randn(24, WIDTH)

    def on_rank() -> Any:
        pipe = Pipeline(copy.deepcopy(model), table, loss_fn=functional.mse_loss, seed=3, **options)
        losses = [pipe.step(x, target=y).loss for _ in range(2)]
        moves = pipe._executor(pipe.microbatches, True).compute.moves
        held = None if moves is None else (moves.memory.peak, moves.memory.held)
        return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}, held

    return launch(on_rank, table.ranks)


@pytest.mark.parametrize("recompute", [False, True, "every second layer"])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zbv", "interleaved-1f1b", "interleaved-zb", "dualpipe-v"])
def test_the_numbers_are_the_same_to_the_last_bit(name: str, recompute: Any) -> None:
    schedule = ps.schedule(name, ranks=3, microbatches=6)
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(schedule.stages)))
    if recompute == "every second layer":
        if name not in ("1f1b", "zbv"):
            pytest.skip("two schedules are enough")
        model = nn.Sequential(*(block() for _ in range(2 * schedule.stages)))
        recompute = [True, False] * schedule.stages
    moved = ps.lower(schedule, offload=100)
    assert moved.rows.is_kind(Kind.OFFLOAD).any()
    torch.manual_seed(1)
    plain = train(model, ps.lower(schedule), recompute=recompute)
    torch.manual_seed(1)
    found = train(model, moved, recompute=recompute)
    for (losses, grads, held), (expected, expected_grads, _) in zip(found, plain, strict=True):
        assert all(map(torch.equal, losses, expected))
        assert grads.keys() == expected_grads.keys()
        for parameter, grad in grads.items():
            assert torch.equal(grad, expected_grads[parameter]), parameter
        assert held is None or held[1] == 0
    assert any(held and held[0] for _, _, held in found)


@pytest.mark.parametrize("name", ["seq1f1b", "seq-zb-h1", "slimpipe"])
def test_slices_of_sequences_too(name: str) -> None:
    schedule = ps.schedule(name, ranks=3, microbatches=3, slices=4)
    torch.manual_seed(0)
    model, x, y = decoder(schedule.stages + 2, torch.float32), words(6, 16), words(6, 16)
    moved = ps.lower(schedule, offload=100)
    assert moved.rows.is_kind(Kind.OFFLOAD).any()
    results, trained = sliced_step(model, moved, x, y)
    expected, wanted = sliced_step(model, ps.lower(schedule), x, y)
    assert torch.equal(results[0].loss, expected[0].loss)
    for parameter, other in zip(trained.parameters(), wanted.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


def test_a_schedule_with_copies_is_lowered_with_them() -> None:
    schedule = ps.lower(ps.schedule("1f1b", ranks=3, microbatches=6), offload=100).schedule()
    model = nn.Sequential(*(block() for _ in range(3)))
    peaks = [held[0] for _, _, held in train(model, schedule)]
    assert peaks[0] > 0


@pytest.mark.parametrize("choice", [100, True, (100, 100, 50), Offload(100, ahead=2)])
def test_a_pipeline_adds_copies_for_any_number_of_microbatches(choice: Any) -> None:
    """As the lowered program of as many microbatches has them, and with the same numbers as without."""
    schedule, model = ps.schedule("1f1b", ranks=3, microbatches=6), nn.Sequential(*(block() for _ in range(3)))
    batches = [torch.randn(2, WIDTH) for _ in range(9)]
    offload = choice if isinstance(choice, Offload) else Offload(100 if choice is True else choice)

    def on_rank(added: Any) -> Any:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss, seed=3, offload=added)
        losses = [pipe.step_list(batches[:count], batches[:count]).loss for count in (6, 9)]
        losses.append(pipe.step(torch.cat(batches), target=torch.cat(batches), microbatches=9).loss)
        return losses, [pipe.program(count) for count in (6, 9)]

    for (losses, programs), (expected, _) in zip(launch(on_rank, 3, args=(choice,)), launch(on_rank, 3, args=(None,)), strict=True):
        assert all(map(torch.equal, losses, expected))
        for count, program in zip((6, 9), programs, strict=True):
            assert program.rows == ps.lower(ps.schedule("1f1b", ranks=3, microbatches=count), offload=offload).rows


def test_batches_of_ever_new_shapes_and_counts_do_not_fill_the_host() -> None:
    """Programs of different numbers of microbatches share the buffers; what a step does not need is dropped after it."""
    schedule, model = ps.schedule("gpipe", ranks=2, microbatches=4), nn.Sequential(block(), block())

    def on_rank() -> Any:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss, offload=True)
        kept = []
        for rows, count in ((3, 4), (3, 4), (3, 4), (5, 4), (5, 6), (3, 4)):  # the first step also copies inputs
            batches = [torch.randn(rows, WIDTH) for _ in range(count)]
            pipe.step_list(batches, batches)
            moves = pipe._executor(count, True).compute.moves
            kept.append((moves.memory.kept, sorted(id(buffer) for free in moves.memory._free.values() for buffer, _ in free)))
        return kept

    for _, (small, before), (again, after), (large, few), (more, many), (end, _) in launch(on_rank, 2):
        assert small == again == end > 0
        assert before == after
        assert 3 * large == 5 * small
        assert more > large
        assert set(few) < set(many)


def test_what_cannot_be_moved_by_a_pipeline_is_refused() -> None:
    schedule, model = ps.schedule("1f1b", ranks=3, microbatches=6), nn.Sequential(*(block() for _ in range(3)))
    moved = ps.lower(schedule, offload=100)
    for table, choice, message in [
        (ps.lower(schedule), 50, "is a program, which runs as it is"),
        (moved, True, "is a program, which runs as it is"),
        (moved.schedule(), 50, "moves activations already: leave offload= out"),
        (schedule, 120, "at most 100"),
        (schedule, (50, 50), "2 percentages for 3 ranks"),
    ]:
        with pytest.raises((ScheduleError, PassError, PipelineError), match=message):
            launch(lambda table=table, choice=choice: Pipeline(model, table, offload=choice), 3)
    for choice in (False, 0):
        tables = launch(lambda choice=choice: Pipeline(model, schedule, loss_fn=functional.mse_loss, offload=choice).table, 3)
        assert all(table == schedule for table in tables)


def test_evaluation_moves_nothing() -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=3, microbatches=6), offload=100)
    model = nn.Sequential(*(block() for _ in range(3)))
    x = torch.randn(12, WIDTH)

    def on_rank() -> Any:
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss)
        return pipe.eval_step(x, target=x).loss, pipe.program(training=False).rows.is_kind(Kind.OFFLOAD).any()

    assert not any(moves for _, moves in launch(on_rank, 3))


def test_recorded_timelines_show_the_copies() -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=3, microbatches=6), offload=100)
    model, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(12, WIDTH)

    def on_rank() -> Any:
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss, record=True)
        pipe.step(x, target=x)
        return pipe.step(x, target=x).timeline

    timeline = launch(on_rank, 3)[0]
    rows = timeline.table.rows
    copies = rows.group[rows.is_kind(Kind.OFFLOAD, Kind.RELOAD)]
    assert len(copies)
    assert (timeline.end[copies] > timeline.start[copies]).all()
    assert (timeline.collective_end[copies] > timeline.collective_start[copies]).all()
    assert timeline.costs.host_latency > 0


def test_cuda_graphs_are_refused() -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=3, microbatches=6), offload=100)
    model, x = nn.Sequential(*(block() for _ in range(3))), torch.randn(12, WIDTH)
    with pytest.raises((PipelineError, ScheduleError), match=r"fixed addresses|graphs=True"):
        launch(lambda: Pipeline(model, program, loss_fn=functional.mse_loss, graphs=True).step(x, target=x), 3)


# Memory ---------------------------------------------------------------------------------------------------------------

LAYERS, ROWS, WIDE, COUNT = 80, 2048, 16, 6
"""Many layers and rows, so that gradients, their backups and temporary tensors are small beside what is saved."""


def deep() -> nn.Module:
    """Saves one tensor per layer: the input of each linear map is the output of the function before it."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDE, WIDE), nn.Tanh())))


def one_rank(split: bool) -> Schedule:
    """Two stages on one rank, all forwards first."""
    row = [f"{stage}F{microbatch}" for microbatch in range(COUNT) for stage in range(2)]
    for microbatch in range(COUNT):
        for stage in (1, 0):
            row += [f"{stage}I{microbatch}", f"{stage}W{microbatch}"] if split else [f"{stage}B{microbatch}"]
    return Schedule.from_actions([row], Placement.looped(1, 2))


def count_saved(stage: nn.Module, value: Tensor) -> int:
    """The bytes that a forward saves, but for parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    with watch_saved_tensors() as saved:
        stage(value)
    return sum(size for key, size in saved.items() if key not in parameters)


@pytest.mark.parametrize(("share", "split"), [(0, False), (50, True), (100, False), (100, True)])
def test_the_measured_peak_is_within_three_percent_of_the_predicted(share: int, split: bool) -> None:
    torch.manual_seed(0)
    stages = [deep(), deep()]
    schedule = one_rank(split)
    program: Program = ps.lower(schedule, offload=Offload(share)) if share else ps.lower(schedule)
    value = torch.randn(ROWS, WIDE)
    activation = count_saved(stages[0], value) - value.nbytes, count_saved(stages[1], value.clone().requires_grad_())
    stash = [LAYERS * value.nbytes * 2 if split else 0.0] * 2  # the inputs of the linear maps, and the gradients of their outputs
    predicted = ps.verify(program, costs=ps.Costs(activation=activation, weight_stash=stash)).peak_memory
    x, y = torch.randn(COUNT * ROWS, WIDE), torch.randn(COUNT * ROWS, WIDE)
    peak = measure_peak(nn.Sequential(*stages), program, x, y)
    assert predicted is not None
    assert peak == pytest.approx(predicted[0], rel=0.03)
    if share == 100:
        assert peak < 0.6 * COUNT * sum(activation)


def measure_peak(model: nn.Module, program: Program, x: Tensor, y: Tensor, **options: Any) -> int:
    """The most bytes that rank 0 holds during a step, at any operator, besides parameters, gradients, the batch and buffers of the host."""

    def on_rank() -> int:
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss, **options)
        pipe.step(x, target=y)  # buffers of the host are kept from here on
        moves = pipe._executor(program.microbatches, True).compute.moves
        with Live() as live:
            kept = [x, y, *pipe.parameters(), *(parameter.grad for parameter in pipe.parameters() if parameter.grad is not None)]
            kept += [] if moves is None else [buffer for free in moves.memory._free.values() for buffer, _ in free]
            live.forget(*kept)
            pipe.step(x, target=y)
            return live.peak

    return launch(on_rank, program.ranks)[0]


# Memory of slices -----------------------------------------------------------------------------------------------------

TOKENS, SLICES, BLOCKS = 2048, 4, 32


class GroupedMixing(nn.Module):
    """Mixes tokens by sums over keys and values, whose heads are shared as in grouped-query attention; saves both as attention does."""

    sliceable = True

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.keys, self.values = nn.Linear(WIDE, keys), nn.Linear(WIDE, keys)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = prefix_of(self).extend(self.keys(x), self.values(x), dim=1)
        mixed = (keys * values).mean(1, keepdim=True)
        return self.out(torch.tanh(self.queries(x)) * mixed.repeat(1, 1, WIDE // mixed.shape[2]))


def sliced_order(ahead: int, count: int) -> Schedule:
    """The order of rank `ahead` from the end of seq1f1b: so many slices beyond one microbatch are in flight."""
    forwards = [f"0F{unit // SLICES}.{unit % SLICES}" for unit in range(count * SLICES)]
    backwards = [f"0B{microbatch}.{part}" for microbatch in range(count) for part in reversed(range(SLICES))]
    row, rest = forwards[: SLICES + ahead], forwards[SLICES + ahead :]
    for place, backward in enumerate(backwards):
        row += [backward, *rest[place : place + 1]]
    return Schedule.from_actions([row], slices=SLICES)


@pytest.mark.parametrize(
    ("share", "keys", "dtype"),
    [
        (0, WIDE // 4, torch.float32),
        (50, WIDE, torch.float32),
        (100, WIDE, torch.float32),
        (100, WIDE // 4, torch.float32),
        (0, WIDE, torch.bfloat16),
        (100, WIDE, torch.bfloat16),
    ],
)
def test_the_measured_peak_of_slices_is_within_three_percent_of_the_predicted(share: int, keys: int, dtype: torch.dtype) -> None:
    """Two microbatches in flight: keys, values and their gradients stay on the device, and only for as long as they are needed."""
    torch.manual_seed(0)
    model, schedule = nn.Sequential(*(GroupedMixing(keys) for _ in range(BLOCKS))).to(dtype), sliced_order(ahead=2, count=2)
    program: Program = ps.lower(schedule, offload=Offload(share)) if share else ps.lower(schedule)
    value = torch.randn(1, TOKENS, WIDE, dtype=dtype)
    kept = BLOCKS * 2 * keys * TOKENS * dtype.itemsize / SLICES
    own = (count_saved(model, value) - value.nbytes) / SLICES - kept + value.nbytes / SLICES  # with the output, which the loss saves
    costs = ps.Costs(activation=own, kept=kept, kept_gradients=kept * 4 / dtype.itemsize)  # gradients are summed in 32 bits
    predicted = ps.verify(program, costs=costs).peak_memory
    assert predicted is not None
    x, y = torch.randn(2, 2, TOKENS, WIDE, dtype=dtype)
    peak = measure_peak(nn.ModuleList([model]), program, x, y)
    assert peak == pytest.approx(predicted[0], rel=0.03)
