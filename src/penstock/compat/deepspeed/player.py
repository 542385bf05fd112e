"""A stage's instructions read in order: which microbatch each is about, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from penstock.compat.deepspeed.checklist import Checklist, Duties
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.passes.deepspeed import Instruction, Stream
from penstock.verifier.finding import Finding, Severity

_KINDS = {
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
KNOWN = ("LoadMicroBatch", *_KINDS, *CLOSING)
"""The instructions whose meaning is known, so that streams of them can be proved."""


@dataclass
class Player:
    """One stage. `coming` are the microbatches that the previous stage sends, in order."""

    stage: int
    buffers: int
    duties: Duties
    coming: Sequence[int]
    one_slot: bool
    """Whether there is room for one loss and one gradient only, as in DeepSpeed's engine."""
    row: list[Action] = field(default_factory=list)
    places: list[tuple[int, Instruction]] = field(default_factory=list)
    """For each action of the row, the step and the instruction that it comes from."""
    sent: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _lists: dict[int, Checklist] = field(default_factory=dict)
    _holds: dict[int, int] = field(default_factory=dict)
    _labels: dict[int, int] = field(default_factory=dict)
    _loads: int = 0
    _received: int = 0
    _closed: list[str] = field(default_factory=list)
    _loss: int | None = None
    _gradient: int | None = None

    def play(self, stream: Stream) -> None:
        """Read the whole stream."""
        for step, instructions in enumerate(stream):
            for each in instructions:
                for rule, message, remedy in self._read(each):
                    self.findings.append(Finding(rule, Severity.WRONG, self.stage, step, str(each), message, remedy))
                self._write(each, step)
        for buffer, checklist in sorted(self._lists.items()):
            for name in checklist.owed()[:1]:
                message = f"the batch ends before it has run on what buffer {buffer} holds"
                last, text = max(0, len(stream) - 1), f"{name}(buffer_id={buffer})"
                self.findings.append(
                    Finding("buffer", Severity.WRONG, self.stage, last, text, message, "Run it, or do not fill the buffer")
                )

    def _read(self, each: Instruction) -> Iterator[tuple[str, str, str]]:
        nowhere = self.duties.nowhere(each.name)
        if nowhere:
            yield "place", f"it cannot run: {nowhere}", "Remove it"
        elif each.name in CLOSING:
            if "OptimizerStep" in self._closed:
                yield "closing", "it comes after OptimizerStep", "Reduce the gradients before they are used, and update once"
            self._closed.append(each.name)
        elif each.buffer_id is None or not 0 <= each.buffer_id < self.buffers:
            remedy = "Number the buffers from 0, and let num_pipe_buffers() say how many there are"
            yield "buffer", f"it names no buffer of the stage, which has {self.buffers}", remedy
        else:
            checklist = self._lists.setdefault(each.buffer_id, Checklist(self.duties))
            yield from (("buffer", *found) for found in checklist.play(each))
            yield from (("microbatch", *found) for found in self._follow(each, each.buffer_id))
            yield from (("one-slot", *found) for found in self._share(each, each.buffer_id))
            yield from (("closing", *found) for found in self._late(each))

    def _follow(self, each: Instruction, buffer: int) -> Iterator[tuple[str, str]]:
        """Which microbatch the buffer holds: data and messages come first in, first out."""
        if each.name == "RecvActivation":
            if self._received < len(self.coming):
                self._holds[buffer] = self.coming[self._received]
            else:
                yield f"it waits for ever: stage {self.stage - 1} sends {len(self.coming)} activations", "Send one more, or remove it"
            self._received += 1
        elif each.name == "LoadMicroBatch":
            if self.duties.first:
                self._holds[buffer] = self._loads
            self._labels[buffer] = self._loads
            self._loads += 1
        elif each.name == "ForwardPass" and self.duties.last and self.duties.labels:
            inputs, labels = self._holds.get(buffer), self._labels.get(buffer)
            if inputs is not None and labels is not None and inputs != labels:
                yield (
                    f"it computes the loss of microbatch {inputs} with the labels of microbatch {labels}",
                    "Load on the last stage in the order in which the first stage loads",
                )

    def _share(self, each: Instruction, buffer: int) -> Iterator[tuple[str, str]]:
        """DeepSpeed's engine keeps one loss, and one gradient in memory that receives of activations use as well."""
        name = each.name
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

    def _late(self, each: Instruction) -> Iterator[tuple[str, str]]:
        """Gradients are whole when they are reduced; and at the reduction over stages nobody may still wait for a message."""
        late = self._closed if each.name == "BackwardPass" else [] if each.name == "LoadMicroBatch" else ["ReduceTiedGrads"]
        for name in late:
            if name in self._closed:
                yield f"it comes after {name}", f"Run {name} after the last backward and the last message of the stage"
                return

    def _write(self, each: Instruction, step: int) -> None:
        """The instruction as an action, where it is one and its microbatch is known."""
        if each.name == "ReduceGrads":
            self._add(Action(self.stage, Kind.REDUCE_GRAD), step, each)
        elif each.name in _KINDS and each.buffer_id in self._holds:
            microbatch = self._holds[each.buffer_id]
            self._add(Action(self.stage, _KINDS[each.name], microbatch), step, each)
            if each.name == "SendActivation":
                self.sent.append(microbatch)

    def _add(self, action: Action, step: int, each: Instruction) -> None:
        self.row.append(action)
        self.places.append((step, each))
