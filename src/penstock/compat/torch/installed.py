"""What the installed torch's pipelining package has, and stand-ins for what an older one lacks.

`torch.distributed.pipelining` changes with every release: 2.12 introduced descriptions of tensors between stages, 2.14 microbatches
passed to `step` as lists, 2.15 waits as actions and outputs that are released once they are sent. All of these differences are
resolved here, so that the other modules read the same on every release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import _utils, schedules
from torch.distributed.pipelining import stage as _torch_stage

from penstock.compat.torch import older_metadata
from penstock.runtime.torch_internals.lookup import check_names, check_private

_stage: Any = _torch_stage

HAS_METADATA = hasattr(_utils, "InferenceMode")
"""Whether torch describes the tensors between stages (since 2.12). Before, a stage keeps examples of them."""
HAS_FORWARD_STATES = hasattr(_stage, "_ForwardChunkState")
"""Whether a stage can release outputs before their backward (since 2.15); they are then in `_forward_chunk_states`, not `fwd_cache`."""
WRITES_WAITS = hasattr(schedules, "WAIT_SEND_F")
"""Whether orders contain the waits for sends and reductions (since 2.15): torch then refuses a send without its wait."""
FINALIZES_BACKWARD = hasattr(_stage, "GradientReductionHandle")
"""Whether FSDP reduces gradients asynchronously, when told to (since 2.15)."""

check_private(
    _stage._PipelineStageBase,
    *("_check_chunk_id", "_prepare_forward_infra", "_prepare_backward_infra", "_retrieve_recv_activations", "_retrieve_recv_grads"),
)


# Descriptions of tensors ----------------------------------------------------------------------------------------------

if HAS_METADATA:
    check_private(_stage.PipelineStage, "_compute_outputs", "_post_metadata_inference_cleanup", "_validate_inferred_metadata")
    check_private(_stage._PipelineStageBase, "_validate_stage_tensors")
    check_names(
        "torch.distributed.pipelining._utils.InferenceMode",
        "torch.distributed.pipelining._utils.PipeliningMetadataError",
        "torch.distributed.pipelining._utils._DTensorMeta",
        "torch.distributed.pipelining._utils._StageMeta",
        "torch.distributed.pipelining._utils._TensorMeta",
        "torch.distributed.pipelining._utils.extract_tensor_meta",
        "torch.distributed.pipelining._utils.extract_tensor_metas",
        "torch.distributed.pipelining._utils.to_local_if_dtensor",
        "torch.distributed.pipelining._utils.validate_and_normalize_to_tuple",
    )
else:
    check_private(_stage, "_RootArgPlaceholder")
metadata: Any = _utils if HAS_METADATA else older_metadata
"""`InferenceMode`, `PipeliningMetadataError`, `_DTensorMeta`, `_StageMeta`, `_TensorMeta` and the functions that build and check them."""


# Inputs of a stage ----------------------------------------------------------------------------------------------------


def build_recv_info(name: str, source: int | None, buffer: Tensor | None, meta: Any) -> Any:
    """Build torch's description of a received tensor, with the tensor in it."""
    info: Any
    if HAS_FORWARD_STATES:
        info = _stage._RecvInfo(name, source, meta)
        info.buffer = buffer
    elif HAS_METADATA:
        info = _stage._RecvInfo(name, source, buffer, meta)
    else:
        info = _stage._RecvInfo(name, source, buffer)
        info.tensor_meta = meta
    return info


def build_root_info(name: str, value: Tensor) -> Any:
    """Build torch's description of an input that comes from the caller."""
    if HAS_FORWARD_STATES:
        return _stage._RecvInfo(name, None, metadata.extract_tensor_meta(value), is_root_arg=True)
    if HAS_METADATA:
        return _stage._RecvInfo(name, None, None, metadata.extract_tensor_meta(value), is_root_arg=True)
    return _stage._RootArgPlaceholder(value)


def is_root_input(info: Any) -> bool:
    """Return whether a description is of an input that comes from the caller."""
    return bool(info.is_root_arg) if HAS_METADATA else not isinstance(info, _stage._RecvInfo)


# Names of 2.15 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _PipelineStageInfo:
    """Which forward a context around it is for."""

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False
    """Whether the forward only finds out shapes."""


PipelineStageInfo: Any = getattr(_stage, "PipelineStageInfo", _PipelineStageInfo)
