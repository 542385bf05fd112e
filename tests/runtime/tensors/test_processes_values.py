"""What stages in different processes pass to each other: trees, tensors of every kind, and missing gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from ir.naive import one_message_per_edge
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.ir.program import Program
from penstock.runtime import Pipeline, StepResult
from penstock.runtime.launch.workers import Workers
from runtime.branches import branch
from runtime.distributed import Grads, Stage, local_grads, together
from runtime.models import assert_all_equal, assert_equal, assert_same_results, blocks, gradients

Forward = Callable[..., Any]
STEPS, COUNT = 2, 3


class Named(NamedTuple):
    """A class that workers know by value only, as they do those of a script or notebook."""

    value: Tensor
    note: Any


def chained(stages: Sequence[nn.Module], x: Any) -> Any:
    """The stages one after the other; a tuple is several arguments."""
    value = stages[0](x)
    for stage in stages[1:]:
        value = stage(*value) if type(value) is tuple else stage(value)
    return value


def looped(stages: nn.ModuleList, pieces: Sequence[tuple[Any, Tensor]], run: Forward = chained) -> tuple[list[Tensor], Grads]:
    """Each microbatch's loss, and the gradients, of some steps over the same microbatches without a pipeline."""
    again = copy.deepcopy(stages)
    for _ in range(STEPS):
        losses = []
        for x, y in pieces:
            loss = functional.mse_loss(run(again, x), y)
            (loss * (len(y) / sum(len(each) for _, each in pieces))).backward()
            losses.append(loss.detach())
    return losses, gradients(again)


def assert_parity(
    workers: Workers,
    stages: nn.ModuleList,
    schedule: str | ps.Schedule | Program = "1f1b",
    run: Forward = chained,
    ranks: int | None = None,
    tolerance: float = 0.0,
) -> None:
    """Two steps on processes, the second with forms that are known, give the loop's losses and gradients to the last bit.

    A tolerance is for models in which a gradient is the sum of several that autograd may add in another order.
    """
    x, y = torch.randn(7, 6), torch.randn(7, 6)

    def train() -> tuple[StepResult, Grads]:
        pipe = Pipeline(stages, schedule=schedule, microbatches=COUNT, loss_fn=functional.mse_loss)
        for _ in range(STEPS):
            result = pipe.step(x, target=y)
        return result, local_grads(pipe)

    found = workers.run(train, ranks=ranks or len(stages))
    losses, wanted = looped(stages, list(zip(x.tensor_split(COUNT), y.tensor_split(COUNT), strict=True)), run)
    assert_same_results([result for result, _ in found])
    assert_all_equal(found[0][0].losses, losses)
    whole = together([grads for _, grads in found], list(wanted))
    for name, grad in wanted.items():
        torch.testing.assert_close(whole[name], grad, rtol=tolerance, atol=tolerance, msg=name)


# Trees ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_trees_of_tensors_and_plain_values(workers: Workers, schedule: str) -> None:
    """Dicts, lists, tuples and named tuples of the script itself; None, numbers and text beside tensors."""

    def start(linear: nn.Linear, x: Tensor) -> Any:
        return {
            "x": linear(x),
            "more": [x, (x.sum(), None)],
            "rows": len(x),
            "name": "start",
            "scale": 0.5,
            "table": Named(linear(x + 1), None),
        }

    def middle(linear: nn.Linear, made: dict[str, Any]) -> Any:
        first, (total, nothing) = made["more"]
        assert (nothing, made["name"], made["rows"]) == (None, "start", len(first))
        assert type(made["table"]) is Named
        return linear(made["x"]) * made["scale"] + total, made["table"]._replace(note={"rows": made["rows"]}), None

    def end(linear: nn.Linear, x: Tensor, table: Named, nothing: None) -> Tensor:
        assert nothing is None
        return linear(x) + table.value * table.note["rows"]

    assert_parity(workers, nn.ModuleList(Stage(body) for body in (start, middle, end)), schedule)


def test_plain_values_that_change(workers: Workers) -> None:
    """A number that is another for each forward, and an object that is changed in place, are told as they are."""
    seen: Counter[str] = Counter()

    def start(linear: nn.Linear, x: Tensor) -> Any:
        seen["forwards"] += 1
        return linear(x), seen["forwards"] / 8, seen

    def end(linear: nn.Linear, x: Tensor, factor: float, counts: Counter[str]) -> Tensor:
        return linear(x) * factor + counts["forwards"]

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]))


def test_tree_that_changes_its_structure(workers: Workers) -> None:
    """Now a tensor, now a dict, now a longer list; with a gradient and without."""
    calls: Counter[str] = Counter()

    def start(linear: nn.Linear, x: Tensor) -> Any:
        calls["start"] += 1
        made = linear(x)
        looks = (made, {"x": made, "y": x}, [made, x, x], {"x": made.detach(), "y": made}, [x, made * 2, None])
        return looks[calls["start"] % len(looks)]

    def end(linear: nn.Linear, given: Any) -> Tensor:
        parts = [given] if isinstance(given, Tensor) else list(given.values() if isinstance(given, dict) else given)
        return linear(sum(part for part in parts if part is not None))

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]))


# Tensors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_tensors_that_are_not_contiguous(workers: Workers, schedule: str) -> None:
    """Transposed, expanded, spread and cut out; a tensor that is dense keeps its strides, so what is computed from it is the same."""

    def start(linear: nn.Linear, x: Tensor) -> Any:
        made = linear(x)
        wide = linear(torch.cat([x, x + 1]))
        return made.t(), made[:, ::2], made[:1].expand(len(x), 6), wide[1:-1, 2:4], wide.view(-1, 3, 4).transpose(0, 2)

    def end(linear: nn.Linear, flipped: Tensor, spread: Tensor, expanded: Tensor, inner: Tensor, folded: Tensor) -> Tensor:
        assert flipped.stride() == (1, 6)
        return linear(flipped.t()) + expanded * spread.sum() + inner.mean() + folded.sum(0).sum(-1)[0] * folded.std()

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]), schedule, tolerance=1e-5)


def test_tensors_of_every_type(workers: Workers) -> None:
    types = [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64]

    def start(linear: nn.Linear, x: Tensor) -> Any:
        made = linear(x)
        turned = torch.view_as_complex(made.reshape(-1, 3, 2)).conj()
        return {"turned": turned, "typed": [made.to(dtype) for dtype in types], "number": made.sum().to(torch.bfloat16)}

    def end(linear: nn.Linear, made: dict[str, Any]) -> Tensor:
        assert [each.dtype for each in made["typed"]] == types
        assert [each.requires_grad for each in made["typed"]] == [True] * 3 + [False] * 4 + [True]
        total = sum(each.real.float() for each in made["typed"])
        return linear(total) + torch.view_as_real(made["turned"].resolve_conj()).reshape(-1, 6) * made["number"].float()

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]))


def test_tensors_without_elements(workers: Workers) -> None:
    def start(linear: nn.Linear, x: Tensor) -> Any:
        made = linear(x)
        return made, made[:0], x[:0].t(), torch.empty(0, 0), made.sum()

    def end(linear: nn.Linear, x: Tensor, none: Tensor, flat: Tensor, nothing: Tensor, total: Tensor) -> Tensor:
        assert [list(each.shape) for each in (none, flat, nothing)] == [[0, 6], [6, 0], [0, 0]]
        return linear(torch.cat([none, x])) + total + none.sum() + flat.sum() + nothing.sum()

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]))


def test_microbatch_without_rows(workers: Workers) -> None:
    """An empty microbatch among others: nothing is computed from it, and its message has no bytes to carry."""
    stages = blocks(2)
    pieces = [torch.randn(rows, 6) for rows in (2, 0, 3)]

    def train() -> tuple[StepResult, Grads]:
        pipe = Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=_summed, loss_reduction="sum")
        for _ in range(STEPS):
            result = pipe.step_list(pieces, pieces)
        return result, local_grads(pipe)

    found = workers.run(train, ranks=2)
    again = copy.deepcopy(stages)
    losses = []
    for _ in range(STEPS):
        losses = [_summed(again(piece), piece) for piece in pieces]
        for loss in losses:
            loss.backward()
    assert_all_equal(found[0][0].losses, [loss.detach() for loss in losses])
    for name, grad in together([grads for _, grads in found], [name for name, _ in stages.named_parameters()]).items():
        assert_equal(grad, again.get_parameter(name).grad, name)


def _summed(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().sum()


def test_input_changed_in_place(workers: Workers) -> None:
    """The receiver may write into what it was sent; the sender's own is not touched."""

    def start(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x).exp()  # whose backward needs its output as it was

    def end(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x.mul_(0.5).tanh_())

    def run(stages: Sequence[nn.Module], x: Tensor) -> Any:
        return stages[1](stages[0](x).clone())

    assert_parity(workers, nn.ModuleList([Stage(start), Stage(end)]), run=run)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_tensor_that_cannot_be_sent(workers: Workers) -> None:
    """It is refused with a reason on every rank, and the next step works."""
    sparse = {"now": True}

    def start(linear: nn.Linear, x: Tensor) -> Tensor:
        made = linear(x)
        return made.to_sparse() if sparse["now"] else made

    stages = nn.ModuleList([Stage(start), Stage(lambda linear, x: linear(x))])
    x = torch.randn(6, 6)

    def train() -> tuple[str, Any]:
        pipe = Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss, deadline=20.0)
        try:
            pipe.step(x, target=x)
        except PipelineError as error:
            sparse["now"] = False
            return str(error), pipe.step(x, target=x).loss
        return "", None

    found = workers.run(train, ranks=2)
    for text, loss in found:
        assert (
            "ScheduleError: a stage returns a tensor of the layout torch.sparse_coo, which cannot be sent as it is: return a dense" in text
        )
        assert_equal(loss, found[0][1])


# Gradients that are not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (3,), (0, 2)])
def test_frozen_stages(workers: Workers, frozen: tuple[int, ...], schedule: str) -> None:
    stages = nn.ModuleList(blocks(4))
    for stage in frozen:
        stages[stage].requires_grad_(False)
    assert_parity(workers, stages, schedule)


def test_stage_that_is_frozen_later(workers: Workers) -> None:
    """Messages want a gradient in one step and none in the next."""
    stages, x = nn.ModuleList(blocks(3)), torch.randn(6, 6)

    def train() -> Grads:
        pipe = Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
        for frozen in (False, True, True, False):
            stages[0].requires_grad_(not frozen)
            pipe.step(x, target=x)
        return local_grads(pipe)

    found = together(workers.run(train, ranks=3), [name for name, _ in stages.named_parameters()])
    again = copy.deepcopy(stages)
    for frozen in (False, True, True, False):
        again[0].requires_grad_(not frozen)
        for piece in x.tensor_split(3):
            (functional.mse_loss(chained(again, piece), piece) / 3).backward()
    for name, parameter in again.named_parameters():
        assert_equal(found[name], parameter.grad, name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_unused_outputs(workers: Workers, schedule: str) -> None:
    """Their gradients are None, sometimes of one and sometimes of the other; a parameter that feeds only one has none then."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.a(x), self.b(x), self.c(x)

    calls: Counter[str] = Counter()

    def end(linear: nn.Linear, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        calls["end"] += 1
        return linear(a if calls["end"] % 3 else b)

    stages = nn.ModuleList([Two(), Stage(end)])
    assert_parity(workers, stages, schedule)


def test_output_without_any_gradient(workers: Workers) -> None:
    """The last stage cuts the graph for one microbatch: an empty gradient goes back for it."""

    def end(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x.detach() if len(x) == 3 else x)

    assert_parity(workers, nn.ModuleList([Stage(lambda linear, x: linear(x)), Stage(end)]))


# Edges that skip stages -----------------------------------------------------------------------------------------------


def _skipping(table: ps.Schedule) -> Forward:
    def run(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
        made: dict[int, dict[int, Any]] = {}
        for number, stage in enumerate(stages):
            output = stage(*([made[other][number] for other in sorted(table.graph.inputs_of(number), reverse=True)] or [x]))
            made[number] = branch(output, table, number, 0)
        return output

    return run


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zb-h1", 4), ("interleaved-1f1b", 2), ("zbv", 2)])
def test_edges_that_skip_stages(workers: Workers, name: str, ranks: int) -> None:
    """From each stage to those farther off: on another rank, or on the same with others between."""
    stages = nn.ModuleList(Stage(lambda linear, *given: torch.tanh(linear(sum(given)))) for _ in range(4))
    table = ps.schedule(name, ranks=ranks, microbatches=COUNT, graph=StageGraph.chain(4, [(0, 2), (0, 3), (1, 3)]))
    assert_parity(workers, stages, table, _skipping(table), ranks)


SHARING = StageGraph.chain(6, [(0, 3), (0, 4), (0, 5), (2, 5)])


@pytest.mark.parametrize(
    ("name", "ranks", "graph"),
    [
        ("interleaved-1f1b", 2, SHARING),
        ("interleaved-1f1b", 3, SHARING),
        ("zbv", 3, SHARING),
        ("dualpipe-v", 3, SHARING),
        ("interleaved-zb", 3, SHARING),
    ],
)
def test_readers_that_share_a_message(workers: Workers, name: str, ranks: int, graph: StageGraph) -> None:
    """Stages of one rank read one tensor of another process; what goes back is the sum of their gradients."""
    stages = nn.ModuleList(Stage(lambda linear, *given: torch.tanh(linear(sum(given)))) for _ in range(6))
    chunks = {"chunks": 6 // ranks} if name.startswith("interleaved") else {}
    table = ps.schedule(name, ranks=ranks, microbatches=COUNT, graph=graph, **chunks)
    program = ps.lower(table)
    crossing = sum(table.placement.rank_of(a) != table.placement.rank_of(b) for a, b in graph.edges)
    assert sum(a.kind is ps.Kind.SEND_F for row in program for a in row) < crossing * COUNT
    assert_parity(workers, stages, table, _skipping(table), ranks)


def test_a_shared_message_is_not_changed_for_its_other_reader(workers: Workers) -> None:
    """Stage 1 changes its input in place: refused, and what stage 3 reads of the same message is still whole in a step that is not."""

    def changes(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x.mul_(2))

    def keeps(linear: nn.Linear, x: Tensor, numbers: set[int] | None = None) -> Tensor:
        return linear(x)

    table = ps.schedule("interleaved-1f1b", ranks=2, microbatches=COUNT, chunks=2, graph=StageGraph.chain(4, [(0, 3)]))
    stages = nn.ModuleList([Stage(keeps), Stage(changes), Stage(keeps), Stage(lambda linear, *given: linear(sum(given)))])

    def train() -> None:
        Pipeline(stages, schedule=table, loss_fn=functional.mse_loss).step(torch.randn(7, 6), target=torch.randn(7, 6))

    with pytest.raises(PipelineError, match="stage 1 changes its input in place, but stage 3 reads the same value"):
        workers.run(train, ranks=2)

    def spoils(linear: nn.Linear, given: tuple[Tensor, set[int]]) -> Tensor:
        given[1].clear()
        return linear(given[0])

    def ends(linear: nn.Linear, x: Tensor, given: tuple[Tensor, set[int]]) -> Tensor:
        return linear(x) * given[0] * len(given[1])

    bodies = (lambda linear, x: [linear(x), {1, 2, 3}], spoils, keeps, ends)

    def run(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
        value, numbers = stages[0](x)
        return stages[3](stages[2](stages[1]([value, set(numbers)])), [value, numbers])

    assert_parity(workers, nn.ModuleList(Stage(body) for body in bodies), table, run, 2)


@pytest.mark.parametrize(("name", "ranks"), [("interleaved-1f1b", 2), ("zbv", 3)])
def test_a_program_with_one_message_per_reader(workers: Workers, name: str, ranks: int) -> None:
    """Files of older versions run as they are: every gradient comes by itself, in autograd's order."""
    stages = nn.ModuleList(Stage(lambda linear, *given: torch.tanh(linear(sum(given)))) for _ in range(6))
    chunks = {"chunks": 6 // ranks} if name.startswith("interleaved") else {}
    table = ps.schedule(name, ranks=ranks, microbatches=COUNT, graph=SHARING, **chunks)
    program = one_message_per_edge(table)
    assert program != ps.lower(table)

    def run(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for number, stage in enumerate(stages):
            made.append(stage(*([made[other] for other in sorted(SHARING.inputs_of(number), reverse=True)] or [x])))
        return made[-1]

    assert_parity(workers, stages, program, run, ranks)
