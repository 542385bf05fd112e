"""What every stage of torch's kind shares: how it computes.

What a stage is to a program that drives it by hand, its caches and its descriptions of what it receives and where it sends, is torch's
own, inherited as it is. How it computes is ours: the split backward is recorded at the operator, results are kept in the order
of microbatches, gradients of earlier steps are never scaled again.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple
from torch.nn.parallel import DistributedDataParallel

from penstock.compat.torch._debug import map_debug_info, stage_log
from penstock.compat.torch._halves import Aside, Grads, Halves, data_parallel, reduce_replicas
from penstock.compat.torch._utils import flatten_args
from penstock.errors import StageCallError
from penstock.runtime.tensors.dtensor import wait_for_collective


class _PipelineStageBase(_torch_stage._PipelineStageBase):
    """One stage of a pipeline on its rank."""

    # Defaults for stages that were never set up, as those that tests make up.
    _halves: Halves | None = None
    _split_chunks: frozenset[int] = frozenset()
    _aside: Aside | None = None
    _order: list[int] | None = None
    _in_step = False

    # What a schedule tells it ------------------------------------------------------------------------------------------

    def _begin_step(self, split: frozenset[int], scale: int) -> None:
        """A step begins: the microbatches whose backward will be split, and what its gradients will be divided by."""
        self._open_step(scale)
        self._split_chunks = split
        self._both_halves().begin(bool(split))

    def _open_step(self, scale: int) -> None:
        """The first of a step, once: said by `step`, before a `_step_microbatches` that a program may have written, or by a walk."""
        if self._in_step:
            return
        self._in_step, self._split_chunks = True, frozenset()
        if self.has_backward and scale != 1 and isinstance(self.submod, nn.Module):
            self._aside = Aside(self.submod.parameters(), copy=isinstance(self.submod, DistributedDataParallel))

    def _end_step(self, failed: bool = False) -> None:
        """A step is over."""
        self._in_step = False
        if self._aside is not None:
            if failed:
                self._aside.drop_new()
            else:
                self._aside.add()
            self._aside = None
        if failed:
            self.clear_runtime_states()

    def _finish_sending(self) -> None:
        """Wait for what it sends besides the messages that a schedule waits for."""

    def _talked(self) -> bool:
        """Whether it has begun to send or receive in this step."""
        return True

    def _give_up(self, receives: dict[tuple[int, int], Sequence[Any]], talked: bool) -> None:
        """The step has failed with these receives under way; `talked` says whether any stage of this rank has begun to send or receive."""

    def _both_halves(self) -> Halves:
        if self._halves is None or self._halves.module is not self.submod:
            self._halves = Halves(self.stage_index, self.submod)
        return self._halves

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide this step's gradients, and add them to those from before it."""
        super().scale_grads(grad_scale_factor)
        if self._aside is not None:
            self._aside.add()

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._order = []
        for cache in (self.bwd_cache, self.backward_state, self.dw_runner):
            cache.clear()
        if self._halves is not None:
            self._halves.clear()

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Messages that make ranks known to each other; not of a rank to itself, which holds both stages."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Messages with the outputs of a microbatch, which are waited for if a collective is still making them."""
        return _arrived_ops(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Messages with the gradients of a microbatch's inputs."""
        return _arrived_ops(super().get_bwd_send_ops(bwd_chunk_id))

    # Forward ----------------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Run a microbatch forward: on `args` at the front, on what was received elsewhere, and on `kwargs`."""
        inputs = args if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)
        named = kwargs or {}
        self._look_at_inputs(inputs)

        def run() -> Any:
            return self.forward_maybe_with_nosync(*inputs, **named)  # type: ignore[no-untyped-call]

        try:
            split = self.has_backward and fwd_chunk_id in self._split_chunks and self.dw_builder is None
            output = self._both_halves().forward(fwd_chunk_id, run) if split else run()
        except Exception as error:
            said = f"args: {map_debug_info(inputs)}\n    kwargs: {map_debug_info(named)}"
            kind = StageCallError if isinstance(error, TypeError) else RuntimeError
            raise kind(f"{self.log_prefix} failed to run forward:\n    {said}\n    {type(error).__name__}: {error}") from error
        outputs = _normalize_model_output_as_tuple(output)
        if self.is_last and save_forward_output:
            self._keep_output(fwd_chunk_id, output)
        self.fwd_cache[fwd_chunk_id] = (outputs, flatten_args(inputs) + flatten_args(named))
        if stage_log.isEnabledFor(logging.DEBUG):
            stage_log.debug("%s Forwarded chunk %s, outputs: %s", self.log_prefix, fwd_chunk_id, map_debug_info(output))
        self._look_at_outputs(outputs)
        if not self.has_backward:
            self._forget_inputs(fwd_chunk_id)
        return output

    def _keep_output(self, chunk: int, output: Any) -> None:
        """Outputs are kept in the order of microbatches, whatever the order in which they are made."""
        if self._order is None or len(self._order) != len(self.output_chunks):
            self._order = [-1] * len(self.output_chunks)
        at = bisect(self._order, chunk)
        self._order.insert(at, chunk)
        self.output_chunks.insert(at, output)

    def _look_at_inputs(self, inputs: Sequence[Any]) -> None:
        if self._runtime_validate:
            self._validate_stage_tensors(f"Stage {self.stage_index} forward inputs", self._stage_meta.inputs, tuple(inputs))

    def _look_at_outputs(self, outputs: tuple[Any, ...]) -> None:
        if self._runtime_validate and not self.is_last:
            self._validate_stage_tensors(f"Stage {self.stage_index} forward outputs", self._stage_meta.outputs, outputs)

    def _look_at_grads(self, which: str, grads: Grads) -> None:
        if self._runtime_validate:
            self._validate_stage_tensors(f"Stage {self.stage_index} backward ({which})", getattr(self._stage_meta, which), grads)

    def _forget_inputs(self, chunk: int) -> None:
        """What was received for a microbatch is not wanted any more; torch keeps the memory for the next step."""

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """Run a microbatch backward, from the loss or from the gradients that were received; whole, or for the input alone."""
        if not self.has_backward:
            return
        self._check_chunk_id(bwd_chunk_id)
        outputs, values = self.fwd_cache.pop(bwd_chunk_id)
        grads = None if self.is_last else self._retrieve_recv_grads(bwd_chunk_id)
        if grads is not None:
            self._look_at_grads("output_grads", grads)
        given = {
            "stage_output": loss if self.is_last else outputs,
            "output_grads": grads,
            "input_values": values,
            "chunk": bwd_chunk_id,
        }
        if self.dw_builder is not None:
            found, _ = self.backward_maybe_with_nosync("full", given, last_backward)
            runner = self.dw_builder()
            if full_backward:
                runner()
            else:
                self.dw_runner[bwd_chunk_id] = runner
        elif full_backward:
            found, _ = self.backward_maybe_with_nosync("full", given, last_backward)
        else:
            found, _ = self.backward_maybe_with_nosync("input", given, last_backward)
            self.dw_runner[bwd_chunk_id] = _no_more
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = found[: self._num_inputs(bwd_chunk_id)]
            self._look_at_grads("input_grads", self.bwd_cache[bwd_chunk_id])
        if self.is_last and not self.is_first:
            _let_go(outputs)
        stage_log.debug("%s Backwarded chunk %s", self.log_prefix, bwd_chunk_id)

    def _num_inputs(self, chunk: int) -> int:
        """How many of the inputs came from another stage; the rest are keyword arguments."""
        infos = self.args_recv_info.get(chunk, ())
        return sum(not info.is_root_arg for info in infos)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The backward for the weights that `backward_one_chunk(full_backward=False)` has left."""
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
        """One backward (`full`, `input` or `weight`) under what data parallelism around the module asks for."""
        halves, chunk = self._both_halves(), bwd_kwargs.get("chunk", 0)
        ends: Any = [bwd_kwargs.get(name) for name in ("stage_output", "output_grads", "input_values")]
        replicas = self.submod if isinstance(self.submod, DistributedDataParallel) else None
        waits = replicas is not None and (bool(self._split_chunks) or backward_type != "full")
        with data_parallel(self.submod, ends[0], last_backward and not waits):
            if backward_type == "full":
                found = halves.full(chunk, *ends)
            elif backward_type == "input":
                found = halves.first(chunk, *ends)
            elif backward_type == "weight":
                halves.second(chunk)
                found = ()
            else:
                raise RuntimeError(f"Unknown backward type: {backward_type}")
        if replicas is not None and waits and last_backward:
            reduce_replicas(replicas)
        return found, None


def _arrived_ops(ops: list[Any]) -> list[Any]:
    for op in ops:
        op.tensor = wait_for_collective(op.tensor)
    return ops


def _no_more() -> None:
    """In torch what runs the weights' backward; here that is kept apart."""


def _let_go(outputs: Sequence[Any]) -> None:
    """Let go of the graph behind outputs that only their reader still has."""
    for tensor in outputs:
        if isinstance(tensor, Tensor) and not tensor._is_view():  # a view cannot be detached in place
            tensor.detach_()
