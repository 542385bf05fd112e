"""A vocabulary spread over processes: losses and gradients of the whole model, by hand and under a proved program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.vocabulary import Vocabulary, spread_vocabulary
from penstock.runtime.launch.workers import Workers
from penstock.runtime.parallel.collective_lane import ProcessLane
from penstock.runtime.parallel.vocabulary import SpreadEmbedding, SpreadHead, split_rows

VOCABULARY, HIDDEN, TOKENS, UNITS = 11, 6, 5, 3
IGNORED = -100


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_tokens(seed: int, count: int) -> Tensor:
    return torch.randint(VOCABULARY, (UNITS, count), generator=torch.Generator().manual_seed(seed))


def assert_equal(found: Tensor, wanted: Tensor, digits: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=digits, atol=digits)


def test_rows_are_shared_evenly() -> None:
    assert split_rows(11, 4) == [3, 3, 3, 2]
    with pytest.raises(PipelineError, match="3 rows cannot be spread over 4 ranks"):
        split_rows(3, 4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("scale", "dtype", "digits"), [(1.0, torch.float64, 1e-12), (400.0, torch.float64, 1e-9), (1.0, torch.float32, 1e-5)]
)
def test_the_head_has_the_numbers_of_the_whole(workers: Workers, ranks: int, scale: float, dtype: torch.dtype, digits: float) -> None:
    """Also with logits whose exponentials overflow; one target is ignored, and tokens count differently."""
    hidden, weight, bias = (
        draw(0, UNITS, TOKENS, HIDDEN, dtype=dtype) * scale,
        draw(1, VOCABULARY, HIDDEN, dtype=dtype),
        draw(2, VOCABULARY),
    )
    targets, counts = draw_tokens(3, TOKENS), torch.arange(1, TOKENS + 1, dtype=dtype) / 7
    targets[1, 2] = IGNORED

    def run() -> dict[str, Any]:
        with ProcessLane(dist.new_group()) as lane:
            head = SpreadHead(weight, bias.to(dtype), lane=lane, owner=ranks - 1)
            last = lane.rank == head.owner
            for unit in range(UNITS):  # all in progress at once, in another order than they are finished
                head.join_broadcast(unit, hidden[unit] if last else torch.full_like(hidden[unit], torch.nan))
            for unit in reversed(range(UNITS)):
                head.run_share(unit, targets[unit], counts)
                head.join_combine(unit)
            losses = [head.take_losses(unit) for unit in range(UNITS)]
            gradients = [head.take_input_gradient(unit) for unit in range(UNITS)] if last else []
            for unit in (1, 0, 2):
                head.add_weight_gradients(unit)
            assert head.bias is not None
            return {"losses": losses, "hidden": gradients, "weight": head.weight.grad, "bias": head.bias.grad}

    found = workers.run(run, ranks=ranks)
    x, w, b = (value.clone().to(dtype).requires_grad_() for value in (hidden, weight, bias))
    losses = functional.cross_entropy((x @ w.t() + b).flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    (losses.view(UNITS, TOKENS) * counts).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert b.grad is not None
    for of_rank in found:
        assert_equal(torch.stack(of_rank["losses"]), losses.detach().view(UNITS, TOKENS), digits)
    assert_equal(torch.stack(found[-1]["hidden"]), x.grad, digits)
    assert_equal(torch.cat([of_rank["weight"] for of_rank in found]), w.grad, digits * scale)
    assert_equal(torch.cat([of_rank["bias"] for of_rank in found]), b.grad, digits)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_embedding_has_the_numbers_of_the_whole(workers: Workers, ranks: int) -> None:
    weight, tokens, gradients = draw(0, VOCABULARY, HIDDEN), draw_tokens(1, TOKENS), draw(2, UNITS, TOKENS, HIDDEN)
    padding = int(tokens[0, 0])

    def run() -> dict[str, Any]:
        with ProcessLane(dist.new_group()) as lane:
            embedding = SpreadEmbedding(weight, lane=lane, owner=0, padding_idx=padding)
            for unit in range(UNITS):
                embedding.run_share(unit, tokens[unit])
                embedding.join_combine(unit)
            outputs = [embedding.take_output(unit) for unit in range(UNITS)] if lane.rank == 0 else []
            for unit in range(UNITS):
                embedding.join_broadcast(unit, gradients[unit] if lane.rank == 0 else torch.empty_like(gradients[unit]))
            for unit in reversed(range(UNITS)):
                embedding.add_weight_gradients(unit)
            return {"outputs": outputs, "weight": embedding.weight.grad}

    found = workers.run(run, ranks=ranks)
    whole = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding, dtype=torch.float64)
    whole.weight = nn.Parameter(weight.clone())
    made = whole(tokens)
    made.backward(gradients)
    assert whole.weight.grad is not None
    assert_equal(torch.stack(found[0]["outputs"]), made.detach())
    assert_equal(torch.cat([of_rank["weight"] for of_rank in found]), whole.weight.grad)


def test_mistakes_are_told(workers: Workers) -> None:
    def run() -> list[str]:
        told = []
        with ProcessLane(dist.new_group()) as lane:
            head = SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=lane, owner=1)
            head.join_broadcast(0, draw(1, TOKENS, HIDDEN))
            attempts = [
                lambda: SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=lane, owner=2),
                lambda: head.join_broadcast(0, draw(1, TOKENS, HIDDEN)),
                lambda: head.run_share(0, torch.zeros(TOKENS + 1, dtype=torch.int64)),
            ]
            attempts += [lambda: head.take_input_gradient(0)] if lane.rank == 0 else []
            for attempt in attempts:
                try:
                    attempt()
                except PipelineError as error:
                    told.append(str(error))
        return told

    first, second = workers.run(run, ranks=2)
    assert (
        first[:3]
        == second
        == [
            "rank 2 has the last stage, but the group has ranks 0 to 1",
            "microbatch 0 of the spread head is in progress already",
            "microbatch 0 has 5 tokens, but 6 targets",
        ]
    )
    assert first[3] == "the gradient of the head's input is on rank 1, and this is rank 0"


# A proved program -----------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """An embedding, one block per stage, and a head."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double() for _ in range(stages))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Interpreter:
    """Runs one rank's actions one after the other, with messages by torch and collectives in the background."""

    def __init__(self, program: Program, model: Decoder, tokens: Tensor, targets: Tensor) -> None:
        self.program, self.rank = program, dist.get_rank()
        self.blocks, self.tokens, self.targets, self.last = model.blocks, tokens, targets, program.stages - 1
        self.lane = ProcessLane(dist.new_group())
        first, last = (program.placement.rank_of(stage, 0) for stage in (0, self.last))
        self.embedding = SpreadEmbedding(model.embedding.weight, lane=self.lane, owner=first)
        self.head = SpreadHead(model.head.weight, lane=self.lane, owner=last)
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.sent: list[Any] = []

    def run(self) -> dict[str, Any]:
        for action in self.program[self.rank]:
            self._run(action.kind, action.stage, action.microbatch or 0)
        for work, _ in self.sent:
            work.wait()
        self.lane.close()
        own = self.program.placement.stages_of(self.rank)
        blocks = {name: value.grad for stage in own for name, value in self.blocks[stage].named_parameters(f"blocks.{stage}")}
        return {**blocks, "embedding": self.embedding.weight.grad, "head": self.head.weight.grad, "losses": self.losses}

    def _run(self, kind: Kind, stage: int, unit: int) -> None:
        layer: Any = self.head if stage == self.last else self.embedding
        match kind:
            case Kind.F:
                value = self.embedding.take_output(unit) if stage == 0 else self.inputs[stage, unit]
                self.inputs[stage, unit] = value.detach().requires_grad_()
                self.outputs[stage, unit] = self.blocks[stage](self.inputs[stage, unit])
                if stage < self.last and self._find_rank(stage + 1, unit) == self.rank:
                    self.inputs[stage + 1, unit] = self.outputs[stage, unit]
            case Kind.B:
                gradient = self.head.take_input_gradient(unit) if stage == self.last else self.gradients.pop((stage, unit))
                self.outputs[stage, unit].backward(gradient.view_as(self.outputs[stage, unit]))
                back = self.inputs[stage, unit].grad
                assert back is not None
                self.gradients[stage - 1, unit] = back
            case Kind.SEND_F | Kind.SEND_B:
                value = self.outputs[stage, unit].detach() if kind is Kind.SEND_F else self.gradients[stage - 1, unit]
                other = stage + 1 if kind is Kind.SEND_F else stage - 1
                work = dist.isend(value, self._find_rank(other, unit), tag=self._tag(other, kind is Kind.SEND_F, unit))
                self.sent.append((work, value))
            case Kind.RECV_F | Kind.RECV_B:
                other = stage - 1 if kind is Kind.RECV_F else stage + 1
                value = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
                dist.recv(value, self._find_rank(other, unit), tag=self._tag(stage, kind is Kind.RECV_F, unit))
                (self.inputs if kind is Kind.RECV_F else self.gradients)[stage, unit] = value
            case Kind.S:
                layer.run_share(unit, self.tokens[unit]) if stage == 0 else layer.run_share(unit, self.targets[unit], 1 / TOKENS)
            case Kind.T:
                if stage == self.last:
                    self.losses[unit] = self.head.take_losses(unit)
                layer.add_weight_gradients(unit)
            case Kind.COMBINE:
                layer.join_combine(unit)
            case Kind.BROADCAST:
                empty = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
                made = self.outputs.get((stage, unit), empty) if stage == self.last else self.gradients.get((-1, unit), empty)
                layer.join_broadcast(unit, made)

    def _find_rank(self, stage: int, unit: int) -> int:
        return self.program.placement.rank_of(stage, unit)

    def _tag(self, stage: int, forward: bool, unit: int) -> int:
        return (stage * UNITS + unit) * 2 + forward


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("1f1b", 4), ("interleaved-1f1b", 2)])
def test_a_proved_program_trains_the_whole_model(workers: Workers, name: str, ranks: int) -> None:
    schedule = ps.schedule(name, ranks=ranks, microbatches=4 if name != "1f1b" else UNITS)
    units = schedule.microbatches
    program = ps.lower(spread_vocabulary(schedule, vocabulary=Vocabulary(ahead=1)))
    ps.verify(program)
    tokens, targets = (torch.randint(VOCABULARY, (units, TOKENS), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    model = Decoder(schedule.stages)

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        return Interpreter(program, model, tokens, targets).run()

    found = workers.run(run, ranks=ranks)
    losses = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(units, TOKENS)
    losses.mean(dim=1).sum().backward()
    for of_rank in found:
        for unit in range(units):
            assert_equal(of_rank["losses"][unit], losses[unit].detach())
        for key, value in of_rank.items():
            if key.startswith("blocks"):
                assert_equal(value, model.get_parameter(key).grad)  # type: ignore[arg-type]
    for key in ("embedding", "head"):
        assert_equal(torch.cat([of_rank[key] for of_rank in found]), model.get_parameter(f"{key}.weight").grad)  # type: ignore[arg-type]
