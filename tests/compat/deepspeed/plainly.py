"""A plain interpreter of streams, as DeepSpeed's engine runs them: one instruction after the other, sends and receives that block, buffers
that are overwritten without asking, one loss, and one piece of memory for whatever was received last. What a buffer number of a
backward means is taken seriously, though, where DeepSpeed ignores it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.passes.deepspeed.instructions import Instruction, Stream

PEERS = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}
RECEIVES = {"RecvActivation": -1, "RecvGrad": 1}


class WentWrongError(Exception):
    """A deadlock, or work that is missing, repeated or done on the wrong data."""


@dataclass
class Leaf:
    """What a forward reads: the microbatch, and whether its gradient has been computed."""

    microbatch: int
    graded: bool = False


@dataclass
class Stage:
    number: int
    stages: int
    todo: list[Instruction]
    buffers: int
    at: int = 0
    loads: int = 0
    inputs: dict[int, Leaf] = field(default_factory=dict)
    labels: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, Leaf] = field(default_factory=dict)
    loss: Leaf | None = None
    memory: tuple[str, int, int] | None = None
    done: list[tuple[str, int]] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)

    @property
    def now(self) -> Instruction | None:
        return self.todo[self.at] if self.at < len(self.todo) else None

    def buffer(self, each: Instruction) -> int:
        wrong_if(each.buffer_id is None or not 0 <= each.buffer_id < self.buffers, "no such buffer")
        assert each.buffer_id is not None
        return each.buffer_id

    def compute(self, each: Instruction) -> None:
        last = self.number == self.stages - 1
        if each.name == "LoadMicroBatch":
            if self.number == 0:
                self.inputs[self.buffer(each)] = Leaf(self.loads)
            self.labels[self.buffer(each)] = self.loads
            self.loads += 1
        elif each.name == "ForwardPass":
            leaf = found(self.inputs, self.buffer(each))
            self.outputs[self.buffer(each)] = leaf
            if last:
                wrong_if(self.labels.get(self.buffer(each)) != leaf.microbatch, "the wrong labels")
                self.loss = leaf
            self.done.append(("F", leaf.microbatch))
        elif each.name == "BackwardPass":
            leaf = self.backward_of(each, last)
            wrong_if(leaf.graded, "twice through one graph")
            leaf.graded = True
            self.done.append(("B", leaf.microbatch))
        else:
            self.done.append((each.name, 0))

    def backward_of(self, each: Instruction, last: bool) -> Leaf:
        if last:
            wrong_if(self.loss is None, "no loss")
            assert self.loss is not None
            wrong_if(self.outputs.get(self.buffer(each)) is not self.loss, "the loss of another buffer")
            return self.loss
        leaf = found(self.outputs, self.buffer(each))
        wrong_if(self.memory != ("RecvGrad", leaf.microbatch, self.buffer(each)), "the wrong gradient")
        del self.outputs[self.buffer(each)]
        return leaf


def found(where: dict[int, Any], buffer: int) -> Any:
    wrong_if(buffer not in where, "an empty buffer")
    return where[buffer]


def wrong_if(condition: bool, what: str) -> None:
    if condition:
        raise WentWrongError(what)


def run(streams: list[Stream], micro_batches: int, buffers: list[int]) -> None:
    """Run everything; raises if any of it goes wrong."""
    stages = [Stage(n, len(streams), [each for step in stream for each in step], buffers[n]) for n, stream in enumerate(streams)]
    while any(stage.now for stage in stages):
        moved = [advance(stages, stage) for stage in stages]
        wrong_if(not any(moved), "a deadlock")
    closings = [[name for name, _ in stage.done if name not in "FB"] for stage in stages]
    wrong_if(any(sorted(each) != sorted(closings[0]) for each in closings), "stages that do not close the batch alike")
    wrong_if(len(set(closings[0])) < len(closings[0]), "a batch that is closed twice")
    for stage, closing in zip(stages, closings, strict=True):
        wrong_if(stage.number in (0, len(stages) - 1) and stage.loads != micro_batches, "data that the next batch lacks, or leftovers")
        wrong_if("OptimizerStep" in closing[:-1], "gradients reduced after they were used")
        wrong_if(stage.done != sorted_out(stage.done), "an update before the gradients are whole")
        work = sorted(each for each in stage.done if each[0] in "FB")
        wrong_if(work != sorted((kind, m) for kind in "FB" for m in range(micro_batches)), "work that is missing or repeated")


def sorted_out(done: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The same with every closing instruction behind all the work."""
    return [each for each in done if each[0] in "FB"] + [each for each in done if each[0] not in "FB"]


def advance(stages: list[Stage], stage: Stage) -> bool:
    """One instruction of a stage, if it can go on; a receive is run by its send."""
    each = stage.now
    if each is None or each.name in RECEIVES:
        if each is not None:
            wrong_if(not 0 <= stage.number + RECEIVES[each.name] < len(stages), "a message from nowhere")
        return False
    if each.name == "ReduceTiedGrads":
        if all(other.now is not None and other.now.name == each.name for other in stages):
            for other in stages:
                other.done.append((each.name, 0))
                other.at += 1
            return True
        return False
    if each.name not in PEERS:
        stage.compute(each)
        stage.at += 1
        return True
    wanted, step = PEERS[each.name]
    wrong_if(not 0 <= stage.number + step < len(stages), "a message to nowhere")
    other = stages[stage.number + step]
    if other.now is None or other.now.name != wanted:
        return False
    deliver(stage, each, other, other.now)
    stage.at, other.at = stage.at + 1, other.at + 1
    return True


def deliver(stage: Stage, send: Instruction, other: Stage, receive: Instruction) -> None:
    if send.name == "SendActivation":
        microbatch = found(stage.outputs, stage.buffer(send)).microbatch
        other.inputs[other.buffer(receive)] = Leaf(microbatch)
    else:
        leaf = found(stage.inputs, stage.buffer(send))
        wrong_if(not leaf.graded, "a gradient that is not there")
        microbatch = leaf.microbatch
        del stage.inputs[stage.buffer(send)]
        found(other.outputs, other.buffer(receive))
    wrong_if((send.name, microbatch) in stage.sent, "a message that was sent before")
    stage.sent.append((send.name, microbatch))
    other.memory = (receive.name, microbatch, other.buffer(receive))


def instructions(streams: list[Stream]) -> Iterator[tuple[int, int, int]]:
    """The place of every instruction: stage, step, number within the step."""
    for number, stream in enumerate(streams):
        for step, each in enumerate(stream):
            yield from ((number, step, k) for k in range(len(each)))
