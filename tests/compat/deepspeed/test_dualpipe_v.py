"""DeepSpeed's DualPipeV stream: what it computes, and whether its queued messages meet."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import pytest

import penstock as ps
from penstock.compat.deepspeed.schedule import DualPipeVSchedule, PipeInstruction

SIZES = [(p, m) for p in range(1, 7) for m in range(2 * p, 3 * p + 4)]


def flat(ranks: int, micro_batches: int, rank: int, forward_only: bool = False) -> list[PipeInstruction]:
    return [each for step in DualPipeVSchedule(micro_batches, ranks, rank, forward_only) for each in step]


def where(each: PipeInstruction, micro_batches: int) -> tuple[int, int]:
    """The phase and the microbatch that a buffer stands for."""
    return divmod(each.kwargs["buffer_id"], micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_forwards_and_backwards_are_those_of_our_schedule(ranks: int, micro_batches: int) -> None:
    ours = ps.schedule("dualpipe-v", ranks, micro_batches)
    for rank in range(ranks):
        order = [part for action in ours[rank] for part in action.parts if part.kind.name != "W"]
        wanted = [("ForwardPass" if part.kind.name == "F" else "BackwardPass", part.stage // ranks, part.microbatch) for part in order]
        found = flat(ranks, micro_batches, rank)
        computed = [(each.name, *where(each, micro_batches)) for each in found if each.name in ("ForwardPass", "BackwardPass")]
        assert computed == wanted
        assert all(where(each, micro_batches)[0] == each.kwargs["phase"] for each in found if "phase" in each.kwargs)


class Commits:
    """All ranks with queued messages: a commit lets the sends go, and ends when every queued receive has its message."""

    def __init__(self, ranks: int, micro_batches: int, forward_only: bool) -> None:
        self.ranks, self.micro_batches = ranks, micro_batches
        self.todo = [deque(flat(ranks, micro_batches, rank, forward_only)) for rank in range(ranks)]
        self.queued: list[list[PipeInstruction]] = [[] for _ in range(ranks)]
        self.launched: list[list[PipeInstruction]] = [[] for _ in range(ranks)]
        self.wires: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.has: list[set[tuple[str, int, int]]] = [set() for _ in range(ranks)]

    def run(self) -> None:
        while any(self.todo):
            moved = [self.go(rank) for rank in range(self.ranks)]
            if not any(moved):
                raise AssertionError(f"stuck at {[list(each)[:3] for each in self.todo]}")
        assert not any(self.wires.values())
        assert not any(self.launched)

    def go(self, rank: int) -> bool:
        """Run a rank as far as it can; whether it moved."""
        moved = self.receive(rank)
        while self.todo[rank] and not self.launched[rank]:
            self.one(rank, self.todo[rank].popleft())
            moved = True
        return moved

    def one(self, rank: int, each: PipeInstruction) -> None:
        last = self.ranks - 1
        if each.name == "CommitP2P":
            for message in self.queued[rank]:
                if message.name.startswith("Send"):
                    self.send(rank, message)
            self.launched[rank] = [message for message in self.queued[rank] if message.name.startswith("Recv")]
            self.queued[rank] = []
            self.receive(rank)
        elif each.name.startswith(("Send", "Recv")):
            self.queued[rank].append(each)
        elif each.name in ("ForwardPass", "BackwardPass"):
            phase, microbatch = where(each, self.micro_batches)
            forward = each.name == "ForwardPass"
            kind = "activation" if forward else "gradient"
            edge = (phase == 0 and rank == 0) if forward else (phase == 1 and rank == 0)
            turn = rank == last and phase == (1 if forward else 0)
            if turn:
                assert ("made " + kind, 1 - phase, microbatch) in self.has[rank]
            elif not edge:
                assert ("got " + kind, phase, microbatch) in self.has[rank], (rank, each)
            self.has[rank].add(("made " + kind, phase, microbatch))

    def target(self, rank: int, each: PipeInstruction) -> tuple[int, str]:
        """The rank at the other end, and what goes over: phase 0 runs up the ranks and phase 1 down, gradients the other way."""
        phase, kind = each.kwargs["phase"], "activation" if "Activation" in each.name else "gradient"
        step = (1 if kind == "activation" else -1) * (1 if phase == 0 else -1) * (1 if each.name.startswith("Send") else -1)
        return rank + step, kind

    def send(self, rank: int, each: PipeInstruction) -> None:
        other, kind = self.target(rank, each)
        at = where(each, self.micro_batches)
        assert ("made " + kind, *at) in self.has[rank], f"{each} on rank {rank} sends what is not there"
        self.wires[rank, other, f"{kind} {at[0]}"].append(at)

    def receive(self, rank: int) -> bool:
        left, before = [], len(self.launched[rank])
        for each in self.launched[rank]:
            other, kind = self.target(rank, each)
            at = where(each, self.micro_batches)
            wire = self.wires[other, rank, f"{kind} {at[0]}"]
            if wire:
                assert wire.popleft() == at
                self.has[rank].add(("got " + kind, *at))
            else:
                left.append(each)
        self.launched[rank] = left
        return len(left) < before


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_messages_meet_and_carry_what_is_needed(ranks: int, micro_batches: int, forward_only: bool) -> None:
    Commits(ranks, micro_batches, forward_only).run()


def names(instructions: Iterable[PipeInstruction]) -> Counter[str]:
    return Counter(each.name for each in instructions)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_counts(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        inner = ranks - rank - 1
        steps = list(DualPipeVSchedule(micro_batches, ranks, rank))
        found = names(each for step in steps for each in step)
        assert found["ForwardPass"] == found["BackwardPass"] == 2 * micro_batches
        assert found["LoadMicroBatch"] == (micro_batches if rank == 0 else 0)
        ends = (rank == 0) + (rank == ranks - 1)
        assert found["SendActivation"] == found["RecvActivation"] == found["SendGrad"] == (2 - ends) * micro_batches
        phases = 2 * inner + (rank + 1) + inner + (micro_batches - 2 * ranks + rank + 1) + inner + (rank + 1) + inner + (rank + 1)
        assert len(steps) == phases + 2  # the first receive of phase 0 and the closing step stand alone
        assert [each.name for each in steps[-1]] == ["CommitP2P", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        forwards = names(flat(ranks, micro_batches, rank, forward_only=True))
        assert forwards["ForwardPass"] == 2 * micro_batches
        assert not forwards["BackwardPass"] + forwards["SendGrad"] + forwards["RecvGrad"] + forwards["OptimizerStep"]


def test_too_few_microbatches_are_refused_as_in_deepspeed() -> None:
    with pytest.raises(ValueError, match="at least 2 \\* 3 micro-batches, got 5"):
        DualPipeVSchedule(5, 3, 0)
    assert DualPipeVSchedule(6, 3, 0).num_pipe_buffers() == 12
