"""What has to be done with a buffer, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.passes.deepspeed import Instruction

_FILLS = ("LoadMicroBatch", "RecvActivation")


@dataclass(frozen=True)
class Duties:
    """What a stage does with every microbatch, from the fill of a buffer to the moment it may be filled again."""

    first: bool
    last: bool
    training: bool
    labels: bool = True
    """Whether the last stage needs labels for its loss."""

    def all(self) -> tuple[str, ...]:
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
        return tuple(name for name, wanted in steps.items() if wanted)

    def needs(self, name: str) -> tuple[str, ...]:
        """What must have run on the buffer before this instruction."""
        before = {
            "ForwardPass": _FILLS,
            "SendActivation": ("ForwardPass",),
            "RecvGrad": ("ForwardPass",),
            "BackwardPass": ("ForwardPass", "RecvGrad"),
            "SendGrad": ("BackwardPass",),
        }
        return tuple(each for each in before.get(name, ()) if each in self.all())

    def nowhere(self, name: str) -> str:
        """Why the instruction has no place on this stage, if it has none."""
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
    """One buffer while a stream is read."""

    duties: Duties
    done: list[str] = field(default_factory=list)
    """What has run on the microbatch that is in it."""

    def play(self, each: Instruction) -> Iterator[tuple[str, str]]:
        """Note an instruction; what is wrong with it, and the way out, where anything is."""
        name = each.name
        if self.duties.fills(name):
            yield from self._fill(each)
            return
        missing = [need for need in self.duties.needs(name) if need not in self.done]
        if missing:
            what = " and ".join(missing)
            yield (
                f"it uses buffer {each.buffer_id} before {what} {'has' if len(missing) == 1 else 'have'} filled it",
                f"Run {missing[0]}(buffer_id={each.buffer_id}) before it, or name the buffer that is meant",
            )
        if name in self.done:
            yield (
                f"it runs a second time on what buffer {each.buffer_id} holds",
                "Remove one of the two, or fill the buffer between them",
            )
        self.done.append(name)

    def _fill(self, each: Instruction) -> Iterator[tuple[str, str]]:
        """The first fill of a microbatch begins anew; on the last stage inputs and labels come one after the other."""
        second = self.done and each.name not in self.done and set(self.done) <= set(_FILLS)
        if second:
            self.done.append(each.name)
            return
        owed = self.owed()
        if owed:
            yield (
                f"it overwrites buffer {each.buffer_id}, which is still needed: {' and '.join(owed)} of what it holds "
                f"{'has' if len(owed) == 1 else 'have'} not run",
                f"Run {owed[0]}(buffer_id={each.buffer_id}) before it, or use another buffer and count it in num_pipe_buffers()",
            )
        self.done = [each.name]

    def owed(self) -> list[str]:
        """What is still to be done with the microbatch that is in it."""
        return [name for name in self.duties.all() if name not in self.done] if self.done else []
