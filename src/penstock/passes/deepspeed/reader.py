"""Reads a stage's instructions in order: the microbatch of each one, and the mistakes in it.

Proofs and text files read whole streams; an engine can read each instruction as it runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.passes.deepspeed.instructions import Instruction, Stream
from penstock.verifier.finding import Finding, Severity

KINDS = {
    "ForwardPass": Kind.F,
    "BackwardPass": Kind.B,
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}
CLOSING = ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")
TRAINING = ("BackwardPass", "SendGrad", "RecvGrad", *CLOSING)
"""The instructions that a stream of forwards alone does not have."""
KNOWN = ("LoadMicroBatch", *KINDS, *CLOSING)
"""The instructions whose meaning is known, so that streams of them can be proved."""
_FILLS = ("LoadMicroBatch", "RecvActivation")
_NEEDS = {
    "ForwardPass": _FILLS,
    "SendActivation": ("ForwardPass",),
    "RecvGrad": ("ForwardPass",),
    "BackwardPass": ("ForwardPass", "RecvGrad"),
    "SendGrad": ("BackwardPass",),
}
"""For each instruction the ones that must have run on its buffer before it."""


@dataclass(frozen=True)
class Duties:
    """The instructions of a stage for every microbatch, from the fill of a buffer until the buffer may be filled again."""

    first: bool
    last: bool
    training: bool
    labels: bool = True
    """Whether the last stage needs labels for its loss."""

    def list_all(self) -> tuple[str, ...]:
        """Every instruction that one microbatch needs on this stage, in an order that works."""
        steps = {
            "RecvActivation": not self.first,
            "LoadMicroBatch": self.first or (self.last and self.labels),
            "ForwardPass": True,
            "SendActivation": not self.last,
            "RecvGrad": self.training and not self.last,
            "BackwardPass": self.training,
            "SendGrad": self.training and not self.first,
        }
        return tuple(name for name, runs in steps.items() if runs)

    def explain_absence(self, name: str) -> str:
        """Why the instruction cannot run on this stage; empty if it can."""
        if self.first and name in ("RecvActivation", "SendGrad"):
            return "the first stage has no previous stage"
        if self.last and name in ("SendActivation", "RecvGrad"):
            return "the last stage has no next stage"
        return ""

    def fills(self, name: str) -> bool:
        """Whether the instruction puts something of a new microbatch into the buffer."""
        return name == "RecvActivation" or (name == "LoadMicroBatch" and (self.first or self.last))


@dataclass
class Checklist:
    """The instructions that have run on the microbatch in one buffer."""

    duties: Duties
    done: list[str] = field(default_factory=list)

    def check_off(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Note an instruction; yield its mistakes, each with the remedy."""
        name = instruction.name
        if self.duties.fills(name):
            yield from self._fill(instruction)
            return
        missing = [need for need in _NEEDS.get(name, ()) if need in self.duties.list_all() and need not in self.done]
        if missing:
            what = " and ".join(missing)
            yield (
                f"it uses buffer {instruction.buffer_id} before {what} {'has' if len(missing) == 1 else 'have'} filled it",
                f"Run {missing[0]}(buffer_id={instruction.buffer_id}) before it, or name the buffer that is meant",
            )
        if name in self.done:
            yield (
                f"it runs a second time on what buffer {instruction.buffer_id} holds",
                "Remove one of the two, or fill the buffer between them",
            )
        self.done.append(name)

    def _fill(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """The first fill of a microbatch starts the list again; on the last stage inputs and labels come one after the other."""
        if self.done and instruction.name not in self.done and set(self.done) <= set(_FILLS):
            self.done.append(instruction.name)
            return
        owed = self.list_owed()
        if owed:
            yield (
                f"it overwrites buffer {instruction.buffer_id}, which is still needed: {' and '.join(owed)} of what it holds "
                f"{'has' if len(owed) == 1 else 'have'} not run",
                f"Run {owed[0]}(buffer_id={instruction.buffer_id}) before it, or use another buffer and count it in num_pipe_buffers()",
            )
        self.done = [instruction.name]

    def list_owed(self) -> list[str]:
        """The instructions that have yet to run on the microbatch."""
        return [name for name in self.duties.list_all() if name not in self.done] if self.done else []


@dataclass
class StreamReader:
    """Reads the stream of one stage. `coming` are the microbatches that the previous stage sends, in order."""

    stage: int
    buffers: int
    duties: Duties
    coming: Sequence[int]
    one_slot: bool = False
    """Whether there is room for one loss and one gradient only, as in DeepSpeed's engine."""
    row: list[Action] = field(default_factory=list)
    places: list[tuple[int, Instruction]] = field(default_factory=list)
    """For each action of the row, the step and the instruction that it comes from."""
    sent: list[int] = field(default_factory=list)
    holds: dict[int, int] = field(default_factory=dict)
    """The microbatch in each buffer."""
    loads: int = 0
    findings: list[Finding] = field(default_factory=list)
    _lists: dict[int, Checklist] = field(default_factory=dict)
    _labels: dict[int, int] = field(default_factory=dict)
    _received: int = 0
    _closed: list[str] = field(default_factory=list)
    _loss: int | None = None
    _gradient: int | None = None

    def read_stream(self, stream: Stream) -> None:
        """Read the whole stream into `row` and `findings`."""
        for step, instructions in enumerate(stream):
            for instruction in instructions:
                for rule, message, remedy in self.read(instruction):
                    self.findings.append(Finding(rule, Severity.WRONG, self.stage, step, str(instruction), message, remedy))
                self.write(instruction, step)
        for buffer, checklist in sorted(self._lists.items()):
            for name in checklist.list_owed()[:1]:
                message = f"the batch ends before it has run on what buffer {buffer} holds"
                last, text = max(0, len(stream) - 1), f"{name}(buffer_id={buffer})"
                self.findings.append(
                    Finding("buffer", Severity.WRONG, self.stage, last, text, message, "Run it, or do not fill the buffer")
                )

    def read(self, instruction: Instruction) -> Iterator[tuple[str, str, str]]:
        """Read the next instruction; yield the rule that it breaks, the reason, and the remedy."""
        nowhere = self.duties.explain_absence(instruction.name)
        if nowhere:
            yield "place", f"it cannot run: {nowhere}", "Remove it"
        elif instruction.name in CLOSING:
            if "OptimizerStep" in self._closed:
                yield "closing", "it comes after OptimizerStep", "Reduce the gradients before they are used, and update once"
            self._closed.append(instruction.name)
        elif instruction.buffer_id is None or not 0 <= instruction.buffer_id < self.buffers:
            remedy = "Number the buffers from 0, and let num_pipe_buffers() say how many there are"
            yield "buffer", f"it names no buffer of the stage, which has {self.buffers}", remedy
        else:
            checklist = self._lists.setdefault(instruction.buffer_id, Checklist(self.duties))
            yield from (("buffer", *wrong) for wrong in checklist.check_off(instruction))
            yield from (("microbatch", *wrong) for wrong in self._follow(instruction, instruction.buffer_id))
            yield from (("one-slot", *wrong) for wrong in self._check_slots(instruction, instruction.buffer_id))
            yield from (("closing", *wrong) for wrong in self._check_closed(instruction))

    def _follow(self, instruction: Instruction, buffer: int) -> Iterator[tuple[str, str]]:
        """Note which microbatch the buffer holds: data and messages come first in, first out."""
        if instruction.name == "RecvActivation":
            if self._received < len(self.coming):
                self.holds[buffer] = self.coming[self._received]
            else:
                yield f"it waits forever: stage {self.stage - 1} sends {len(self.coming)} activations", "Send one more, or remove it"
            self._received += 1
        elif instruction.name == "LoadMicroBatch":
            if self.duties.first:
                self.holds[buffer] = self.loads
            self._labels[buffer] = self.loads
            self.loads += 1
        elif instruction.name == "ForwardPass" and self.duties.last and self.duties.labels:
            inputs, labels = self.holds.get(buffer), self._labels.get(buffer)
            if inputs is not None and labels is not None and inputs != labels:
                yield (
                    f"it computes the loss of microbatch {inputs} with the labels of microbatch {labels}",
                    "Load on the last stage in the order in which the first stage loads",
                )

    def _check_slots(self, instruction: Instruction, buffer: int) -> Iterator[tuple[str, str]]:
        """DeepSpeed's engine keeps one loss, and one gradient in memory that receives of activations use as well."""
        name = instruction.name
        if not self.one_slot:
            return
        if name == "BackwardPass":
            self._loss = self._gradient = None
        elif name == "ForwardPass" and self.duties.last and self.duties.training:
            if self._loss is not None:
                yield (
                    f"it runs before BackwardPass(buffer_id={self._loss}): DeepSpeed's engine keeps one loss, the latest, "
                    "for whichever backward comes next",
                    "On the last stage run each backward right after its forward",
                )
            self._loss = buffer
        elif name in ("RecvGrad", "RecvActivation"):
            if self._gradient is not None:
                yield (
                    f"it runs between RecvGrad and BackwardPass of buffer {self._gradient}: DeepSpeed's engine keeps one gradient, "
                    "which the next receive overwrites",
                    "Receive a gradient right before the backward that uses it",
                )
            self._gradient = buffer if name == "RecvGrad" else self._gradient

    def _check_closed(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """No backward after a reduction, which needs complete gradients; no message after the reduction over stages."""
        late = self._closed if instruction.name == "BackwardPass" else [] if instruction.name == "LoadMicroBatch" else ["ReduceTiedGrads"]
        for name in late:
            if name in self._closed:
                yield f"it comes after {name}", f"Run {name} after the last backward and the last message of the stage"
                return

    def write(self, instruction: Instruction, step: int) -> None:
        """Add the instruction to the row if it is an action whose microbatch is known."""
        if instruction.name == "ReduceGrads":
            self.row.append(Action(self.stage, Kind.REDUCE_GRAD))
        elif instruction.name in KINDS and instruction.buffer_id in self.holds:
            microbatch = self.holds[instruction.buffer_id]
            self.row.append(Action(self.stage, KINDS[instruction.name], microbatch))
            if instruction.name == "SendActivation":
                self.sent.append(microbatch)
        else:
            return
        self.places.append((step, instruction))
