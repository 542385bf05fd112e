"""Sharded stages: gathered and freed exactly where the program says so, reduced once, and simulated as they run."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import penstock as ps
from composition.parallel import Outcome, batch, check, counted, mesh_of, perceptrons, schedule, split_over
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.live import observe_actions
from runtime.models import by_batch

SIZES = (6, 7)


def actions(program: ps.Program, rank: int) -> Counter[Kind]:
    return Counter(action.kind for action in program[rank])


@pytest.mark.parametrize(
    ("name", "residency", "lookahead"),
    [("gpipe", None, 1), ("1f1b", 1, 0), ("interleaved-1f1b", 1, 3), ("interleaved-zb", None, 1), ("zbv", None, 0), ("zbv", 1, 1)],
)
def test_no_gather_outside_of_the_program(workers: Workers, name: str, residency: int | None, lookahead: int) -> None:
    """As many gathers as UNSHARDs, as many reductions as REDUCE_GRADs, in two steps, an evaluation and one more step."""
    stages = schedule(name, 2).stages
    model, (x, y) = perceptrons(stages), batch(13)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(
            copy.deepcopy(model),
            schedule(name, 2),
            loss_fn=functional.mse_loss,
            mesh=mesh,
            shard=True,
            residency=residency,
            lookahead=lookahead,
        )
        mine, target = split_over(mesh, x, y, SIZES)
        found = []
        for act in (pipe.step, pipe.step, pipe.eval_step, pipe.step):
            for parameter in pipe.parameters():
                parameter.grad = None
            with counted() as calls:
                result = act(mine, target=target)
            wanted = actions(pipe.program(training=act != pipe.eval_step), pipe.rank)
            found.append((dict(calls), wanted[Kind.UNSHARD], wanted[Kind.REDUCE_GRAD]))
        return found, Outcome.of(pipe, result)

    found = workers.run(train)
    for calls, _ in found:
        for number, (counts, unshards, reduces) in enumerate(calls):
            evaluates = number == 2
            assert unshards >= stages // 2
            assert reduces == (0 if evaluates else stages // 2)
            assert counts == {"all_gather": unshards} | ({} if evaluates else {"reduce_scatter": reduces})
    if residency == 1 and stages > 2:
        assert all(unshards > stages // 2 for calls, _ in found for _, unshards, _ in calls[:2])
    check([outcome for _, outcome in found], by_batch(model, x, y))


def test_hybrid_shards_are_reduced_once(workers: Workers) -> None:
    """Over the shards by a reduce-scatter, over their copies by an all-reduce, each once for each stage."""
    name = "zbv"
    stages = schedule(name, 1).stages
    model, (x, y) = perceptrons(stages), batch(24)

    def train() -> Any:
        mesh = mesh_of(pp=1, dp_replicate=2, dp_shard=2)
        pipe = Pipeline(copy.deepcopy(model), schedule(name, 1), loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        mine, target = split_over(mesh, x, y, (6, 5, 7, 6))
        with counted() as calls:
            result = pipe.step(mine, target=target)
        return dict(calls), Outcome.of(pipe, result)

    found = workers.run(train)
    for calls, _ in found:
        assert calls == {"all_gather": stages, "reduce_scatter": stages, "all_reduce": stages}
    check([outcome for _, outcome in found], by_batch(model, x, y))


def test_parameters_are_held_as_the_simulator_says(workers: Workers) -> None:
    """After every action of a step, the stages whose parameters this process has in full are those of the simulated memory."""
    name, residency = "interleaved-1f1b", 1
    program = ps.lower(schedule(name, 2), fsdp=True, residency=residency, lookahead=2)
    model, (x, y) = perceptrons(program.stages), batch(13)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(
            copy.deepcopy(model), schedule(name, 2), loss_fn=functional.mse_loss, mesh=mesh, shard=True, residency=residency, lookahead=2
        )
        mine, target = split_over(mesh, x, y, SIZES)
        pipe.step(mine, target=target)
        executor, held = pipe._executor(4, True), []
        full_size = sum(p.numel() for p in model[0].parameters())

        def look(at: int) -> None:
            sizes = [sum(p.numel() for p in stage.module.parameters() if type(p) is nn.Parameter) for stage in pipe.stages.values()]
            begun = [index for index, each in pipe.data.sharded.items() if each.pending]
            held.append((str(executor.actions[at]), sum(size == full_size for size in sizes) + len(begun)))

        observe_actions(executor, look)
        pipe.step(mine, target=target)
        assert pipe.program() == program
        return pipe.rank, held

    costs = ps.Costs(activation=0.0, parameters=1.0, shard=0.0)
    timeline = ps.simulate(program, costs)
    for rank, held in workers.run(train):
        assert max(count for _, count in held) == residency == timeline.peak_memory[rank]
        unsharded: set[int] = set()
        for action, (text, count) in zip(program[rank], held, strict=True):
            if action.kind is Kind.UNSHARD:
                unsharded.add(action.stage)
            elif action.kind is Kind.RESHARD:
                unsharded.remove(action.stage)
            assert (text, count) == (str(action), len(unsharded))


def test_program_from_a_file(workers: Workers, tmp_path: Any) -> None:
    """A program that was lowered and saved runs as it is, with its gathers where it has them."""
    program = ps.lower(schedule("zbv", 2), fsdp=True, residency=1, lookahead=0)
    file = tmp_path / "program.csv"
    program.to_csv(file)
    model, (x, y) = perceptrons(4), batch(13)

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        loaded = ps.load(file)
        pipe = Pipeline(copy.deepcopy(model), loaded, loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        mine, target = split_over(mesh, x, y, SIZES)
        outcome = Outcome.of(pipe, pipe.step(mine, target=target))
        assert list(pipe.program()) == list(loaded)
        return outcome

    check(workers.run(train), by_batch(model, x, y))


def test_reduction_after_the_parameters_are_freed(workers: Workers) -> None:
    """A program of one's own may reduce later than ours do."""
    program = ps.lower(schedule("1f1b", 2), fsdp=True)
    rows = [[a for a in row if a.kind is not Kind.REDUCE_GRAD] + [a for a in row if a.kind is Kind.REDUCE_GRAD] for row in program]
    later = ps.Program.from_actions(rows, program.placement, microbatches=program.microbatches)
    model, (x, y) = perceptrons(2), batch(13)

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), later, loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        mine, target = split_over(mesh, x, y, SIZES)
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), by_batch(model, x, y))


def test_gathers_on_the_measured_timeline(workers: Workers) -> None:
    """A recorded step shows each gather and reduction on the lane of collectives, and what each took counts among the costs."""
    model, (x, y) = perceptrons(2), batch(13)

    def train() -> Any:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=True, record=True)
        mine, target = split_over(mesh, x, y, SIZES)
        pipe.step(mine, target=target)
        return pipe.step(mine, target=target).timeline

    for timeline in workers.run(train):
        rows = timeline.table.rows
        collective = rows.is_kind(Kind.UNSHARD, Kind.REDUCE_GRAD)[rows.heads]
        assert ((timeline.collective_end > timeline.collective_start) == collective).all()
        assert (timeline.collective_start[~collective] == -1).all()
        assert (timeline.collective_start[collective] >= 0).all()
        assert all(value > 0 for name in ("unshard", "reduce") for value in timeline.costs.per_stage(name, 2))
        assert (timeline.end <= timeline.makespan).all()


@pytest.mark.parametrize("chunks", [4, 6])
def test_evaluation_of_many_stages_per_rank(workers: Workers, chunks: int) -> None:
    """Forwards alone leave nothing gathered, and training goes on."""
    made = ps.schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=chunks)
    model = perceptrons(made.stages)
    x, y = batch(12)

    def train() -> tuple[bool, Any]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), made, loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        part, target = split_over(mesh, x, y, (6, 6))
        out = pipe.infer(part)
        pipe.eval_step(part, target=target)
        kept = all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
        return kept, (out, pipe.step(part, target=target).loss, part)

    for kept, (out, _, part) in workers.run(train):
        assert kept
        with torch.no_grad():
            torch.testing.assert_close(out, model(part), rtol=1e-12, atol=1e-12)
