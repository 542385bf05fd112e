"""The names of `deepspeed.runtime.pipe.module`: a model as a list of layers. Every rank builds the layers of its own stage."""

from __future__ import annotations

import logging
import operator
import random
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.compat.deepspeed.schedule import call_to_str
from penstock.compat.deepspeed.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.model.partition import Part, Partition
from penstock.runtime.transport.current_group import get_group

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

logger = logging.getLogger(__name__)


class LayerSpec:
    """A layer that is built on the rank that holds it: a class of modules and its arguments."""

    def __init__(self, typename: Any, *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PlacementError(f"a LayerSpec takes a class of nn.Module and its arguments, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log: bool = False) -> nn.Module:
        """Make the module."""
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all others of its key, on whichever stages they are.

    - `forward_fn(module, inputs)`: runs instead of the module's forward, such as the product with an embedding's weight;
    - `tied_weight_attr`: names of the parameters that are tied if the classes of two layers with one key differ. Layers of the same
      class are tied in all their parameters.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function so that it keeps its arguments alone, and runs again when its backward comes."""
    return checkpoint(function, *args, use_reentrant=False)


class PipelineModule(nn.Module):
    """This rank's stage of a list of layers, each of which is given what the one before it returned.

    Made on every rank of a `launch` or of `torchrun`, with the same arguments.

    - `layers`: modules, `LayerSpec`, `TiedLayerSpec` and plain functions; modules that are the same object, or share parameters, are
      tied over stages too;
    - `num_stages`, or a `topology` with an axis `pipe`: how many stages there are; the ranks that are left hold replicas;
    - `loss_fn(outputs, labels)`;
    - `seed_layers`: seed every layer by `base_seed` and its number, when it is built and in every forward, with `seed_fn` or for all
      generators, so that values do not depend on the cut;
    - `partition_method`: `parameters` balances the trainable parameters, `uniform` the number of layers, and `type:regex` the number
      of layers whose class or function has a name that the regular expression finds;
    - `activation_checkpoint_interval`: how many layers keep their common input alone, and run again when their backward comes; 0 for
      none. `activation_checkpoint_func(function, *inputs)` does so, for blocks with parameters, or, where `checkpointable_layers` are
      given, for blocks of layers with these names of classes;
    - `dynamic_shape`: accepted for DeepSpeed's callers. Messages always carry their shapes.
    """

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = recompute,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_func, self.checkpointable_layers = activation_checkpoint_func, checkpointable_layers
        self.dynamic_shape, self.micro_offset, self.curr_layer = dynamic_shape, 0, 0
        self._grid = PipelineParallelGrid(_topology(num_stages, topology))
        self._topo = self._grid.topology()
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self._layer_specs = list(layers)
        self._num_layers = len(self._layer_specs)
        _check_layers(self._layer_specs)
        self.parts = self._partition_layers(partition_method)
        self._local_start, self._local_stop = self.parts[self.stage_id], self.parts[self.stage_id + 1]
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.fwd_map: dict[str, int] = {}
        """For each of this stage's modules that is not tied, by the number of its layer, its place in `forward_funcs`."""
        self.tied_modules, self.tied_weight_attrs = nn.ModuleDict(), dict[str, list[str]]()
        self._build()
        self.set_checkpoint_interval(activation_checkpoint_interval)

    # Which layers are whose -------------------------------------------------------------------------------------------

    def _partition_layers(self, method: str) -> list[int]:
        """The first layer of every stage, and the number of layers."""
        count, kind = len(self._layer_specs), method.lower()
        if kind == "uniform":
            return partition_uniform(count, self.num_stages)
        if kind == "parameters":
            return partition_balanced([_count_parameters(layer) for layer in self._layer_specs], self.num_stages)
        if kind.startswith("type:"):
            return partition_balanced(self._match_types(method.partition(":")[2]), self.num_stages)
        raise ScheduleError(f"partition_method {method!r}: give 'parameters', 'uniform', or 'type:' and a regular expression")

    def _match_types(self, pattern: str) -> list[int]:
        """1 for every layer whose name is found."""
        matches = [int(re.search(pattern, _name(layer), re.IGNORECASE) is not None) for layer in self._layer_specs]
        if not any(matches):
            names = ", ".join(sorted(set(map(_name, self._layer_specs))))
            raise PlacementError(f"no layer has a name in which {pattern!r} is found; the names are {names}")
        return matches

    def partitions(self) -> list[int]:
        """The first layer of every stage, and the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that a layer is in."""
        if not 0 <= layer_idx < len(self._layer_specs):
            raise PlacementError(f"there is no layer {layer_idx}: there are {len(self._layer_specs)}, from 0")
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def topology(self) -> ProcessTopology:
        """The topology of the ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """This rank's view of the topology."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def _build(self) -> None:
        for index in range(self._local_start, self._local_stop):
            layer = self._layer_specs[index]
            if self.seed_layers:
                self._seed(self.base_seed + index)
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key], self.tied_weight_attrs[layer.key] = layer.build(), layer.tied_weight_attr
                module = self.tied_modules[layer.key]
                self.forward_funcs.append(module if layer.forward_fn is None else partial(layer.forward_fn, module))
                continue
            built = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(built, nn.Module):
                self.fwd_map[str(index)] = len(self.forward_funcs)
                self.add_module(str(index), built)
            self.forward_funcs.append(built)

    def cut(self) -> Partition:
        """This rank's stage under the names that its state dict has; stages of other ranks are left out."""
        last = self.stage_id == self.num_stages - 1
        named = [(name, module) for name, module in self._modules.items() if module is not None and (name != "loss_fn" or last)]
        parts: list[Part | None] = [None] * self.num_stages
        parts[self.stage_id] = Part(self, tuple(name for name, _ in named), tuple(module for _, module in named))
        return Partition(tuple(parts))

    def tie_candidates(self) -> dict[Hashable, nn.Parameter]:
        """This stage's parameters that another stage may have too, by what both call them."""
        candidates: dict[Hashable, nn.Parameter] = {}
        first: dict[int, Hashable] = {}
        for index, layer in enumerate(self._layer_specs):
            for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
                called = first.setdefault(id(parameter), (index, name))
                if self._local_start <= index < self._local_stop:
                    candidates[called] = parameter
        for key, module in self.tied_modules.items():
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            names: dict[int, Hashable] = {id(parameter): (key, kind, name) for name, parameter in module.named_parameters()}
            names |= {id(parameter): (key, attribute) for attribute, parameter in self._list_tied_weights(key, module)}
            candidates |= {names[id(parameter)]: parameter for parameter in module.parameters()}
        return candidates

    def _list_tied_weights(self, key: str, module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        for attribute in self.tied_weight_attrs[key]:
            try:
                weight = operator.attrgetter(attribute)(module)
            except AttributeError:
                if attribute == "weight":  # the caller has not asked for it by name
                    continue
                raise PlacementError(
                    f"tied layer {key!r}: its {type(module).__name__} has no {attribute!r}, see tied_weight_attr"
                ) from None
            if isinstance(weight, nn.Parameter):
                yield attribute, weight

    # Running it -------------------------------------------------------------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """This stage's layers, one after the other."""
        self.micro_offset += 1
        count, value = len(self.forward_funcs), forward_input
        interval = self.activation_checkpoint_interval or max(1, count)
        for start in range(0, count, interval):
            run = self._block(range(start, min(start + interval, count)), self.micro_offset + 1, isinstance(value, tuple))
            inputs = value if isinstance(value, tuple) else (value,)
            again = bool(self.activation_checkpoint_interval) and self._checkpointable[start // interval]
            value = self.activation_checkpoint_func(run, *inputs) if again else run(*inputs)
        return value

    def _block(self, places: range, offset: int, several: bool) -> Callable[..., Any]:
        """A function that runs some of the layers; when it is run again, it draws the same random numbers."""

        def run(*inputs: Any) -> Any:
            value = inputs if several else inputs[0]
            for place in places:
                self.curr_layer = self._local_start + place
                if self.seed_layers:
                    self._seed(self.base_seed * offset + self.curr_layer)
                value = self.forward_funcs[place](value)
            return value

        return run

    def _seed(self, seed: int) -> None:
        if self.seed_fn is not None:
            self.seed_fn(seed)
            return
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute this many layers together from the next forward on; 0 for none."""
        if interval < 0:
            raise ScheduleError(f"activation_checkpoint_interval {interval}: give a number of layers, or 0 for none")
        self.activation_checkpoint_interval = interval
        starts = range(0, len(self.forward_funcs), interval) if interval else ()
        self._checkpointable = [self._is_checkpointable(self.forward_funcs[start : start + interval]) for start in starts]

    def _is_checkpointable(self, funcs: Sequence[Any]) -> bool:
        """Whether a block of layers is recomputed; a subclass may say otherwise."""
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in funcs)
        return any(isinstance(layer, nn.Module) and next(layer.parameters(), None) is not None for layer in funcs)

    def get_additional_losses(self) -> None:
        """None: losses besides the one that is trained on are for a subclass to report."""


def _topology(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    if topology is not None:
        if not topology.get_dim("pipe"):
            raise ScheduleError(f"the topology has the axes {', '.join(topology.axes)}: it needs one called 'pipe'")
        if num_stages not in (None, topology.get_dim("pipe")):
            raise ScheduleError(f"num_stages={num_stages}, but the topology has {topology.get_dim('pipe')} along 'pipe': give one of them")
        return topology
    if num_stages is None:
        raise ScheduleError("a PipelineModule needs num_stages or a topology")
    ranks = get_group()[0].ranks
    if num_stages < 1 or ranks % num_stages:
        raise ScheduleError(f"num_stages={num_stages} does not divide the {ranks} ranks: every stage has as many replicas as the others")
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=ranks // num_stages)


def _check_layers(layers: Sequence[Any]) -> None:
    for index, layer in enumerate(layers):
        if isinstance(layer, PipelineModule):
            raise PlacementError(f"layer {index} is a PipelineModule itself: give its layers")
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise PlacementError(f"layer {index} is a {type(layer).__name__}: give a module, a LayerSpec or a function")


def _name(layer: Any) -> str:
    """The name that `type:` matches: that of a module's class, or of a function."""
    kind = layer.typename if isinstance(layer, LayerSpec) else type(layer)
    return kind.__name__ if issubclass(kind, nn.Module) else getattr(layer, "__name__", "")


def _count_parameters(layer: Any) -> int:
    """How many trainable parameters a layer has. A spec is built without memory or random numbers if its class allows it."""
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                layer = layer.build()
        except Exception:  # a constructor may need values
            with torch.random.fork_rng(devices=[]):
                layer = layer.build()
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad) if isinstance(layer, nn.Module) else 0


# Cuts, equal to those of deepspeed.runtime.utils: bounds[k] is the first layer of stage k, the last one the number of layers --


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Equal numbers of layers per stage; the first stages get one more, and surplus stages get none.

    >>> partition_uniform(8, 3)
    [0, 3, 6, 8]
    """
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Contiguous runs whose heaviest and lightest differ least, as found stage by stage; of equal cuts the latest.

    >>> partition_balanced([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5, 6]
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])
    # For the first n layers: the heaviest and the lightest stage of the best cut
    heaviest, lightest = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    heaviest[0] = 0.0
    starts: list[list[int]] = []
    for _ in range(num_parts):
        before = heaviest, lightest
        heaviest, lightest = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
        row = [0] * (count + 1)
        for n in range(1, count + 1):
            last = sums[n] - sums[:n]
            most, least = np.maximum(before[0][:n], last), np.minimum(before[1][:n], last)
            row[n] = n - 1 - int(np.argmin((most - least)[::-1]))
            heaviest[n], lightest[n] = most[row[n]], least[row[n]]
        starts.append(row)
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return bounds[::-1]
