"""Gradients over all stages: clipping by their norm, loss scaling, and restoring gradients and buffers when a step fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime.model.tied_parameters import Gather, NamedParameters, Place, SharedParameters
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.tensors.dtensor import reduce_partial, shard_coordinates, to_local
from penstock.runtime.torch_internals.lookup import check_private, find_private
from penstock.runtime.torch_internals.modules import NormBase
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks, read_version, sparse_values


@dataclass
class GradientBackup:
    """The gradients before a step, to be restored if it fails."""

    saved: list[tuple[nn.Parameter, Tensor | None, Tensor | None]]

    @classmethod
    def take(cls, parameters: Iterable[nn.Parameter]) -> GradientBackup:
        """Copy the gradients that exist, as when they are accumulated over steps."""
        return cls([(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters])

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, grad, copy in self.saved:
            if grad is not None and copy is not None:
                grad.copy_(copy)
            parameter.grad = grad


class BufferBackup:
    """The buffers of modules before a step, to be restored if it fails.

    A buffer that a step has not changed is not copied again as long as its version stays the same, so tables and masks cost nothing.
    Norm layers change their statistics without changing the version, so they are always copied.
    """

    def __init__(self) -> None:
        self._constant: dict[int, int] = {}
        """The versions of buffers that steps do not change, by id."""
        self._copies: list[tuple[Tensor, Tensor, int]] = []

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Copy the buffers of these modules, and of those inside them, that a step may change."""
        self._copies = []
        for module in chain.from_iterable(module.modules() for module in modules):
            statistics = isinstance(module, NormBase)
            for buffer in module.buffers(recurse=False):
                if statistics or self._constant.get(id(buffer)) != read_version(buffer):
                    self._copies.append((buffer, buffer.clone(), -1 if statistics else read_version(buffer)))

    def settle(self) -> None:
        """End a step that has succeeded: note which buffers it has not changed."""
        for buffer, before, version in self._copies:
            if version == read_version(buffer) and id(buffer) not in self._constant and torch.equal(buffer, before):
                self._constant[id(buffer)] = version
            else:
                self._constant.pop(id(buffer), None)
        self._copies = []

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, before, _ in self._copies:
            buffer.copy_(before)
        self._copies = []


class HookGuard:
    """Refuses a step in which post-accumulate hooks change the weights.

    An optimizer in such a hook updates a weight after the backward of each microbatch. By then forwards of later microbatches have run
    with a weight that the loop over microbatches would have updated first; and copies of the weight on other ranks get other gradients,
    which are summed only at the end of the step. Hooks that do not change weights are allowed.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        """The ids of parameters whose hooks did not change them in an earlier step."""
        self._marks: list[tuple[str, nn.Parameter, int, int]] = []
        self._copies: dict[int, Tensor] = {}

    def begin(self, parameters: Iterable[tuple[str, nn.Parameter]], *, alone: bool) -> None:
        """Begin a step: note the versions of hooked weights, and copy those whose hooks have not run before.

        `alone` says that the step has one microbatch and that no other rank has copies of the weights, so hooks may do anything.
        """
        hooked = [] if alone else [(name, p) for name, p in parameters if post_accumulate_hooks(p)]
        self._marks = [(name, p, read_version(p), to_local(p.detach()).data_ptr()) for name, p in hooked]
        self._copies = {id(p): to_local(p.detach()).clone() for _, p in hooked if id(p) not in self._known}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A context for the step, which is refused if hooks change weights; those that were copied are restored.

        If the step fails after such a change, the change is reported as the reason.
        """
        try:
            yield
        except PipelineError:  # from another rank, which gives the reason
            self._restore(self._find_changed())
            raise
        except Exception as error:
            self._refuse(self._find_changed(), error)
            raise
        self._refuse(self._find_changed(), None)
        self._known |= self._copies.keys()
        self._copies = {}

    def _find_changed(self) -> list[tuple[str, nn.Parameter]]:
        """Return the weights whose version, memory or, if they were copied, values have changed."""
        changed = []
        for name, parameter, version, address in self._marks:
            value, copy = to_local(parameter.detach()), self._copies.get(id(parameter))
            is_same = read_version(parameter) == version and value.data_ptr() == address
            if not is_same or (copy is not None and not torch.equal(value, copy)):
                changed.append((name, parameter))
        return changed

    @torch.no_grad()
    def _restore(self, changed: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Restore the weights; return whether there were copies of all."""
        copies, self._copies = self._copies, {}
        for _, parameter in changed:
            if id(parameter) in copies:
                to_local(parameter.detach()).copy_(copies[id(parameter)])
        return all(id(parameter) in copies for _, parameter in changed)

    def _refuse(self, changed: Sequence[tuple[str, nn.Parameter]], cause: Exception | None) -> None:
        if not changed:
            return
        restored = self._restore(changed)
        now = "The weights are as before the step, but the optimizer's state is not" if restored else "The weights have been changed"
        raise ScheduleError(
            f"a hook that runs when a gradient is complete has changed {changed[0][0]!r}, as an optimizer in it does: a pipeline runs "
            "forwards of later microbatches before the backwards of earlier ones, so they would use outdated weights, and copies of a "
            f"weight would be updated separately. Call the optimizer after the step. {now}"
        ) from cause


ShardKey = tuple[Place, tuple[tuple[str, int], ...]]
"""A parameter's place, and which part of it a rank holds, see `shard_coordinates`."""


def clip_grad_norm(
    max_norm: float, norm_type: float, parameters: NamedParameters, shared: SharedParameters, *, data: DataParallel, gather: Gather
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before.

    The norm is taken over the parameters in the model's own order, each once, so it does not depend on the ranks.
    """
    named = dict(parameters)
    norms: dict[ShardKey, Tensor] = {}
    for name, parameter in named.items():
        if parameter.grad is not None:
            grad = reduce_partial(parameter.grad)
            norms[shared.place[name], shard_coordinates(grad)] = torch.linalg.vector_norm(to_local(grad), norm_type)
    for gather_shards in data.shard_gathers():
        norms = _merge_first(gather_shards("clip_grad_norm_", norms))
    merged = _merge_first(gather("clip_grad_norm_", norms))
    ordered = [merged[key] for key in sorted(merged)]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for name, parameter in named.items():
        if name in shared.owned and parameter.grad is not None:
            to_local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
    if shared.one_object:
        gather("clipped", None)  # no rank uses a gradient that its owner has yet to scale
    return total


def _merge_first(everyone: list[dict[ShardKey, Tensor]]) -> dict[ShardKey, Tensor]:
    """Merge the norms of several ranks; each comes from the first rank that has it."""
    return {key: norm for norms in reversed(everyone) for key, norm in norms.items()}


# Loss scaling for float16, with one scale for all stages and data ranks, which all skip the same steps ----------------

_unscale_all = find_private("torch._amp_foreach_non_finite_check_and_unscale_")


class ScaledPipeline(Protocol):
    """The part of a pipeline that a `GradScaler` uses."""

    scaler: Any
    """The scaler whose scale a training step multiplies its losses by; None for no scaling."""

    def local_parameters(self) -> NamedParameters:
        """Return this rank's parameters."""
        ...

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks, over all dimensions of a mesh."""
        ...


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a pipeline: its steps start their backward from scaled losses; results are not scaled.

        scaler = GradScaler(pipe)
        pipe.step(x, target=y)
        scaler.unscale_(optimizer)  # if gradients are to be clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    Every rank makes one and calls the same methods of it. If any rank finds a gradient that is not finite, all ranks skip the step and
    lower the scale.
    """

    def __init__(
        self,
        pipeline: ScaledPipeline,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = next((parameter.device for _, parameter in pipeline.local_parameters()), torch.device("cpu"))
        super().__init__(device.type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._pipeline = pipeline
        if enabled:
            check_private(self, "_lazy_init_scale_growth_tracker", "_unscale_grads_")
            self._lazy_init_scale_growth_tracker(device)
        pipeline.scaler = self if enabled else None
        options = pipeline.gather_all("GradScaler", (init_scale, growth_factor, backoff_factor, growth_interval, enabled))
        if any(other != options[0] for other in options):
            raise ScheduleError(f"the ranks give their gradient scalers different options: {sorted(set(options))}; give all the same")

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients, and agree with all ranks whether any is not finite."""
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                grad = parameter.grad
                if grad.dtype is torch.float16 and not allow_fp16:
                    raise ScheduleError("gradients of float16 parameters cannot be unscaled: keep the parameters in float32, with autocast")
                if grad.is_sparse:
                    parameter.grad = grad = grad.coalesce()
                values = sparse_values(grad) if grad.is_sparse else to_local(grad)
                grads[values.device, values.dtype].append(values)
        flags = [torch.zeros_like(found_inf)]
        for (device, _), tensors in grads.items():
            flags.append(found_inf.to(device, copy=True))
            _unscale_all(tensors, flags[-1], inv_scale.to(device))
        largest = max(float(flag) for flag in flags)
        worst = max(self._pipeline.gather_all("found_inf", largest))
        return {found_inf.device: torch.full_like(found_inf, worst)}
