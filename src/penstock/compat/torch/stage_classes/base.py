"""What all stages share: how they compute.

The parts that a program sees when it drives a stage by hand, its caches and the descriptions of what it receives and where it sends,
are inherited from torch. How a stage computes is ours: the backward is split at the operator, outputs are kept in the order of
microbatches, and gradients of earlier steps are not scaled again.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining._utils import flatten_args
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from penstock.compat.torch._backward import Grads
from penstock.compat.torch._debug import map_debug_info, stage_log
from penstock.compat.torch.installed import (
    FINALIZES_BACKWARD,
    HAS_FORWARD_STATES,
    HAS_METADATA,
    PipelineStageInfo,
    _StageMeta,
    is_root_input,
)
from penstock.compat.torch.stage_classes.data_parallel import EarlierGradients, average_replicas, synchronize_on_last
from penstock.compat.torch.stage_classes.messages import BatchShare
from penstock.compat.torch.stage_classes.split_backward import StageBackward
from penstock.errors import StageCallError
from penstock.runtime.tensors.dtensor import wait_for_collective

ForwardContextFactory = Callable[[PipelineStageInfo], AbstractContextManager[Any]]


class _PipelineStageBase(_torch_stage._PipelineStageBase):
    """One stage of a pipeline on its rank.

    Beyond torch's own methods, a schedule calls these in each step: `open_step` before anything else; `begin_step` when the order that
    the step runs is known (a program's own `_step_microbatches` leaves it out); `finish_sending` after the last action; `end_step`
    once, whether the step succeeded or not. After a failure it calls `abandon_step` before `end_step`.
    """

    # Defaults for stages whose constructor never ran, as in tests.
    in_step = False
    _backward: StageBackward | None = None
    _split_chunks: frozenset[int] = frozenset()
    _earlier: EarlierGradients | None = None
    _output_chunk_ids: list[int] | None = None
    _reduction_started = False
    """Whether gradients are being reduced, on a torch that does not say so itself."""
    gradients_deferred = False
    """Whether this and earlier steps have left their gradients to a later step to reduce and scale."""

    if not HAS_FORWARD_STATES:
        p2p_per_edge = False
        """Whether each pair of ranks and direction has its own communicator: an option of torch 2.15."""
    if not HAS_METADATA:
        _runtime_validate = False
        _inference_mode: Any = None

        @property
        def _stage_meta(self) -> _StageMeta:
            return self.__dict__.setdefault("_described", _StageMeta())

        @property
        def _user_meta(self) -> _StageMeta:
            outputs = getattr(self, "_outputs_meta", None)
            return _StageMeta(getattr(self, "inputs_meta", None), outputs)

        def _validate_inferred_metadata(self) -> None:
            """Check nothing: shapes that the constructor was given are examples here."""

    # Steps ------------------------------------------------------------------------------------------------------------

    def open_step(self, scale: int, shares: dict[int, BatchShare] | None = None) -> None:
        """Open a step, once; further calls in the same step do nothing.

        The step's gradients will be divided by `scale`. `shares` holds each microbatch's share of the batch, as far as it is known; the
        stages of one rank are given the same dict, which is filled in by messages from the other ranks.
        """
        if self.in_step:
            return
        self.in_step, self._split_chunks = True, frozenset()
        if self.has_backward and scale != 1 and isinstance(self.submod, nn.Module) and not self.gradients_deferred:
            self._earlier = EarlierGradients(self.submod.parameters(), copy=isinstance(self.submod, DistributedDataParallel))

    def begin_step(self, split: frozenset[int], scale: int) -> None:
        """Begin to run an order that splits the backward of the microbatches in `split`."""
        self.open_step(scale)
        self._split_chunks = split
        self._get_backward().begin(bool(split))

    def end_step(self, failed: bool = False) -> None:
        self.in_step = False
        if self._earlier is not None and (failed or not self.gradients_deferred):
            if failed:
                self._earlier.restore()
            else:
                self._earlier.add_back()
            self._earlier = None
        if failed:
            self.clear_runtime_states()

    def finish_sending(self) -> None:
        """Wait for sends that the schedule does not know of."""

    def has_communicated(self) -> bool:
        """Return whether this step has begun to send or receive."""
        return True

    def abandon_step(self, receives: dict[tuple[int, int], Sequence[Any]], communicated: bool) -> None:
        """Give up a failed step with these receives posted; `communicated` says whether any stage of this rank has communicated."""

    def _get_backward(self) -> StageBackward:
        if self._backward is None or self._backward.module is not self.submod:
            self._backward = StageBackward(self.stage_index, self.submod)
        return self._backward

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide this step's gradients, then add them to those of earlier steps."""
        super().scale_grads(grad_scale_factor)
        self.gradients_deferred = False
        if self._earlier is not None:
            self._earlier.add_back()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._output_chunk_ids = []
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()
        if self._backward is not None:
            self._backward.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return the messages that open connections between ranks; none from a rank to itself, if it holds both stages."""
        get_ops = getattr(super(), "_get_init_p2p_neighbors_ops", list)  # torch 2.15 opens them itself
        return [op for op in get_ops() if op.group_peer != self.group_rank]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Return the sends of a microbatch's outputs, after waiting for collectives that still produce them."""
        return _wait_for_tensors(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Return the sends of the gradients of a microbatch's inputs."""
        return _wait_for_tensors(super().get_bwd_send_ops(bwd_chunk_id))

    # Outputs between forward and backward -----------------------------------------------------------------------------

    def _keep_forward(self, chunk: int, outputs: tuple[Any, ...], values: list[Any]) -> None:
        """Keep a microbatch's outputs and inputs until its backward."""
        if HAS_FORWARD_STATES:
            self._forward_chunk_states[chunk] = self._make_forward_chunk_state(outputs, values)
        else:
            self.fwd_cache[chunk] = outputs, values

    def _read_outputs(self, chunk: int) -> tuple[Any, ...]:
        """Return a microbatch's outputs; `None` for those that were released."""
        if HAS_FORWARD_STATES:
            return tuple(self._forward_chunk_states[chunk].live_outputs)
        return tuple(None if isinstance(output, GradientEdge) else output for output in self.fwd_cache[chunk][0])

    def _take_forward(self, chunk: int) -> tuple[tuple[Any, ...], list[Any]]:
        """Return a microbatch's outputs and inputs and forget them. Instead of a released output there is its place in the graph."""
        if HAS_FORWARD_STATES:
            state = self._forward_chunk_states.pop(chunk)
            return state.stage_output_for_backward(), state.input_values
        outputs, values = self.fwd_cache.pop(chunk)
        return outputs, values

    def forget_forward(self, chunk: int) -> None:
        """Free a microbatch's outputs and inputs, if there are any: there will be no backward."""
        (self._forward_chunk_states if HAS_FORWARD_STATES else self.fwd_cache).pop(chunk, None)

    def _mark_as_sent(self, chunk: int) -> None:
        """Note that a microbatch's outputs are being sent."""
        if HAS_FORWARD_STATES:
            state = self._forward_chunk_states[chunk]
            state.send_pending[:] = [True] * len(state.send_pending)

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Drop this stage's references to outputs that were sent; the backward starts from their places in the graph.

        Outputs stay on the last stage, in DDP, which reads them in the backward, and with a `dw_builder`, which may.
        """
        if HAS_FORWARD_STATES:
            super().release_fwd_send_outputs(fwd_chunk_id)
            return
        if fwd_chunk_id not in self.fwd_cache or self.is_last:
            return
        if isinstance(self.submod, DistributedDataParallel) or self.dw_builder is not None:
            return
        outputs, values = self.fwd_cache[fwd_chunk_id]
        self.fwd_cache[fwd_chunk_id] = tuple(map(_release, outputs)), values

    # Contexts ---------------------------------------------------------------------------------------------------------

    def register_forward_context(self, context_factory: ForwardContextFactory) -> RemovableHandle:
        """Run every forward of this stage in a context: `context_factory(info)` is called for each, with the microbatch in `info`.

        At most one may be registered; `remove()` of the returned handle takes it away.
        """
        contexts = self._list_forward_contexts()
        if contexts:
            raise RuntimeError(
                f"stage {self.stage_index} has a pipeline forward context already registered: remove its handle before registering another"
            )
        handle = RemovableHandle(contexts)
        contexts[handle.id] = context_factory
        return handle

    def _list_forward_contexts(self) -> OrderedDict[int, ForwardContextFactory]:
        contexts: OrderedDict[int, ForwardContextFactory] = self.__dict__.setdefault("_forward_contexts", OrderedDict())
        return contexts

    def _run_in_context(self, chunk: int, forward: Callable[[], Any]) -> Any:
        """Run a forward in the registered context, if there is one."""
        contexts = self.__dict__.get("_forward_contexts")
        if not contexts:
            return forward()
        (factory,) = contexts.values()
        outputs: list[Any] = []
        with factory(PipelineStageInfo(stage_index=self.stage_index, microbatch_index=chunk)):
            outputs.append(forward())
        if not outputs:
            raise RuntimeError(
                f"a pipeline forward context suppressed an exception of stage {self.stage_index}, which therefore has no output: let "
                "exceptions pass through it"
            )
        return outputs[0]

    # Forward ----------------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Run a microbatch forward: the first stage on `args`, the others on the received activations, all of them on `kwargs`."""
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        named = kwargs or {}
        self._check_inputs(inputs)

        def forward() -> Any:
            return self.forward_maybe_with_nosync(*inputs, **named)  # type: ignore[no-untyped-call]

        def run() -> Any:
            return self._run_in_context(fwd_chunk_id, forward)

        if FINALIZES_BACKWARD and self.has_backward and isinstance(self.submod, FSDPModule):
            self.submod.set_manual_backward_finalization(True)
        try:
            split = self.has_backward and fwd_chunk_id in self._split_chunks and self.dw_builder is None
            output = self._get_backward().forward(fwd_chunk_id, run) if split else run()
        except Exception as error:
            values = f"args: {map_debug_info(inputs)}\n    kwargs: {map_debug_info(named)}"
            kind = StageCallError if isinstance(error, TypeError) else RuntimeError
            raise kind(f"{self.log_prefix} failed to run forward:\n    {values}\n    {type(error).__name__}: {error}") from error
        outputs = _normalize_model_output_as_tuple(output)
        if self.is_last and save_forward_output:
            self._keep_output(fwd_chunk_id, output)
        self._keep_forward(fwd_chunk_id, outputs, flatten_args(inputs) + flatten_args(named))
        if stage_log.isEnabledFor(logging.DEBUG):
            stage_log.debug("%s Forwarded chunk %s, outputs: %s", self.log_prefix, fwd_chunk_id, map_debug_info(output))
        self._check_outputs(outputs)
        if not self.has_backward:
            self._drop_inputs(fwd_chunk_id)
        return output

    def _keep_output(self, chunk: int, output: Any) -> None:
        """Insert an output in the order of microbatches, whatever order they run in."""
        if self._output_chunk_ids is None or len(self._output_chunk_ids) != len(self.output_chunks):
            self._output_chunk_ids = [-1] * len(self.output_chunks)
        position = bisect(self._output_chunk_ids, chunk)
        self._output_chunk_ids.insert(position, chunk)
        self.output_chunks.insert(position, output)

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if self._runtime_validate:
            self._validate_stage_tensors(f"Stage {self.stage_index} forward inputs", self._stage_meta.inputs, tuple(inputs))

    def _check_outputs(self, outputs: tuple[Any, ...]) -> None:
        if self._runtime_validate and not self.is_last:
            self._validate_stage_tensors(f"Stage {self.stage_index} forward outputs", self._stage_meta.outputs, outputs)

    def _check_grads(self, which: str, grads: Grads) -> None:
        if self._runtime_validate:
            self._validate_stage_tensors(f"Stage {self.stage_index} backward ({which})", getattr(self._stage_meta, which), grads)

    def _drop_inputs(self, chunk: int) -> None:
        """Free the received inputs of a microbatch. Torch's buffers stay for the next step, so that there is nothing to do."""

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """Run a microbatch backward, from the loss or from the received gradients: the whole of it, or only for the input."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, values = self._take_forward(bwd_chunk_id)
        grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
        if grads is not None:
            self._check_grads("output_grads", grads)
        bwd_kwargs = {
            "stage_output": loss if self.is_last else outputs,
            "output_grads": grads,
            "input_values": values,
            "chunk": bwd_chunk_id,
        }
        whole = full_backward or self.dw_builder is not None
        input_grads, _ = self.backward_maybe_with_nosync("full" if whole else "input", bwd_kwargs, last_backward)
        runner = _run_nothing if self.dw_builder is None else self.dw_builder()
        if not full_backward:
            self.dw_runner[bwd_chunk_id] = runner
        else:
            runner()
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = input_grads[: self._count_received_inputs(bwd_chunk_id)]
            self._check_grads("input_grads", self.bwd_cache[bwd_chunk_id])
        if self.is_last and not self.is_first:
            _free_graph(outputs)
        stage_log.debug("%s Backwarded chunk %s", self.log_prefix, bwd_chunk_id)

    def _count_received_inputs(self, chunk: int) -> int:
        """Count the inputs that came from another stage; the rest are keyword arguments."""
        return sum(not is_root_input(info) for info in self.args_recv_info.get(chunk, ()))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the backward for the weights that `backward_one_chunk(full_backward=False)` left."""
        if not self.has_backward:
            return
        if bwd_chunk_id not in self.dw_runner:
            raise AssertionError(
                f"{self.log_prefix} Attempted to run backward_weight_one_chunk for chunk {bwd_chunk_id}"
                " without first calling `backward_one_chunk(full_backward=False)`"
            )
        runner = self.dw_runner.pop(bwd_chunk_id)
        if self.dw_builder is not None:
            runner()
        else:
            self.backward_maybe_with_nosync("weight", {"chunk": bwd_chunk_id, "stage_output": ()}, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> tuple[Grads, Any]:
        """Run one backward (`full`, `input` or `weight`), with the synchronization that DDP or FSDP around the module needs."""
        backward, chunk = self._get_backward(), bwd_kwargs.get("chunk", 0)
        values: Any = [bwd_kwargs.get(name) for name in ("stage_output", "output_grads", "input_values")]
        replicas = self.submod if isinstance(self.submod, DistributedDataParallel) else None
        split = replicas is not None and (bool(self._split_chunks) or backward_type != "full")
        with synchronize_on_last(self.submod, values[0], last_backward and not split):
            if backward_type == "full":
                input_grads = backward.backward(chunk, *values)
            elif backward_type == "input":
                input_grads = backward.backward_input(chunk, *values)
            elif backward_type == "weight":
                backward.backward_weight(chunk)
                input_grads = ()
            else:
                raise RuntimeError(f"Unknown backward type: {backward_type}")
        if replicas is not None and split and last_backward:
            average_replicas(replicas)
        return input_grads, None

    # Reducing gradients -----------------------------------------------------------------------------------------------

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of FSDP modules, then scale all gradients."""
        if isinstance(self.submod, FSDPModule) and self.has_backward:
            self.start_gradient_reduction()
            self.wait_for_gradient_reduction(grad_scale_factor)
        else:
            self._finish_gradients(grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Start to reduce the gradients of an FSDP module. Before torch 2.15, FSDP has reduced them when this returns."""
        if FINALIZES_BACKWARD:
            super().start_gradient_reduction()
            return
        self._refuse_without_fsdp()
        if self._reduction_started:
            raise RuntimeError(f"{self.log_prefix} A gradient reduction is already pending: wait for it first")
        super().perform_reduce_grad(1)
        self._reduction_started = True

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait until the gradients of an FSDP module are reduced, then scale them."""
        if FINALIZES_BACKWARD:
            super().wait_for_gradient_reduction(1)
        else:
            self._refuse_without_fsdp()
            if not self._reduction_started:
                raise RuntimeError(f"{self.log_prefix} No gradient reduction is pending: start one first")
            self._reduction_started = False
        self._finish_gradients(grad_scale_factor)

    def _refuse_without_fsdp(self) -> None:
        if not isinstance(self.submod, FSDPModule):
            raise RuntimeError(f"{self.log_prefix} Asynchronous gradient reduction requires FSDP: use perform_reduce_grad")

    def _finish_gradients(self, scale: int) -> None:
        """Scale the gradients, which this step and those that deferred theirs to it have computed."""
        if scale != 1:
            self.scale_grads(scale)
        self.gradients_deferred = False


def _release(output: Any) -> Any:
    """Return the place of an output in the graph; of an output that needs no gradient, `None`; of anything but a plain tensor, itself."""
    if type(output) is not Tensor:
        return output
    return get_gradient_edge(output) if output.requires_grad else None


def _wait_for_tensors(ops: list[Any]) -> list[Any]:
    for op in ops:
        op.tensor = wait_for_collective(op.tensor)
    return ops


def _run_nothing() -> None:
    """Stand in `dw_runner` for torch's function that runs the backward for the weights; `StageBackward` runs it here."""


def _free_graph(outputs: Sequence[Any]) -> None:
    """Free the graph behind outputs that only the caller still reads."""
    for tensor in outputs:
        if isinstance(tensor, Tensor) and not tensor._is_view():  # a view cannot be detached in place
            tensor.detach_()
