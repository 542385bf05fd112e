"""Trains a model with any program. Needs torch.

`pipeline` is the entrance: it cuts the model into stages (`model`), gives them weights, and joins its group (`transport`). A step passes
its batch (`batch`) to the executor (`execution`), which runs the rank's actions and exchanges messages with other ranks.
"""

# ruff: noqa: E402 - the version of torch is checked before the other modules are imported

from __future__ import annotations

try:
    import torch as _torch
except ImportError as error:
    from penstock.errors import MissingExtraError

    raise MissingExtraError("penstock.runtime", "torch", "torch") from error

from penstock.runtime.torch_internals.version import check_torch_version

check_torch_version(_torch.__version__)

from penstock.runtime.batch.loss import TokenCrossEntropy
from penstock.runtime.batch.result import StageOutput, StepResult, add_loss, add_metric, collect
from penstock.runtime.batch.slices import SequenceDims
from penstock.runtime.checkpoint.checkpoints import Checkpoint, Checkpoints
from penstock.runtime.execution.overlap import TwoStreams
from penstock.runtime.launch.launch import launch
from penstock.runtime.measure.drift import Drift
from penstock.runtime.measure.metrics import RankMetrics, StepMetrics
from penstock.runtime.model.hugging_face import HuggingFace
from penstock.runtime.model.partition import Layers, Partition
from penstock.runtime.parallel.collective_lane import ProcessLane, ThreadLane
from penstock.runtime.parallel.gradients import GradScaler
from penstock.runtime.parallel.mesh import device_mesh
from penstock.runtime.parallel.vocabulary import SpreadEmbedding, SpreadHead
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.sequence.prefix import Prefix, prefix_of
from penstock.runtime.train.data_order import DataOrder
from penstock.runtime.transport.current_group import rank
from penstock.runtime.weights.safetensors import Safetensors
from penstock.runtime.weights.source import Built, Initial, Replayed

__all__ = [
    "Built",
    "Checkpoint",
    "Checkpoints",
    "DataOrder",
    "Drift",
    "GradScaler",
    "HuggingFace",
    "Initial",
    "Layers",
    "Partition",
    "Pipeline",
    "Prefix",
    "ProcessLane",
    "RankMetrics",
    "Replayed",
    "Safetensors",
    "SequenceDims",
    "SpreadEmbedding",
    "SpreadHead",
    "StageOutput",
    "StepMetrics",
    "StepResult",
    "ThreadLane",
    "TokenCrossEntropy",
    "TwoStreams",
    "add_loss",
    "add_metric",
    "collect",
    "device_mesh",
    "launch",
    "prefix_of",
    "rank",
]
