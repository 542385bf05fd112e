"""OFFLOAD and RELOAD: which activations of a rank leave for host memory, and the operations that move them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.ir.dependencies import find_releases
from penstock.ir.kind import COPIES, Kind
from penstock.runtime.device.host_memory import HostMemory, SavedTensors
from penstock.runtime.tensors.dtensor import is_dtensor
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.group import EMPTY, Operation

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.program import Program
    from penstock.runtime.execution.operations import StageOperations

Unit = tuple[int, int]
"""A stage and a microbatch, or a slice of one."""


def has_moves(program: Program) -> bool:
    """Whether a program moves any activation to the host."""
    return bool(program.rows.is_kind(*COPIES).any())


class ActivationMoves:
    """The activations that a rank's program moves to the host and back."""

    def __init__(self, compute: StageOperations, memory: HostMemory) -> None:
        self._compute, self.memory = compute, memory
        rows, rank, slices = compute.program.rows, compute.links.rank, compute.program.slices
        pairs = [
            (rows.part_at(before), rows.part_at(after))
            for before, after in zip(*(ends.tolist() for ends in find_releases(rows)), strict=True)
            if rows.rank[before] == rank
        ]
        self.saved: dict[Unit, SavedTensors] = {
            (action.stage, action.unit(slices)): SavedTensors(self.memory)
            for action in compute.program[rank]
            if action.kind is Kind.OFFLOAD
        }
        """By stage and microbatch, for those that are moved."""
        self._released_by: dict[Unit, list[SavedTensors]] = {}
        for offload, release in pairs:
            if release.kind is Kind.F:
                place = self._released_by.setdefault((release.stage, release.unit(slices)), [])
                place.append(self.saved[offload.stage, offload.unit(slices)])

    def wrap_forward(self, stage: int, microbatch: int, forward: Callable[..., None]) -> Callable[..., None]:
        """The forward, which first takes over the memory that earlier activations have left, and saves its own so that it can be moved."""
        saved, released = self.saved.get((stage, microbatch)), self._released_by.get((stage, microbatch), [])
        if saved is None and not released:
            return forward

        def run(taken: list[Any] | None = None) -> None:
            for earlier in released:
                earlier.release()
            if saved is None:
                forward(taken)
                return
            with saved.save_tensors(self._find_kept(stage, microbatch)):
                forward(taken)

        return run

    def wrap_backward(self, stage: int, microbatch: int, backward: Callable[..., None]) -> Callable[..., None]:
        """The backward, which first waits until its activation is back."""
        saved = self.saved.get((stage, microbatch))
        if saved is None:
            return backward

        def run(together: Operation | None = None) -> None:
            saved.arrive()
            backward(together)

        return run

    def operation(self, action: Action) -> Operation:
        """The operation of an OFFLOAD or RELOAD."""
        stage, microbatch = action.stage, action.unit(self._compute.program.slices)
        saved = self.saved[stage, microbatch]
        return saved.reload if action.kind is Kind.RELOAD else self._run_offload(stage, microbatch, saved)

    def _run_offload(self, stage: int, microbatch: int, saved: SavedTensors) -> Operation:
        registers = self._compute.registers
        context = registers.number("context", stage, microbatch)

        def offload() -> None:
            state = registers.values[context]
            if state is EMPTY:
                raise ScheduleError(f"OFFLOAD of stage {stage}, microbatch {microbatch}: its forward has saved nothing for a backward")
            wanting, ends, *_ = state
            saved.offload([*(leaf for leaves in wanting for leaf in leaves), *ends])

        return offload

    def reset(self) -> None:
        """Let go of everything that belongs to a step."""
        for saved in self.saved.values():
            saved.drop()
        self.memory.trim()

    def _find_kept(self, stage: int, microbatch: int) -> Collection[int]:
        """The addresses of memory that others need: of parameters, buffers and the batch, and of the prefix that later slices read."""
        compute, feed, graph = self._compute, self._compute.step_input, self._compute.program.graph
        batch: list[Any] = [feed.kwargs[stage][microbatch]] if stage in feed.kwargs else []
        batch += [] if graph.inputs_of(stage) else [feed.args[microbatch]]
        loss = compute.loss.fn
        if not graph.outputs_of(stage):
            batch += [] if feed.targets is None else [feed.targets[microbatch]]
            batch += [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and not is_dtensor(leaf)]
        kept = {tensor.untyped_storage().data_ptr() for tensor in tensors} | set(compute.stages[stage].memory())
        return kept if compute.prefixes is None else ChainMap(dict.fromkeys(kept), compute.prefixes.addresses(stage, microbatch))
