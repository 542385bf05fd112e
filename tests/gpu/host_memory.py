"""Activations in host memory, on a GPU: `PYTHONPATH=src:tests python tests/gpu/host_memory.py`.

It is not part of the test suite, which needs no GPU. Buffers must be pinned, copies must run on streams of their own and in order with the
computation, which is slowed down at random, results must be equal to the last bit to those without moves, and the device must hold as much
less as is predicted. Without a GPU everything runs on the host, where only numbers can be wrong.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.offload import Offload
from penstock.runtime import Pipeline, launch, prefix_of
from penstock.runtime.device.host_memory import HostMemory, SavedTensors

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
WIDTH, ROWS = (1024, 2048) if GPU else (32, 64)
CYCLES = 20_000_000
"""About ten milliseconds of a GPU: longer than any copy here."""


class Slow(nn.Module):
    """A layer whose work on the device starts late, now and then: a copy that does not wait for it reads what is not there yet."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.map, self.chance = nn.Linear(WIDTH, WIDTH), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        if GPU and self.chance.random() < 0.3:
            torch.cuda._sleep(self.chance.randrange(CYCLES))
        return x + torch.tanh(self.map(x))


class Mixing(nn.Module):
    """Mixes tokens by a mean over the keys so far: attention kernels add gradients in no fixed order."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        keys = prefix_of(self).extend(self.keys(x), dim=1)
        return x + self.out(torch.tanh(x) * keys.square().mean(1, keepdim=True))


def train(layers: list[nn.Module], program: ps.Program, x: Tensor, steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    """The gradients of several steps on every rank; nothing may be left on the host."""

    def on_rank() -> dict[str, Tensor]:
        pipe = Pipeline(nn.Sequential(*copy.deepcopy(layers)), program, loss_fn=functional.mse_loss, **options)
        for _ in range(steps):
            pipe.step(x, target=x)
        moves = pipe._executor(program.microbatches, True).compute.moves
        assert moves is None or moves.memory.held == 0
        peaks.append(0 if moves is None else moves.memory.peak)
        return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}

    peaks: list[int] = []
    results = launch(on_rank, program.ranks)
    assert any(peaks) == bool(program.rows.is_kind(Kind.OFFLOAD).any())
    return results


def check_buffers_are_pinned() -> None:
    memory = HostMemory()
    buffer, event = memory.take(1 << 20, pinned=GPU)
    assert event is None
    assert buffer.is_pinned() == GPU
    memory.give_back(buffer, None)
    assert memory.take(1 << 20, pinned=GPU)[0] is buffer


def check_copies_wait_for_the_computation() -> None:
    """One forward and backward by hand: the copy is issued while the device is still busy with what it copies."""
    memory = HostMemory()
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE, requires_grad=True)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
        wanted = torch.autograd.grad(torch.tanh(torch.tanh(x @ weight) @ weight).sum(), [x, weight])
        saved = SavedTensors(memory)
        with saved.save_tensors({weight.untyped_storage().data_ptr()}):
            if GPU:
                torch.cuda._sleep(CYCLES)
            output = torch.tanh(torch.tanh(x @ weight) @ weight).sum()
        saved.offload()
        saved.release()
        filler = [torch.full((ROWS, WIDTH), float("nan"), device=DEVICE) for _ in range(8)]  # takes over the memory that was left
        saved.reload()
        saved.arrive()
        grads = torch.autograd.grad(output, [x, weight])
        assert all(map(torch.equal, grads, wanted)), f"round {seed}"
        del filler
    assert memory.held == 0
    if GPU:
        own = torch.cuda.current_stream()
        assert memory.out._stream is not None
        assert memory.back._stream is not None
        assert len({stream.cuda_stream for stream in (own, memory.out._stream, memory.back._stream)}) == 3


def check_schedule(name: str, recompute: bool) -> Callable[[], None]:
    def check() -> None:
        schedule = ps.schedule(name, ranks=4, microbatches=8)
        torch.manual_seed(0)
        layers: list[nn.Module] = [Slow().to(DEVICE) for _ in range(schedule.stages)]
        x = torch.randn(8 * ROWS, WIDTH, device=DEVICE)
        plain = train(layers, ps.lower(schedule), x, recompute=recompute)
        for ahead in (0, 1, 3):
            for mine, other in zip(
                train(layers, ps.lower(schedule, offload=Offload(100, ahead)), x, recompute=recompute), plain, strict=True
            ):
                assert mine.keys() == other.keys()
                assert all(torch.equal(mine[key], other[key]) for key in mine), f"ahead={ahead}"

    return check


def check_slices() -> None:
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=4)
    torch.manual_seed(0)
    layers: list[nn.Module] = [module.to(DEVICE) for _ in range(2) for module in (Slow(), Mixing())]
    x = torch.randn(2, 256, WIDTH, device=DEVICE)
    plain, moved = train(layers, ps.lower(schedule), x), train(layers, ps.lower(schedule, offload=100), x)
    for mine, other in zip(moved, plain, strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def check_memory() -> None:
    """All forwards first on one rank: the device holds as much as the ledger says, within three percent.

    Many narrow layers and many rows, so that gradients, their backups and temporary tensors are small beside what is saved.
    """
    count, depth, width, rows = 8, 96, 64, 65536 if GPU else 64
    layers = [nn.Sequential(*(module for _ in range(depth) for module in (nn.Linear(width, width), nn.Tanh()))).to(DEVICE)]
    row = [f"0F{m}" for m in range(count)] + [f"0B{m}" for m in range(count)]
    schedule = Schedule.from_actions([row], Placement.linear(1))
    x = torch.randn(count * rows, width, device=DEVICE)
    size = depth * rows * width * x.element_size()
    for share in (0, 50, 100):
        program = ps.lower(schedule, offload=share) if share else ps.lower(schedule)
        predicted = (ps.verify(program, costs=ps.Costs(activation=float(size))).peak_memory or (0.0,))[0]

        def on_rank(program: ps.Program = program) -> int:
            pipe = Pipeline(layers, program, loss_fn=functional.mse_loss)
            pipe.step(x, target=x)
            if not GPU:
                return 0
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pipe.step(x, target=x)
            return torch.cuda.max_memory_allocated() - before

        peak = launch(on_rank, 1)[0]
        print(f"   {share}% moved: predicted {predicted / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB")
        assert not GPU or abs(peak / predicted - 1) < 0.03


def main() -> int:
    """Run every check; 1 if any fails."""
    checks: dict[str, Callable[[], None]] = {
        "buffers are pinned and kept": check_buffers_are_pinned,
        "copies wait for the computation": check_copies_wait_for_the_computation,
        "slices": check_slices,
        "memory": check_memory,
    }
    for name in ("1f1b", "gpipe", "zb-h1", "zbv", "interleaved-1f1b"):
        for recompute in (False, True):
            checks[f"{name}{', recomputed' if recompute else ''}"] = check_schedule(name, recompute)
    failed = 0
    for name, check in checks.items():
        try:
            check()
            print(f"{name}: ok", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
