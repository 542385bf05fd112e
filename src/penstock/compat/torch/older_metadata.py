"""Descriptions of tensors between stages, for torch 2.11, which has none: the names of torch 2.12, as far as the drop-in reads them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import _utils
from torch.distributed.tensor import DTensor

_ShapeError: type[RuntimeError] = getattr(_utils, "PipeliningShapeError", RuntimeError)


class PipeliningMetadataError(_ShapeError):  # type: ignore[misc, valid-type]
    """Tensors between stages that do not fit together."""


@dataclass(frozen=True)
class _TensorMeta:
    shape: Any
    stride: tuple[int, ...]
    dtype: Any
    requires_grad: bool

    @staticmethod
    def from_tensor(tensor: Tensor) -> _TensorMeta:
        return _TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


class _DTensorMeta(_TensorMeta):
    """Describes nothing: DTensors between stages need torch 2.12."""

    @staticmethod
    def from_dtensor(tensor: DTensor) -> _DTensorMeta:
        raise PipeliningMetadataError(
            "an activation between stages is a DTensor, which needs torch 2.12 or later: update torch, or call to_local() at the end "
            "of the stage"
        )


@dataclass
class _StageMeta:
    inputs: Any = None
    outputs: Any = None
    input_grads: Any = None
    output_grads: Any = None


class InferenceMode(Enum):
    STATIC = "static"
    DYNAMIC = "dynamic"

    @classmethod
    def needs_dynamic(cls, meta: _StageMeta, stage_has_backward: bool) -> bool:
        return meta.inputs is None or meta.outputs is None


extract_tensor_meta = _TensorMeta.from_tensor


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
