"""All names of `torch.distributed.pipelining.stage`: one part of the model on its rank.

The parts that a program sees when it drives a stage by hand, its caches and the descriptions of what it receives and where it sends,
are inherited from torch, and so is the graph of a traced stage. How a stage computes is ours: `StageBackward` splits the backward at the
operator, outputs are kept in the order of microbatches, and `EarlierGradients` are not scaled again. On the CPU a `PipelineStage`
exchanges `StageMessages` with its neighbours, so it needs no forward ahead of the first step and accepts microbatches of any shapes. On
other devices it agrees on shapes as torch's stage does.
"""

from __future__ import annotations

import inspect
import logging
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining._utils import PipeInfo, flatten_args
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from penstock.compat.torch import _backward
from penstock.compat.torch._backward import (
    Grads,
    Group,
    build_backward_error,
    free_graph,
    pair_with_grads,
    stage_backward_input,
    stage_backward_weight,
    take_grad,
)
from penstock.compat.torch._debug import map_debug_info, stage_log
from penstock.compat.torch.installed import (
    FINALIZES_BACKWARD,
    HAS_FORWARD_STATES,
    HAS_METADATA,
    PipelineStageInfo,
    build_recv_info,
    build_root_info,
    is_root_input,
    metadata,
)
from penstock.compat.torch.stage_messages import ACTIVATIONS, GRADIENTS, BatchShare, Neighbour, StageMessages
from penstock.errors import StageCallError
from penstock.runtime.model.stage import Stage
from penstock.runtime.parallel.gradients import BufferBackup
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.dtensor import is_async_collective, wait_for_collective
from penstock.runtime.torch_internals.lookup import check_private, find_private
from penstock.runtime.transport.group import do_nothing

__all__ = ["PipelineStage", "PipelineStageInfo", "_PipelineStage", "_PipelineStageBase", "build_stage"]


def __getattr__(name: str) -> Any:
    """Look up a name of torch's module that is not exported: our own object, or torch's if we have none."""
    return getattr(next((module for module in (_backward, metadata) if name in vars(module)), _torch_stage), name)


_find_tensors: Callable[[Any], Iterable[Tensor]] = find_private("torch.nn.parallel.distributed._find_tensors")
ForwardContextFactory = Callable[[Any], AbstractContextManager[Any]]


class StageBackward:
    """Runs the backwards of one stage: whole, or split into one for the inputs and one for the weights.

    A split that is announced, by running the forward through `forward`, defers weight gradients at the operator. A split that was not
    announced is found in the finished graph.
    """

    def __init__(self, index: int, module: Any) -> None:
        self.module = module
        self.stage = Stage(index, module)
        self.splits = isinstance(module, nn.Module) and self.stage.splits
        """Whether the module can be split. The backward of a compiled module runs whole, in the first half."""
        self.deferrals: dict[int, Deferral] = {}
        """By microbatch: the weight gradients that its forward deferred."""
        self.groups: dict[int, list[Group]] = {}
        """By microbatch: the same for a split that was not announced."""

    def begin(self, split: bool) -> None:
        """Begin a step: parameters may have been replaced, frozen or given hooks, and the module compiled, since the last one."""
        self.clear()
        self.stage.refresh()
        if split:
            self.splits = isinstance(self.module, nn.Module) and self.stage.splits

    def clear(self) -> None:
        self.deferrals.clear()
        self.groups.clear()

    def forward(self, microbatch: int, run: Any) -> Any:
        """Run a forward whose backward will be split."""
        if not (self.splits and torch.is_grad_enabled()):
            return run()
        deferral = self.deferrals[microbatch] = Deferral()
        with self.stage.find_deferrable().forward(deferral):
            return run()

    def backward(self, microbatch: int, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Accumulate all gradients; return those of the inputs."""
        deferral = self.deferrals.pop(microbatch, None)
        input_grads = self._run(deferral, outputs, grads, inputs)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        return input_grads

    def backward_input(self, microbatch: int, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Return the gradients of the inputs; accumulate those of weights that cannot be deferred."""
        deferral = self.deferrals.get(microbatch)
        if deferral is not None or not self.splits:
            return self._run(deferral, outputs, grads, inputs)
        ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        input_grads, self.groups[microbatch] = stage_backward_input(ends, grads, inputs, self.module.parameters())
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the gradients of the weights that `backward_input` left."""
        deferral = self.deferrals.pop(microbatch, None)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        elif microbatch in self.groups:
            stage_backward_weight(self.module.parameters(), self.groups.pop(microbatch))

    def _run(self, deferral: Deferral | None, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        try:
            pairs: list[tuple[Any, Any]] = list(pair_with_grads(outputs, grads)) if grads is not None else _start_from_loss(outputs)
            pairs = [(end, grad) for end, grad in pairs if grad is not None]
            if pairs:
                ends, starts = [end for end, _ in pairs], [grad for _, grad in pairs]
                if deferral is None:
                    run_backward(ends, starts)
                else:
                    self.stage.find_deferrable().backward_input(deferral, ends, starts)
            return tuple(map(take_grad, inputs))
        except Exception as error:
            raise build_backward_error("stage backward", outputs, grads, inputs) from error


def _start_from_loss(loss: Any) -> list[tuple[Any, Any]]:
    """Return the loss and its gradient, from which the last stage's backward starts."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RuntimeError(f"the loss is {what}, but a backward starts from a tensor with one element")
    return [(loss, torch.ones_like(loss))] if loss.requires_grad else []


# Around a backward -----------------------------------------------------------------------------------------------------


@contextmanager
def synchronize_on_last(module: Any, outputs: Any, last: bool) -> Iterator[None]:
    """Run a backward that only accumulates gradients; in the last one, DDP reduces them as they are computed."""
    if isinstance(module, DistributedDataParallel):
        if last:
            check_private(module, "reducer")
            tensors = _find_tensors(outputs)
            module.reducer.prepare_for_backward(list(tensors))
            yield
        else:
            with module.no_sync():
                yield
        return
    if isinstance(module, FSDPModule):
        if not FINALIZES_BACKWARD:
            module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    yield


def average_replicas(module: DistributedDataParallel) -> None:
    """Average the gradients over the replicas. After a split backward this is needed because DDP does not see deferred gradients."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    group, count = module.process_group, dist.get_world_size(module.process_group)
    for work in [dist.all_reduce(grad, group=group, async_op=True) for grad in grads]:
        if work is not None:
            work.wait()
    for grad in grads:
        grad.div_(count)


class EarlierGradients:
    """Gradients from before a step, set aside while the step's own are computed and scaled."""

    def __init__(self, parameters: Iterable[nn.Parameter], copy: bool) -> None:
        self.earlier: list[tuple[nn.Parameter, Tensor | None]] = []
        for parameter in parameters:
            grad = parameter.grad
            self.earlier.append((parameter, grad.clone() if copy and grad is not None else grad))
            parameter.grad = None

    def end(self, failed: bool = False) -> None:
        """Add the step's gradients to the earlier ones, in the earlier ones' memory; discard those of a failed step."""
        for parameter, earlier in self.earlier:
            if earlier is not None and parameter.grad is not None and not failed:
                earlier.add_(parameter.grad)
            if earlier is not None or failed:
                parameter.grad = earlier
        self.earlier.clear()


# Stages ----------------------------------------------------------------------------------------------------------------


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
    _forward_chunk_states: dict[int, Any]
    _make_forward_chunk_state: Any
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

        def __getattr__(self, name: str) -> Any:
            """Look up the descriptions of tensors: those of this step, and those that the constructor was given as examples."""
            if name == "_stage_meta":
                return self.__dict__.setdefault(name, metadata._StageMeta())
            if name == "_user_meta":
                return metadata._StageMeta(self.__dict__.get("inputs_meta"), self.__dict__.get("_outputs_meta"))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
        if self.gradients_deferred:  # what was there before is set aside since the step that deferred them
            return
        if self.has_backward and scale != 1 and isinstance(self.submod, nn.Module):
            self._earlier = EarlierGradients(self.submod.parameters(), copy=isinstance(self.submod, DistributedDataParallel))

    def begin_step(self, split: frozenset[int], scale: int) -> None:
        """Begin to run an order that splits the backward of the microbatches in `split`."""
        self.open_step(scale)
        self._split_chunks = split
        self._get_backward().begin(bool(split))

    def end_step(self, failed: bool = False) -> None:
        self.in_step = False
        if self._earlier is not None and (failed or not self.gradients_deferred):
            self._earlier.end(failed)
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
            self._earlier.end()

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
            cast(Any, super()).release_fwd_send_outputs(fwd_chunk_id)
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
        contexts: OrderedDict[int, ForwardContextFactory] = self.__dict__.setdefault("_forward_contexts", OrderedDict())
        if contexts:
            raise RuntimeError(
                f"stage {self.stage_index} has a pipeline forward context already registered: remove its handle before registering another"
            )
        handle = RemovableHandle(contexts)
        contexts[handle.id] = context_factory
        return handle

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
            cast(Any, self.submod).set_manual_backward_finalization(True)
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
        runner = do_nothing if self.dw_builder is None else self.dw_builder()  # `StageBackward` runs the backward for the weights
        if not full_backward:
            self.dw_runner[bwd_chunk_id] = runner
        else:
            runner()
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = input_grads[: self._count_received_inputs(bwd_chunk_id)]
            self._check_grads("input_grads", self.bwd_cache[bwd_chunk_id])
        if self.is_last and not self.is_first:
            free_graph(outputs)  # only the caller still reads them
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
            cast(Any, super()).start_gradient_reduction()
            return
        self._refuse_without_fsdp()
        if self._reduction_started:
            raise RuntimeError(f"{self.log_prefix} A gradient reduction is already pending: wait for it first")
        super().perform_reduce_grad(1)
        self._reduction_started = True

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait until the gradients of an FSDP module are reduced, then scale them."""
        if FINALIZES_BACKWARD:
            cast(Any, super()).wait_for_gradient_reduction(1)
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


class PipelineStage(_PipelineStageBase, _torch_stage.PipelineStage):
    """A stage around a module of the user's: `PipelineStage(submodule, stage_index, num_stages, device, ...)`, as in torch."""

    _messages: StageMessages | None = None
    """Set once a schedule has decided that the stage uses messages."""
    _shares: dict[int, BatchShare] | None = None
    """Each microbatch's share of this step's batch, as far as this rank knows it."""
    _buffers: BufferBackup | None = None
    """The module's buffers from before shapes were agreed on."""
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
        static = not metadata.InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self._inference_mode = metadata.InferenceMode.STATIC if static else metadata.InferenceMode.DYNAMIC
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
        self._buffers = BufferBackup()
        self._buffers.take([module])
        for value in args:
            if not self.is_first and isinstance(value, Tensor):
                value.detach().zero_()  # it stands for another stage's output, but is uninitialized memory
        return super()._compute_outputs(*args, module=module, **kwargs)

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Run that forward on torch 2.11, which has another function for it."""
        self._inference_mode = metadata.InferenceMode.DYNAMIC
        before = BufferBackup()
        before.take([self.submod])
        try:
            return cast(Any, super())._shape_inference(args, kwargs)
        finally:
            before.restore()

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        if self._buffers is not None:
            self._buffers.restore()

    def _check_inputs(self, inputs: Sequence[Any]) -> None:
        if self._messages is not None and self._stage_meta.inputs is None:
            self._stage_meta.inputs = metadata.extract_tensor_metas(metadata.validate_and_normalize_to_tuple(tuple(inputs)))
        if self._messages is not None and self.is_first and not self.args_recv_info.get(0):
            # They come from the caller in every microbatch.
            infos = tuple(build_root_info(f"root_input_{k}", value) for k, value in enumerate(inputs) if isinstance(value, Tensor))
            self.args_recv_info = dict.fromkeys(self.args_recv_info, infos)
        super()._check_inputs(inputs)

    def _check_grads(self, which: str, grads: Grads) -> None:
        if self._messages is not None and getattr(self._stage_meta, which) is None:
            setattr(self._stage_meta, which, metadata.extract_tensor_metas(grads, allow_none=True))
        super()._check_grads(which, grads)

    def _drop_inputs(self, chunk: int) -> None:
        if self._messages is not None and not self.is_first:
            self.args_recv_info[chunk] = ()
            if self._received is not None:
                self._received.pop(chunk, None)

    def _check_outputs(self, outputs: tuple[Any, ...]) -> None:
        if self._messages is not None:
            if not self.is_last:
                metadata.validate_and_normalize_to_tuple(outputs)
            if len(self.act_send_info) != len(outputs):
                self.act_send_info = {k: [] if self.is_last else [self.stage_index + 1] for k in range(len(outputs))}
        if self._messages is not None and self._stage_meta.outputs is None and all(isinstance(output, Tensor) for output in outputs):
            self._stage_meta.outputs = metadata.extract_tensor_metas(outputs)
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
        # Without a backward, the outputs are not read again.
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
            self.args_recv_info[fwd_chunk_id] = self._build_recv_infos("recv", self.stage_index - 1, value)
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
            self.grad_recv_info[bwd_chunk_id] = self._build_recv_infos("recv_grad", self.stage_index + 1, value)
        grads = tuple(super()._retrieve_recv_grads(bwd_chunk_id))
        if self._messages is not None:
            self.grad_recv_info[bwd_chunk_id] = ()
        return grads

    def _build_recv_infos(self, what: str, source: int, value: Any) -> tuple[Any, ...]:
        """Build the `_RecvInfo` of each received tensor, with the tensor as its buffer."""
        tensors, metas = value if isinstance(value, tuple) else (value, [None] * len(value))
        name, infos = f"{what}_for_{self.stage_index}_from_{source}", []
        for tensor, meta in zip(tensors, metas, strict=True):
            if tensor is None:
                infos.append(build_recv_info(name, source, None, None))
            else:
                infos.append(build_recv_info(name, source, tensor.detach(), meta or metadata.extract_tensor_meta(tensor)))
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
        self.args_recv_info[mb_index] = self._build_recv_infos("recv", self.stage_index - 1, _build_message(outputs))

    def set_local_bwd_input(self, next_stage_bwd_outputs: Grads, mb_index: int) -> None:
        if self._messages is None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
            return
        if not isinstance(next_stage_bwd_outputs, tuple):
            raise AssertionError(f"Expected tuple, got {type(next_stage_bwd_outputs)}")
        if not self.has_backward or self.is_last:
            raise AssertionError("can't set bwd input if this stage doesn't have backward, or is last")
        grads = _fill_with_zeros(next_stage_bwd_outputs, self._read_outputs(mb_index))
        self.grad_recv_info[mb_index] = self._build_recv_infos("recv_grad", self.stage_index + 1, _build_message(grads))


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
    local = [None if tensor is None else _wait_for(metadata.to_local_if_dtensor(tensor, detach=True)) for tensor in tensors]
    metas = [metadata._DTensorMeta.from_dtensor(tensor) if isinstance(tensor, DTensor) else None for tensor in tensors]
    return local, metas


class _PipelineStage(_PipelineStageBase, _torch_stage._PipelineStage):
    """A stage of a traced model."""


def build_stage(
    stage_module: nn.Module, stage_index: int, pipe_info: PipeInfo, device: torch.device, group: dist.ProcessGroup | None = None
) -> _PipelineStage:
    """Build a stage of a traced model, for a schedule to run."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
