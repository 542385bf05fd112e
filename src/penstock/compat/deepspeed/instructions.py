"""What a stage can be told to do. An instruction keeps its keyword arguments as attributes and prints as a call."""

from __future__ import annotations

from typing import Any


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text.

    >>> call_to_str("send", 1, to="a")
    "send(1, to='a')"
    """
    given = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


class PipeInstruction:
    """The base of all: `name` is that of the class, `kwargs` what it was made with."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the parameters and clear their gradients; after both reductions."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients over the replicas of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of parameters that several stages share."""


class CommitP2P(PipeInstruction):
    """Start the messages that were queued since the last one, and wait for them; only DualPipeV queues."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one of the stage's buffers."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next microbatch of the data: its input on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute the outputs from the inputs; on the last stage the loss too."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the inputs, and add to those of the parameters."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage, which receives them by `RecvActivation`."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous stage, which receives them by `RecvGrad`."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""
