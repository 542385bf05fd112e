"""What the installed torch's pipelining package has, and stand-ins for what an older one lacks.

`torch.distributed.pipelining` changes with every release: 2.12 introduced descriptions of tensors between stages, 2.14 microbatches
passed to `step` as lists, 2.15 waits as actions and outputs that are released once they are sent. All of these differences are
resolved here, so that the other modules read the same on every release.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import _utils, schedules, stage
from torch.distributed.tensor import DTensor

HAS_METADATA = hasattr(_utils, "InferenceMode")
"""Whether torch describes the tensors between stages (since 2.12). Before, a stage keeps examples of them."""
HAS_FORWARD_STATES = hasattr(stage, "_ForwardChunkState")
"""Whether a stage can release outputs before their backward (since 2.15); they are then in `_forward_chunk_states`, not `fwd_cache`."""
WRITES_WAITS = hasattr(schedules, "WAIT_SEND_F")
"""Whether orders contain the waits for sends and reductions (since 2.15): torch then refuses a send without its wait."""
FINALIZES_BACKWARD = hasattr(stage, "GradientReductionHandle")
"""Whether FSDP reduces gradients asynchronously, when told to (since 2.15)."""


# Descriptions of tensors ----------------------------------------------------------------------------------------------

if HAS_METADATA:
    from torch.distributed.pipelining._utils import (
        InferenceMode,
        PipeliningMetadataError,
        _DTensorMeta,
        _StageMeta,
        _TensorMeta,
        extract_tensor_meta,
        extract_tensor_metas,
        to_local_if_dtensor,
        validate_and_normalize_to_tuple,
    )
else:
    from torch.distributed.pipelining._utils import PipeliningShapeError

    class PipeliningMetadataError(PipeliningShapeError):  # type: ignore[no-redef, misc]
        """Tensors between stages that do not fit together."""

    @dataclass(frozen=True)
    class _TensorMeta:  # type: ignore[no-redef]
        shape: Any
        stride: tuple[int, ...]
        dtype: Any
        requires_grad: bool

        @staticmethod
        def from_tensor(tensor: Tensor) -> _TensorMeta:
            return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)

    class _DTensorMeta(_TensorMeta):  # type: ignore[no-redef, misc]
        """Describes nothing: DTensors between stages need torch 2.12."""

        @staticmethod
        def from_dtensor(tensor: DTensor) -> _DTensorMeta:
            raise PipeliningMetadataError(
                "an activation between stages is a DTensor, which needs torch 2.12 or later: update torch, or call to_local() at the end "
                "of the stage"
            )

    @dataclass
    class _StageMeta:  # type: ignore[no-redef]
        inputs: Any = None
        outputs: Any = None
        input_grads: Any = None
        output_grads: Any = None

    class InferenceMode(Enum):  # type: ignore[no-redef]
        STATIC = "static"
        DYNAMIC = "dynamic"

        @classmethod
        def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
            return meta.inputs is None or meta.outputs is None

    def extract_tensor_meta(tensor: Tensor) -> _TensorMeta:
        return _TensorMeta.from_tensor(tensor)

    def extract_tensor_metas(tensors: Any, allow_none: bool = False) -> Any:
        return None if tensors is None else tuple(None if tensor is None else extract_tensor_meta(tensor) for tensor in tensors)

    def to_local_if_dtensor(tensor: Tensor, detach: bool = False) -> Tensor:
        local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach() if detach else local

    def validate_and_normalize_to_tuple(args: Any, allow_none: bool = False) -> Any:
        values = (args,) if isinstance(args, Tensor) else tuple(args)
        for position, value in enumerate(values):
            if not isinstance(value, Tensor) and not (allow_none and value is None):
                raise PipeliningMetadataError(
                    f"value {position} between stages is a {type(value).__name__}: stages pass tensors to each other, pass other values "
                    "as keyword arguments"
                )
        return values


# Inputs of a stage ----------------------------------------------------------------------------------------------------


def build_recv_info(name: str, source: int | None, buffer: Tensor | None, meta: Any) -> Any:
    """Build torch's description of a received tensor, with the tensor in it."""
    info: Any
    if HAS_FORWARD_STATES:
        info = stage._RecvInfo(name, source, meta)
        info.buffer = buffer
    elif HAS_METADATA:
        info = stage._RecvInfo(name, source, buffer, meta)  # type: ignore[call-arg, arg-type]
    else:
        info = stage._RecvInfo(name, source, buffer)  # type: ignore[arg-type]
        info.tensor_meta = meta
    return info


def build_root_info(name: str, value: Tensor) -> Any:
    """Build torch's description of an input that comes from the caller."""
    if HAS_FORWARD_STATES:
        return stage._RecvInfo(name, None, extract_tensor_meta(value), is_root_arg=True)
    if HAS_METADATA:
        return stage._RecvInfo(name, None, None, extract_tensor_meta(value), is_root_arg=True)  # type: ignore[call-arg, arg-type]
    return stage._RootArgPlaceholder(value)  # type: ignore[attr-defined]


def is_root_input(info: Any) -> bool:
    """Return whether a description is of an input that comes from the caller."""
    return bool(info.is_root_arg) if HAS_METADATA else not isinstance(info, stage._RecvInfo)


# Names of 2.15 --------------------------------------------------------------------------------------------------------

if hasattr(stage, "PipelineStageInfo"):
    PipelineStageInfo = stage.PipelineStageInfo
else:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PipelineStageInfo:  # type: ignore[no-redef]
        """Which forward a context around it is for."""

        stage_index: int
        microbatch_index: int
        is_metadata_inference: bool = False
        """Whether the forward only finds out shapes."""
