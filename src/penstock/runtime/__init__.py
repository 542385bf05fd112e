"""Train a model with any program: stages, split backward, virtual ranks, and the executor. Needs torch."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from penstock.errors import MissingExtraError

    raise MissingExtraError("penstock.runtime", "torch", "torch") from error

from penstock.runtime.checkpoint import Checkpoints
from penstock.runtime.checkpoint_files import Checkpoint
from penstock.runtime.data_order import DataOrder
from penstock.runtime.extras import StageOutput, add_loss, add_metric, collect
from penstock.runtime.grid import device_mesh
from penstock.runtime.here import rank
from penstock.runtime.hugging_face import HuggingFace
from penstock.runtime.initial import Built, Initial
from penstock.runtime.launch import launch
from penstock.runtime.overlap import TwoStreams
from penstock.runtime.partition import Layers, Partition
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.replayed import Replayed
from penstock.runtime.result import StepResult
from penstock.runtime.safetensors import Safetensors
from penstock.runtime.scaler import GradScaler

__all__ = [
    "Built",
    "Checkpoint",
    "Checkpoints",
    "DataOrder",
    "GradScaler",
    "HuggingFace",
    "Initial",
    "Layers",
    "Partition",
    "Pipeline",
    "Replayed",
    "Safetensors",
    "StageOutput",
    "StepResult",
    "TwoStreams",
    "add_loss",
    "add_metric",
    "collect",
    "device_mesh",
    "launch",
    "rank",
]
