"""Loss scaling for float16, with one scale for all stages and data ranks, which all skip the same steps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.model.tied_parameters import NamedParameters
from penstock.runtime.tensors.dtensor import to_local
from penstock.runtime.torch_internals.lookup import check_private, find_private
from penstock.runtime.torch_internals.tensors import sparse_values

_unscale_all = find_private("torch._amp_foreach_non_finite_check_and_unscale_")


class ScaledPipeline(Protocol):
    """What a `GradScaler` uses of a pipeline."""

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
        if any(theirs != options[0] for theirs in options):
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
                held = sparse_values(grad) if grad.is_sparse else to_local(grad)
                grads[held.device, held.dtype].append(held)
        flags = [torch.zeros_like(found_inf)]
        for (device, _), tensors in grads.items():
            flags.append(found_inf.to(device, copy=True))
            _unscale_all(tensors, flags[-1], inv_scale.to(device))
        mine = max(float(flag) for flag in flags)
        worst = max(self._pipeline.gather_all("found_inf", mine))
        return {found_inf.device: torch.full_like(found_inf, worst)}
