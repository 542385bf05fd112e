"""Times and memory of the layers of a measured profile on one GPU in one configuration.

The profile has the times and sizes; the machines have the links. Each layer can be recomputed by itself: it then keeps its input and runs
its forward again before its backward. Without a formula of the layer nobody knows what half of it takes, so that tensor and context degrees
stay 1, and embedding and head are layers like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.job.configuration import Configuration
from penstock.planner.job.job import Job
from penstock.planner.job.sharding import shard_layer, time_update
from penstock.planner.profile import Layer, Profile
from penstock.planner.profile.profile import TIMES


@dataclass(frozen=True)
class ProfileCosts:
    """The layers of a job with a profile in one configuration."""

    job: Job
    configuration: Configuration
    recompute_all: bool = False
    """Whether every layer runs its forward again."""

    @cached_property
    def _measured(self) -> Profile:
        """The profile at the microbatch size."""
        assert self.job.profile is not None
        return self.job.profile.at(self.configuration.microbatch)

    @cached_property
    def _kept(self) -> tuple[Layer, ...]:
        """The layers that keep their activations."""
        machines = self.job.machines
        timed = [
            replace(layer, update=layer.update or time_update(layer, machines), reduction=0.0, slices=None)
            for layer in self._measured.layers
        ]
        known = {layer: shard_layer(layer, self.configuration, machines) for layer in dict.fromkeys(timed)}
        return tuple(known[layer] for layer in timed)

    @cached_property
    def recomputed_layers(self) -> tuple[Layer, ...]:
        """The layers if their forwards run again: each keeps its input."""
        inputs = [self._measured.input, *(layer.output for layer in self._kept[:-1])]
        return tuple(
            replace(layer, i=layer.i + layer.f, activation=kept, workspace=layer.workspace + max(layer.activation - kept, 0.0))
            for layer, kept in zip(self._kept, inputs, strict=True)
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers without any choice of recompute."""
        return self.recomputed_layers if self.recompute_all else self._kept

    @property
    def keeps_output(self) -> bool:
        """Whether a stage also holds its output from F to I."""
        return self._measured.keeps_output

    @property
    def ends(self) -> tuple[int, int]:
        """Layers before and after those that can be recomputed."""
        return 0, 0

    @property
    def shares(self) -> tuple[Layer, ...]:
        """Each pipeline rank's share of embedding and head: none, because the layers stay whole."""
        return ()

    def count_layers(self) -> list[tuple[Layer, Layer, int]]:
        """Each layer, as it is and recomputed, and how often it occurs."""
        return [(layer, again, 1) for layer, again in zip(self.layers, self.recomputed_layers, strict=True)]

    def list_times(self, recomputed: Sequence[bool]) -> Floats:
        """The times of F, I and W (rows) of every layer (columns)."""
        layers = [again if flag else layer for layer, again, flag in zip(self.layers, self.recomputed_layers, recomputed, strict=True)]
        return np.array([[getattr(layer, name) for layer in layers] for name in TIMES])

    def profile(self, recomputed: Sequence[bool] | None = None) -> Profile:
        """The whole model, with these layers recomputed; none by default."""
        layers = [
            replace(again, name=f"{again.name or f'layer {place}'} recomputed") if flag else layer
            for place, (layer, again, flag) in enumerate(
                zip(self.layers, self.recomputed_layers, recomputed or [False] * len(self.layers), strict=True)
            )
        ]
        latency, bandwidth = self.job.machines.link(self.configuration.data, self.configuration.pipeline)
        return replace(self._measured, layers=layers, latency=latency, bandwidth=bandwidth, tokens=None)
