"""The stage around a module of the user's.

On the CPU it exchanges `StageMessages` with its neighbours, so it needs no forward ahead of the first step and accepts microbatches
of any shapes. On other devices it agrees on shapes as torch's stage does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple
from torch.distributed.tensor import DTensor

from penstock.compat.torch._backward import Grads
from penstock.compat.torch.installed import (
    HAS_METADATA,
    InferenceMode,
    _DTensorMeta,
    build_recv_info,
    build_root_info,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
)
from penstock.compat.torch.stage_classes.base import _PipelineStageBase
from penstock.compat.torch.stage_classes.messages import ACTIVATIONS, GRADIENTS, BatchShare, Neighbour, StageMessages
from penstock.runtime.tensors.dtensor import is_async_collective, wait_for_collective


class PipelineStage(_PipelineStageBase, _torch_stage.PipelineStage):
    """A stage around a module of the user's: `PipelineStage(submodule, stage_index, num_stages, device, ...)`, as in torch."""

    _messages: StageMessages | None = None
    """Set once a schedule has decided that the stage uses messages."""
    _shares: dict[int, BatchShare] | None = None
    """Each microbatch's share of this step's batch, as far as this rank knows it."""
    _buffers: list[tuple[Tensor, Tensor]] | None = None
    """The module's buffers and their values from before shapes were agreed on."""
    _received: dict[int, tuple[Tensor | None, ...]] | None = None
    """By microbatch: the activations that messages, or the stage before on this rank, brought."""

    def open_step(self, scale: int, shares: dict[int, BatchShare] | None = None) -> None:
        if not self.in_step:
            self._shares = {} if shares is None else shares
            if self._messages is not None:
                self._messages.begin_step(self._shares)
        super().open_step(scale, shares)

    def finish_sending(self) -> None:
        if self._messages is not None:
            self._messages.finish_sending()

    def has_communicated(self) -> bool:
        return self._messages is not None and self._messages.communicated

    def abandon_step(self, receives: dict[tuple[int, int], Sequence[Any]], communicated: bool) -> None:
        if self._messages is not None:
            self._messages.abandon_step(receives, communicated=communicated)

    def use_messages(self, num_microbatches: int, has_backward: bool) -> bool:
        """Set up to exchange messages, which needs no agreement on shapes; return `False` on devices other than the CPU."""
        if torch.device(self.device).type != "cpu":
            return False
        self.chunks = num_microbatches
        if self._messages is None:
            self._messages = StageMessages(self.stage_index, self.group)
            if self.in_step:
                self._messages.begin_step({} if self._shares is None else self._shares)
        static = not InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._inference_mode = InferenceMode.STATIC if static else InferenceMode.DYNAMIC
        meta, user_meta = self._stage_meta, self._user_meta
        meta.inputs, meta.outputs = (user_meta.inputs, user_meta.outputs) if static else (None, None)
        self._received = {}
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.grad_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}
        return True

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, has_backward: bool = False
    ) -> Any:
        """Agree on shapes, unless the stage uses messages."""
        if self._messages is not None:
            return None
        more = {"has_backward": has_backward} if HAS_METADATA else {}
        return super()._prepare_forward_infra(num_microbatches, args, kwargs, **more)

    def _prepare_backward_infra(
        self,
        num_microbatches: int,
        loss_fn: Any = None,
        target: Any = None,
        received_grad_meta: Any = None,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Agree on the shapes of gradients, unless the stage uses messages."""
        if self._messages is not None:
            return None
        if not HAS_METADATA:
            return super()._prepare_backward_infra(num_microbatches)
        options = {"loss_fn": loss_fn, "target": target, "received_grad_meta": received_grad_meta, "loss_kwargs": loss_kwargs}
        prepare = super()._prepare_backward_infra
        known = inspect.signature(prepare).parameters  # loss_kwargs came with torch 2.13
        return prepare(num_microbatches, **{name: value for name, value in options.items() if name in known})

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        """Run the forward that infers shapes, if the stage uses no messages; the module's buffers are restored afterwards."""
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        for value in args:
            if not self.is_first and isinstance(value, Tensor):
                value.detach().zero_()  # it stands for another stage's output, but is uninitialized memory
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Run that forward on torch 2.11, which has another function for it."""
        self._inference_mode = InferenceMode.DYNAMIC
        before = [(buffer, buffer.clone()) for buffer in self.submod.buffers()]
        try:
            return cast(Any, super())._shape_inference(args, kwargs)
        finally:
            for buffer, value in before:
                buffer.copy_(value)

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        for buffer, before in self._buffers or ():
            buffer.copy_(before)
        self._buffers = None

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if self._messages is not None and self._stage_meta.inputs is None:
            self._stage_meta.inputs = extract_tensor_metas(validate_and_normalize_to_tuple(tuple(inputs)))
        if self._messages is not None and self.is_first and not self.args_recv_info.get(0):
            # They come from the caller in every microbatch.
            infos = tuple(build_root_info(f"root_input_{k}", value) for k, value in enumerate(inputs) if isinstance(value, Tensor))
            self.args_recv_info = dict.fromkeys(self.args_recv_info, infos)
        super()._check_inputs(inputs)

    def _check_grads(self, which: str, grads: Grads) -> None:
        if self._messages is not None and getattr(self._stage_meta, which) is None:
            setattr(self._stage_meta, which, extract_tensor_metas(grads, allow_none=True))
        super()._check_grads(which, grads)

    def _drop_inputs(self, chunk: int) -> None:
        if self._messages is not None and not self.is_first:
            self.args_recv_info[chunk] = ()
            if self._received is not None:
                self._received.pop(chunk, None)

    def _check_outputs(self, outputs: tuple[Any, ...]) -> None:
        if self._messages is not None:
            if not self.is_last:
                validate_and_normalize_to_tuple(outputs)
            if len(self.act_send_info) != len(outputs):
                self.act_send_info = {k: [] if self.is_last else [self.stage_index + 1] for k in range(len(outputs))}
        if self._messages is not None and self._stage_meta.outputs is None and all(isinstance(output, Tensor) for output in outputs):
            self._stage_meta.outputs = extract_tensor_metas(outputs)
            self._validate_inferred_metadata()
        super()._check_outputs(outputs)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _neighbour(self, offset: int) -> Neighbour:
        other = self.stage_index + offset
        return Neighbour(other, self.stage_index_to_group_rank[other])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self._messages is None:
            return super().get_fwd_send_ops(fwd_chunk_id)
        if self.is_last:
            return []
        # Without a backward, nobody reads the outputs again.
        outputs = self._read_outputs(fwd_chunk_id) if self.has_backward else self._take_forward(fwd_chunk_id)[0]
        if self.has_backward:
            self._mark_as_sent(fwd_chunk_id)
        return self._messages.send(ACTIVATIONS, fwd_chunk_id, self._neighbour(1), _build_message(outputs))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if self._messages is None:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        if self.is_first:
            return []
        return self._messages.receive(ACTIVATIONS, fwd_chunk_id, self._neighbour(-1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self._messages is None:
            return super().get_bwd_send_ops(bwd_chunk_id)
        if not self.has_backward or self.is_first:
            return []
        self._check_chunk_id(bwd_chunk_id)
        inputs = (self._received or {}).get(bwd_chunk_id, ())
        grads = _fill_with_zeros(self.bwd_cache.pop(bwd_chunk_id), inputs)
        self._drop_inputs(bwd_chunk_id)
        return self._messages.send(GRADIENTS, bwd_chunk_id, self._neighbour(-1), _build_message(grads))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self._messages is None:
            return super().get_bwd_recv_ops(bwd_chunk_id)
        if not self.has_backward or self.is_last:
            return []
        return self._messages.receive(GRADIENTS, bwd_chunk_id, self._neighbour(1))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        if self._messages is not None and (ACTIVATIONS, fwd_chunk_id) in self._messages.posted:
            value = self._messages.take(ACTIVATIONS, fwd_chunk_id)
            self.args_recv_info[fwd_chunk_id] = self._describe_received("recv", self.stage_index - 1, value)
        if self._messages is None:
            return tuple(super()._retrieve_recv_activations(fwd_chunk_id))
        buffers = tuple(info.buffer for info in self.args_recv_info[fwd_chunk_id])
        activations = tuple(super()._retrieve_recv_activations(fwd_chunk_id))
        if not HAS_METADATA:
            for tensor, info in zip(activations, self.args_recv_info[fwd_chunk_id], strict=True):
                tensor.requires_grad_(self.has_backward and cast(Any, info.tensor_meta).requires_grad)
        if self._received is not None and self.has_backward:
            self._received[fwd_chunk_id] = buffers
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Grads:
        if self._messages is not None and (GRADIENTS, bwd_chunk_id) in self._messages.posted:
            value = self._messages.take(GRADIENTS, bwd_chunk_id)
            self.grad_recv_info[bwd_chunk_id] = self._describe_received("recv_grad", self.stage_index + 1, value)
        grads = tuple(super()._retrieve_recv_grads(bwd_chunk_id))
        if self._messages is not None:
            self.grad_recv_info[bwd_chunk_id] = ()
        return grads

    def _describe_received(self, what: str, source: int, value: Any) -> tuple[Any, ...]:
        """Build the `_RecvInfo` of each received tensor, with the tensor as its buffer."""
        tensors, metas = value if isinstance(value, tuple) else (value, [None] * len(value))
        name, infos = f"{what}_for_{self.stage_index}_from_{source}", []
        for tensor, meta in zip(tensors, metas, strict=True):
            if tensor is None:
                infos.append(build_recv_info(name, source, None, None))
            else:
                infos.append(build_recv_info(name, source, tensor.detach(), meta or extract_tensor_meta(tensor)))
        return tuple(infos)

    # Between stages of one rank ---------------------------------------------------------------------------------------

    def get_local_bwd_output(self, mb_index: int) -> Any:
        grads = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        self._drop_inputs(mb_index)
        return grads

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        if self._messages is None:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)
            return
        outputs = _normalize_model_output_as_tuple(prev_stage_outputs)
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                raise AssertionError(f"expected tensor values as outputs from prev stage, got {type(tensor)}")
        self.args_recv_info[mb_index] = self._describe_received("recv", self.stage_index - 1, _build_message(outputs))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Grads, mb_index: int) -> None:
        if self._messages is None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
            return
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        if not self.has_backward or self.is_last:
            raise AssertionError("can't set bwd input if this stage doesn't have backward, or is last")
        grads = _fill_with_zeros(next_stage_bwd_outputs, self._read_outputs(mb_index))
        self.grad_recv_info[mb_index] = self._describe_received("recv_grad", self.stage_index + 1, _build_message(grads))


def _fill_with_zeros(grads: Grads, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace missing gradients of tensors that require one by zeros."""
    return [
        torch.zeros_like(tensor) if grad is None and tensor is not None and tensor.requires_grad else grad
        for grad, tensor in zip(grads, tensors, strict=True)
    ]


def _wait_for(tensor: Tensor | None) -> Tensor | None:
    """Wait for the collective that produces a tensor; the result requires a gradient if the tensor did."""
    if tensor is None or type(tensor) is Tensor or not is_async_collective(tensor):
        return tensor
    whole: Tensor = wait_for_collective(tensor)
    return whole.detach().requires_grad_(tensor.requires_grad)


def _build_message(tensors: Sequence[Tensor | None]) -> Any:
    """Build the value to send: the tensors, after waiting for collectives; of DTensors the local parts, with their layouts."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return [_wait_for(tensor) for tensor in tensors]
    local = [None if tensor is None else _wait_for(to_local_if_dtensor(tensor, detach=True)) for tensor in tensors]
    metas = [_DTensorMeta.from_dtensor(tensor) if isinstance(tensor, DTensor) else None for tensor in tensors]
    return local, metas
