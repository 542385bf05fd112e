# ruff: noqa: N999 - torch's name
"""The tracing front end: torch's own, except that a traced pipeline is built into our stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import _IR as _torch_ir  # noqa: N811 - torch's name
from torch.distributed.pipelining._IR import Pipe as _TorchPipe
from torch.distributed.pipelining._IR import SplitPoint, _modify_graph_op_device, pipe_split
from torch.distributed.pipelining._IR import pipeline as _trace

from penstock.compat.torch.stage import _PipelineStage

__all__ = ["Pipe", "SplitPoint", "pipe_split", "pipeline"]


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_ir, name)


class Pipe(_TorchPipe):
    """A traced model, split into stages."""

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        return _convert_pipe(_TorchPipe.from_tracing(mod, example_args, example_kwargs, split_policy))

    def build_stage(self, stage_index: int, device: torch.device, group: ProcessGroup | None = None) -> _PipelineStage:
        """Build one stage of the model, for one of our schedules to run."""
        module = self.get_stage_module(stage_index)
        if isinstance(module, fx.GraphModule):
            _modify_graph_op_device(module, device)
        return _PipelineStage(module, stage_index, self.info(), device, group)


def _convert_pipe(pipe: _TorchPipe) -> Pipe:
    """Change the class of torch's object to ours; a copy would lose the hooks that it holds."""
    pipe.__class__ = Pipe
    return cast(Pipe, pipe)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model on example microbatches and split it at `pipe_split()`, at `split_spec` or by `split_policy`."""
    return _convert_pipe(_trace(module, mb_args, mb_kwargs, split_spec, split_policy))
