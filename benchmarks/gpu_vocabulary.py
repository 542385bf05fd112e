"""A vocabulary spread over the ranks, on a GPU: `PYTHONPATH=src python benchmarks/gpu_vocabulary.py --out DIR [--microbatches 16]`.

A decoder with a vocabulary of 262,144 on 4 virtual ranks, each on multiprocessors of its own. 1F1B runs with the best uneven cut of the
whole model, and with embedding and head spread over the ranks. Both are predicted from times that were measured while all ranks compute,
and then measured: the same loop runs both programs, action by action, so that they differ in nothing else. Losses are compared.

Writes `gpu_vocabulary.md` and `gpu_vocabulary.json`. Without a GPU, or with `--small`, a tiny decoder runs on the host; the figures mean
nothing then, but losses are still compared. Ends with 1 if the losses differ.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.ir.kind import Kind  # noqa: E402
from penstock.planner.partition.stage_costs import stage_costs  # noqa: E402
from penstock.planner.profile.vocabulary import spread_ends  # noqa: E402
from penstock.runtime import SpreadEmbedding, SpreadHead, ThreadLane, launch, rank  # noqa: E402
from penstock.runtime.device.streams import record_event, record_use, wait_event  # noqa: E402

RANKS, SMS = 4, 32


@dataclass(frozen=True)
class Shape:
    """The size of a decoder and of its microbatches."""

    blocks: int
    hidden: int
    vocabulary: int
    tokens: int
    dtype: torch.dtype
    device: str
    rounds: int


FULL = Shape(16, 2048, 262144, 2048, torch.bfloat16, "cuda", 5)
TINY = Shape(8, 16, 64, 12, torch.float64, "cpu", 2)


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.maps, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.heads = max(hidden // 128, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(0, 1) for part in self.maps(self.norms[0](x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + self.out(mixed)
        return x + self.wide(self.norms[1](x))


class Model:
    """The decoder's parts, in memory once; every rank takes its own."""

    def __init__(self, shape: Shape, microbatches: int) -> None:
        self.shape = shape
        torch.manual_seed(0)
        like = {"device": shape.device, "dtype": shape.dtype}
        self.words = torch.randn(shape.vocabulary, shape.hidden, **like) * 0.02
        self.blocks = [Block(shape.hidden).to(**like) for _ in range(shape.blocks)]
        self.head = torch.randn(shape.vocabulary, shape.hidden, **like) * 0.02
        self.tokens, self.targets = (torch.randint(shape.vocabulary, (microbatches, shape.tokens), device=shape.device) for _ in range(2))

    def stage(self, sizes: Sequence[int], stage: int) -> list[Block]:
        """The blocks of a stage; `sizes` counts the embedding and the head as layers."""
        first = sum(sizes[:stage])
        return self.blocks[max(first - 1, 0) : first + sizes[stage] - 1]


def synchronize(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(shape: Shape, work: Callable[[], Any], rounds: int) -> float:
    """The median time of work, after a first time."""
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        work()
        event = record_event()
        if event is not None:
            event.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


# Costs ----------------------------------------------------------------------------------------------------------------


def measure(model: Model, sms: int | None) -> dict[str, float]:
    """The times of every part while all ranks run the same: the median over the ranks; of collectives, that of the last rank to join."""
    shape, lanes = model.shape, ThreadLane.create(RANKS, timeout=600)

    def run() -> dict[str, float]:
        lane, found = lanes[rank()], {}
        hidden = torch.randn(shape.tokens, shape.hidden, device=shape.device, dtype=shape.dtype)
        block = Block(shape.hidden).to(device=shape.device, dtype=shape.dtype)
        whole = [model.head.clone().requires_grad_()]

        def step(part: Callable[[Tensor], Tensor], name: str) -> None:
            x, made = hidden.clone().requires_grad_(), []
            found[f"{name} f"] = seconds_of(shape, lambda: made.append(part(x)), shape.rounds)
            gradients = iter(made)
            grown = torch.ones_like(made[0])
            found[f"{name} b"] = seconds_of(shape, lambda: next(gradients).backward(grown), len(made) - 1)

        step(block, "block")
        step(lambda x: functional.cross_entropy((x @ whole[0].t()).float(), model.targets[0]), "head")
        whole.clear()
        head = SpreadHead(model.head, lane=lane, owner=RANKS - 1)
        embedding = SpreadEmbedding(model.words, lane=lane, owner=0)
        units = iter(range(10**6))
        parts = defaultdict(list)

        def share() -> None:
            unit = next(units)
            head.join_broadcast(unit, hidden)
            for name, work in (
                ("broadcast", lambda: lane.take(lane.join(lambda: lane.broadcast(hidden, RANKS - 1), hidden))),
                ("s", lambda: head.run_share(unit, model.targets[0])),
                ("combine", lambda: (head.join_combine(unit), head.take_losses(unit))),
                ("t", lambda: head.add_weight_gradients(unit)),
                ("embedding s", lambda: embedding.run_share(unit, model.tokens[0])),
            ):
                begun = time.perf_counter()
                work()
                event = record_event()
                if event is not None:
                    event.synchronize()
                parts[name].append(time.perf_counter() - begun)
            if lane.rank == head.owner:
                head.take_input_gradient(unit)
            embedding.join_combine(unit)
            embedding.join_broadcast(unit, hidden)
            embedding.add_weight_gradients(unit)

        for _ in range(shape.rounds + 1):
            share()
        lane.close()
        return {**found, **{name: statistics.median(times[1:]) for name, times in parts.items()}}

    results = launch(run, RANKS, parallel=True, sms=sms)
    collectives = ("broadcast", "combine")
    return {name: (min if name in collectives else statistics.median)([result[name] for result in results]) for name in results[0]}


def make_profile(shape: Shape, times: dict[str, float]) -> ps.Profile:
    """The model's layers; a full backward is half for the input and half for the weights."""
    size = shape.tokens * shape.hidden * torch.finfo(shape.dtype).bits / 8

    def layer(name: str, f: float, b: float) -> ps.Layer:
        return ps.Layer(name=name, f=f, i=b / 2, w=b / 2, output=size)

    head = layer("head", times["head f"], times["head b"])
    return ps.Profile(
        [layer("embedding", 0.0, 0.0), *[layer("block", times["block f"], times["block b"])] * shape.blocks, head], time_unit="s"
    )


# Running --------------------------------------------------------------------------------------------------------------


class Wires:
    """Messages between virtual ranks: the tensor, and the moment of its stream when it was there."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()

    def find(self, key: tuple[str, int, int]) -> queue.Queue[Any]:
        with self.lock:
            return self.queues[key]

    def put(self, key: tuple[str, int, int], value: Tensor) -> None:
        self.find(key).put((value, record_event()))

    def get(self, key: tuple[str, int, int]) -> Tensor:
        value, event = self.find(key).get(timeout=600)
        wait_event(event)
        record_use(value)
        return value


class RankRun:
    """Runs one rank's actions one after the other."""

    def __init__(self, program: ps.Program, sizes: Sequence[int], model: Model, wires: Wires, lane: ThreadLane | None) -> None:
        self.program, self.model, self.wires, self.rank, self.last = program, model, wires, rank(), program.stages - 1
        self.parts = {stage: nn.Sequential(*model.stage(sizes, stage)) for stage in program.placement.stages_of(self.rank)}
        self.embedding = self.head = None
        if lane is not None:
            self.embedding = SpreadEmbedding(model.words, lane=lane, owner=program.placement.rank_of(0, 0))
            self.head = SpreadHead(model.head, lane=lane, owner=program.placement.rank_of(self.last, 0))
        self.words, self.weight = model.words.clone().requires_grad_(), model.head.clone().requires_grad_()
        if lane is not None or self.rank != program.placement.rank_of(0, 0):
            self.words = self.words[:0]
        if lane is not None or self.rank != program.placement.rank_of(self.last, 0):
            self.weight = self.weight[:0]

    def step(self) -> dict[int, Tensor]:
        """One step; the loss of each microbatch, on the ranks that know it."""
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        with torch.autograd.set_multithreading_enabled(False):
            for action in self.program[self.rank]:
                self._run(action.kind, action.stage, action.microbatch or 0)
        return self.losses

    def _run(self, kind: Kind, stage: int, unit: int) -> None:
        match kind:
            case Kind.F:
                self._forward(stage, unit)
            case Kind.B:
                self._backward(stage, unit)
            case Kind.SEND_F:
                self.wires.put(("f", stage + 1, unit), self.outputs[stage, unit].detach())
            case Kind.RECV_F:
                self.inputs[stage, unit] = self.wires.get(("f", stage, unit))
            case Kind.SEND_B:
                self.wires.put(("b", stage - 1, unit), self.gradients.pop((stage - 1, unit)))
            case Kind.RECV_B:
                self.gradients[stage, unit] = self.wires.get(("b", stage, unit))
            case Kind.S | Kind.T | Kind.BROADCAST | Kind.COMBINE:
                self._run_share(kind, stage, unit)

    def _forward(self, stage: int, unit: int) -> None:
        if stage == 0 and self.embedding is not None:
            value = self.embedding.take_output(unit)
        else:
            value = self.words[self.model.tokens[unit]] if stage == 0 else self.inputs[stage, unit]
        self.inputs[stage, unit] = value if value.requires_grad else value.detach().requires_grad_()
        made = self.parts[stage](self.inputs[stage, unit])
        if stage == self.last and self.head is None:
            made = functional.cross_entropy(
                (made @ self.weight.t()).to(torch.promote_types(made.dtype, torch.float32)), self.model.targets[unit]
            )
            self.losses[unit] = made.detach()
        self.outputs[stage, unit] = made

    def _backward(self, stage: int, unit: int) -> None:
        made, gradient = self.outputs.pop((stage, unit)), None
        if stage < self.last:
            gradient = self.gradients.pop((stage, unit))
        elif self.head is not None:
            gradient = self.head.take_input_gradient(unit)
        made.backward(gradient)
        value = self.inputs.pop((stage, unit))
        if value.is_leaf and value.grad is not None:  # a whole embedding has its gradient already
            self.gradients[stage - 1, unit] = value.grad

    def _run_share(self, kind: Kind, stage: int, unit: int) -> None:
        assert self.embedding is not None
        assert self.head is not None
        shape, layer = self.model.shape, self.embedding if stage == 0 else self.head
        if kind is Kind.S:
            if stage == 0:
                self.embedding.run_share(unit, self.model.tokens[unit])
            else:
                self.head.run_share(unit, self.model.targets[unit], 1 / shape.tokens)
        elif kind is Kind.COMBINE:
            layer.join_combine(unit)
        elif kind is Kind.BROADCAST:
            made = self.gradients.pop((-1, unit), None) if stage == 0 else self.outputs.get((stage, unit))
            empty = torch.empty(shape.tokens, shape.hidden, device=shape.device, dtype=shape.dtype)
            layer.join_broadcast(unit, empty if made is None else made)
        else:
            layer.add_weight_gradients(unit)
            if stage:
                self.losses[unit] = self.head.take_losses(unit).mean()


def run_program(program: ps.Program, sizes: Sequence[int], model: Model, sms: int | None) -> tuple[float, list[float]]:
    """The median time of a step, and the losses of the last."""
    shape, wires, start = model.shape, Wires(), threading.Barrier(RANKS)
    spread = any(action.kind is Kind.S for action in program[0])
    lanes: Sequence[ThreadLane | None] = ThreadLane.create(RANKS, timeout=600) if spread else [None] * RANKS

    def run() -> tuple[list[float], dict[int, float]]:
        own, taken, losses = RankRun(program, sizes, model, wires, lanes[rank()]), [], {}
        for _ in range(shape.rounds + 1):
            event = record_event()
            if event is not None:
                event.synchronize()
            start.wait(600)
            begun = time.perf_counter()
            losses = own.step()
            event = record_event()
            if event is not None:
                event.synchronize()
            start.wait(600)
            taken.append(time.perf_counter() - begun)
        return taken[1:], {unit: float(loss) for unit, loss in losses.items()}

    results = launch(run, RANKS, parallel=True, sms=sms)
    for lane in lanes:
        if lane is not None:
            lane.close()
    losses = {unit: loss for _, of_rank in results for unit, loss in of_rank.items()}
    return statistics.median(results[0][0]), [losses[unit] for unit in sorted(losses)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--small", action="store_true", help="a tiny decoder on the host")
    given = parser.parse_args(arguments)
    shape = TINY if given.small or not torch.cuda.is_available() else FULL
    sms = SMS if shape.device == "cuda" else None
    model = Model(shape, given.microbatches)
    times = measure(model, sms)
    profile = make_profile(shape, times)
    schedule = ps.schedule("1f1b", ranks=RANKS, microbatches=given.microbatches)

    plan = ps.plan(profile, ranks=RANKS, microbatches=given.microbatches, schedules=["1f1b"], seconds=0)
    cut_time, cut_losses = run_program(plan.program, plan.partition, model, sms)

    blocks = shape.blocks // RANKS
    sizes = (blocks + 1, *[blocks] * (RANKS - 2), blocks + 1)
    between = [0.0] * (RANKS - 2)
    measured: dict[str, Any] = {name: [times[f"embedding {name}"] if name == "s" else 0.0, *between, times[name]] for name in ("s", "t")}
    measured |= {name: [times[name], *between, times[name]] for name in ("broadcast", "combine")}
    costs = replace(stage_costs(spread_ends(profile, RANKS), sizes, schedule.placement, (False,) * RANKS), **measured)
    program = ps.lower(ps.spread_vocabulary(schedule, costs))
    predicted = ps.simulate(program, costs).makespan
    spread_time, spread_losses = run_program(program, sizes, model, sms)

    close = torch.allclose(torch.tensor(cut_losses), torch.tensor(spread_losses), rtol=1e-9 if shape.dtype == torch.float64 else 1e-2)
    report = {
        "device": "cpu" if sms is None else torch.cuda.get_device_name(),
        "times": times,
        "cut": {"partition": list(plan.partition), "predicted": plan.objective, "measured": cut_time},
        "spread": {"partition": list(sizes), "predicted": predicted, "measured": spread_time},
        "gain": {"predicted": plan.objective / predicted - 1, "measured": cut_time / spread_time - 1},
        "losses": {"cut": cut_losses, "spread": spread_losses, "equal": close},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_vocabulary.json").write_text(json.dumps(report, indent=1) + "\n")
    rows = [
        f"| {name} | {1000 * report[name]['predicted']:.1f} ms | {1000 * report[name]['measured']:.1f} ms |" for name in ("cut", "spread")
    ]
    gain = f"| gain | {report['gain']['predicted']:.1%} | {report['gain']['measured']:.1%} |"
    head = [
        "# A vocabulary on all ranks",
        "",
        f"{report['device']}, losses equal: {'yes' if close else 'NO'}",
        "",
        "| | predicted | measured |",
    ]
    text = "\n".join([*head, "|---|---|---|", *rows, gain]) + "\n"
    (given.out / "gpu_vocabulary.md").write_text(text)
    print(text)
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
