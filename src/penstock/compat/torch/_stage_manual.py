"""The stage that is one module of the user's.

On the host it talks to its neighbours in our frames, so that it needs no forward ahead of the first step and takes microbatches of
any shapes; on other devices it agrees on shapes as torch's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple, _RecvInfo
from torch.distributed.tensor import DTensor

from penstock.compat.torch._frames import ACTIVATIONS, GRADIENTS, Frames, Peer
from penstock.compat.torch._halves import Grads
from penstock.compat.torch._stage_base import _PipelineStageBase
from penstock.compat.torch._utils import (
    InferenceMode,
    _DTensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
)
from penstock.runtime.tensors.dtensor import is_async_collective, wait_for_collective


class PipelineStage(_PipelineStageBase, _torch_stage.PipelineStage):
    """A stage that is one module of the user's: `PipelineStage(submodule, stage_index, num_stages, device, ...)`, as torch's."""

    _frames: Frames | None = None
    """What it tells its neighbours by, once a schedule has set it up so."""
    _buffers: list[tuple[Tensor, Tensor]] | None = None
    """The module's buffers and what was in them before shapes were agreed on."""

    def _open_step(self, scale: int) -> None:
        if self._frames is not None and not self._in_step:
            self._frames.begin()
        super()._open_step(scale)

    def _finish_sending(self) -> None:
        if self._frames is not None:
            self._frames.finish_telling()

    def _talked(self) -> bool:
        return self._frames is not None and self._frames.talked

    def _give_up(self, receives: dict[tuple[int, int], Sequence[Any]], talked: bool) -> None:
        if self._frames is not None:
            self._frames.end(receives, talked=talked)

    def _use_frames(self, num_microbatches: int, has_backward: bool) -> bool:
        """Set up without any agreement; false on devices whose tensors do not go through frames."""
        if torch.device(self.device).type != "cpu":
            return False
        self.chunks = num_microbatches
        if self._frames is None:
            self._frames = Frames(self.stage_index, self.group)
            if self._in_step:
                self._frames.begin()
        static = not InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._inference_mode = InferenceMode.STATIC if static else InferenceMode.DYNAMIC
        meta, given = self._stage_meta, self._user_meta
        meta.inputs, meta.outputs = (given.inputs, given.outputs) if static else (None, None)
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.grad_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}
        return True

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        """Agree on shapes, where there are no frames."""
        return None if self._frames is not None else super()._prepare_forward_infra(num_microbatches, args, kwargs, has_backward)

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Agree on the shapes of gradients, where there are no frames."""
        if self._frames is not None:
            return None
        return super()._prepare_backward_infra(num_microbatches, loss_fn, target, received_grad_meta, loss_kwargs)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        """The forward by which shapes are agreed on where there are no frames: it leaves no trace in the module's buffers."""
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        for value in args:
            if not self.is_first and isinstance(value, Tensor):
                value.detach().zero_()  # what stands for another stage's output is memory that nobody has written
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        for buffer, before in self._buffers or ():
            buffer.copy_(before)
        self._buffers = None

    def _look_at_inputs(self, inputs: Sequence[Any]) -> None:
        if self._frames is not None and self._stage_meta.inputs is None:
            self._stage_meta.inputs = extract_tensor_metas(validate_and_normalize_to_tuple(tuple(inputs)))
        if self._frames is not None and self.is_first and not self.args_recv_info.get(0):
            self._describe_root_inputs()
        super()._look_at_inputs(inputs)

    def _describe_root_inputs(self) -> None:
        """The first stage's inputs come from the caller, in every microbatch."""
        metas = self._stage_meta.inputs or ()
        infos = tuple(_RecvInfo(f"root_input_{k}", None, None, meta, is_root_arg=True) for k, meta in enumerate(metas))
        self.args_recv_info = dict.fromkeys(self.args_recv_info, infos)

    def _look_at_grads(self, which: str, grads: Grads) -> None:
        if self._frames is not None and getattr(self._stage_meta, which) is None:
            setattr(self._stage_meta, which, extract_tensor_metas(grads, allow_none=True))
        super()._look_at_grads(which, grads)

    def _forget_inputs(self, chunk: int) -> None:
        if self._frames is not None and not self.is_first:
            self.args_recv_info[chunk] = ()

    def _look_at_outputs(self, outputs: tuple[Any, ...]) -> None:
        if self._frames is not None:
            if not self.is_last:
                validate_and_normalize_to_tuple(outputs)
            if len(self.act_send_info) != len(outputs):
                self.act_send_info = {k: [] if self.is_last else [self.stage_index + 1] for k in range(len(outputs))}
        if self._frames is not None and self._stage_meta.outputs is None and all(isinstance(each, Tensor) for each in outputs):
            self._stage_meta.outputs = extract_tensor_metas(outputs)
            self._validate_inferred_metadata()
        super()._look_at_outputs(outputs)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _peer(self, step: int) -> Peer:
        other = self.stage_index + step
        return Peer(other, self.stage_index_to_group_rank[other])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self._frames is None:
            return super().get_fwd_send_ops(fwd_chunk_id)
        if self.is_last:
            return []
        # Where nothing goes backward, outputs are not wanted again.
        outputs, _ = self.fwd_cache[fwd_chunk_id] if self.has_backward else self.fwd_cache.pop(fwd_chunk_id)
        return self._frames.send(ACTIVATIONS, fwd_chunk_id, self._peer(1), _as_message(outputs))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self._frames is None:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        if self.is_first:
            return []
        return self._frames.receive(ACTIVATIONS, fwd_chunk_id, self._peer(-1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self._frames is None:
            return super().get_bwd_send_ops(bwd_chunk_id)
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk_id(bwd_chunk_id)
        wanted = [info.buffer for info in self.args_recv_info[bwd_chunk_id]]
        grads = _or_zeros(self.bwd_cache.pop(bwd_chunk_id), wanted)
        self._forget_inputs(bwd_chunk_id)
        return self._frames.send(GRADIENTS, bwd_chunk_id, self._peer(-1), _as_message(grads))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self._frames is None:
            return super().get_bwd_recv_ops(bwd_chunk_id)
        if not self.has_backward or self.is_last:
            return []
        return self._frames.receive(GRADIENTS, bwd_chunk_id, self._peer(1))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        if self._frames is not None and (ACTIVATIONS, fwd_chunk_id) in self._frames.posted:
            value = self._frames.take(ACTIVATIONS, fwd_chunk_id)
            self.args_recv_info[fwd_chunk_id] = self._received("recv", self.stage_index - 1, value)
        return tuple(super()._retrieve_recv_activations(fwd_chunk_id))

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Grads:
        if self._frames is not None and (GRADIENTS, bwd_chunk_id) in self._frames.posted:
            value = self._frames.take(GRADIENTS, bwd_chunk_id)
            self.grad_recv_info[bwd_chunk_id] = self._received("recv_grad", self.stage_index + 1, value)
        found = tuple(super()._retrieve_recv_grads(bwd_chunk_id))
        if self._frames is not None:
            self.grad_recv_info[bwd_chunk_id] = ()
        return found

    def _received(self, what: str, source: int, value: Any) -> tuple[_RecvInfo, ...]:
        """Descriptions of what has come, with it in them."""
        tensors, metas = value if isinstance(value, tuple) else (value, [None] * len(value))
        name, made = f"{what}_for_{self.stage_index}_from_{source}", []
        for tensor, meta in zip(tensors, metas, strict=True):
            if tensor is None:
                made.append(_RecvInfo(name, source, None, None))
            else:
                made.append(_RecvInfo(name, source, tensor.detach(), meta or extract_tensor_meta(tensor)))
        return tuple(made)

    # On one rank ------------------------------------------------------------------------------------------------------

    def get_local_bwd_output(self, mb_index: int) -> Any:
        found = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        self._forget_inputs(mb_index)
        return found

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if self._frames is None:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)
            return
        outputs = _normalize_model_output_as_tuple(prev_stage_outputs)
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                raise AssertionError(f"expected tensor values as outputs from prev stage, got {type(tensor)}")
        self.args_recv_info[mb_index] = self._received("recv", self.stage_index - 1, _as_message(outputs))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Grads, mb_index: int) -> None:
        if self._frames is None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
            return
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        if not self.has_backward or self.is_last:
            raise AssertionError("can't set bwd input if this stage doesn't have backward, or is last")
        grads = _or_zeros(next_stage_bwd_outputs, self.fwd_cache[mb_index][0])
        self.grad_recv_info[mb_index] = self._received("recv_grad", self.stage_index + 1, _as_message(grads))


def _or_zeros(grads: Grads, wanted: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, zeros for those that did not come though they are wanted."""
    pairs = zip(grads, wanted, strict=True)
    return [torch.zeros_like(of) if grad is None and of is not None and of.requires_grad else grad for grad, of in pairs]


def _waited_for(tensor: Tensor | None) -> Tensor | None:
    """The tensor, once the collective that makes it is done; it says as before whether it wants a gradient."""
    if tensor is None or type(tensor) is Tensor or not is_async_collective(tensor):
        return tensor
    whole: Tensor = wait_for_collective(tensor)
    return whole.detach().requires_grad_(tensor.requires_grad)


def _as_message(tensors: Sequence[Tensor | None]) -> Any:
    """Tensors as they are, waited for if a collective is still making them; sharded ones as their local parts, with their layouts."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return [_waited_for(tensor) for tensor in tensors]
    local = [None if tensor is None else _waited_for(to_local_if_dtensor(tensor, detach=True)) for tensor in tensors]
    metas = [_DTensorMeta.from_dtensor(tensor) if isinstance(tensor, DTensor) else None for tensor in tensors]
    return local, metas
