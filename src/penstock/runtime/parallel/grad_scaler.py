"""Scaled losses for float16: one scale for all stages and data ranks, which all skip the same steps."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import to_local

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a pipeline, whose steps then start their backward from scaled losses; results are not scaled.

        scaler = GradScaler(pipe)
        pipe.step(x, target=y)
        scaler.unscale_(optimizer)  # if gradients are to be clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    Every rank makes one and calls the same of its methods. Where any rank has found a gradient that is not finite, all skip the
    step and lower the scale.
    """

    def __init__(
        self,
        pipeline: Pipeline,
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
            self._lazy_init_scale_growth_tracker(device)
        pipeline.scaler = self if enabled else None
        found = pipeline.gather_all("GradScaler", (init_scale, growth_factor, backoff_factor, growth_interval, enabled))
        if any(theirs != found[0] for theirs in found):
            raise ScheduleError(f"the ranks give their gradient scalers different options: {sorted(set(found))}; give all the same")

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients, and find out together whether any is not finite."""
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                grad = parameter.grad
                if grad.dtype is torch.float16 and not allow_fp16:
                    raise ScheduleError("gradients of float16 parameters cannot be unscaled: keep the parameters in float32, with autocast")
                if grad.is_sparse:
                    parameter.grad = grad = grad.coalesce()
                held = grad._values() if grad.is_sparse else to_local(grad)
                grads[held.device, held.dtype].append(held)
        found = [torch.zeros_like(found_inf)]
        for (device, _), held in grads.items():
            found.append(found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(held, found[-1], inv_scale.to(device))
        mine = max(float(each) for each in found)
        worst = max(self._pipeline.gather_all("found_inf", mine))
        return {found_inf.device: torch.full_like(found_inf, worst)}
