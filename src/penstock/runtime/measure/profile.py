"""Measure the time and memory of a model layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError, nearest
from penstock.planner.profile import Profile
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.slices import SequenceCutter
from penstock.runtime.device.gpu import default_device_type, device_name
from penstock.runtime.measure.layer import MeasuredLayer, Optimizer, bytes_of
from penstock.runtime.measure.slices import SliceMeter, SlicePlace, check_places, list_places
from penstock.runtime.model.hugging_face import HuggingFace, adapt_cutter, open_batch, recognise_model
from penstock.runtime.model.module_state import preserve_state
from penstock.runtime.model.partition import Layers, partition
from penstock.runtime.model.stage import Stage
from penstock.runtime.sequence.prefix import Prefixes
from penstock.runtime.sequence.token_wise import check_sliceable
from penstock.runtime.torch_internals import pytree
from penstock.text.checks import check_function
from penstock.text.units import check_count, parse_rate, parse_time


def profile(
    model: Any,
    sample: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    split: Layers | HuggingFace | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    optimizer: Optimizer | str | None = "adamw",
    device: str | torch.device | None = None,
    warmup: int = 3,
    repeats: int = 7,
    slices: int | Sequence[SlicePlace] | None = None,
    latency: float | str = 0.0,
    bandwidth: float | str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Profile:
    """Measure a model: the times of F, I and W and the memory of each layer. Times are in seconds, sizes in bytes.

    - `model`: a list of layers, an `nn.Sequential`, a causal language model of transformers, or another module with `split=Layers(...)`;
    - `sample`: one microbatch. A dict is the inputs and labels of a model of transformers, a tuple is several arguments.
      `microbatch_sizes` measures other sizes too, by repeating its rows;
    - `loss_fn(output, target)` or `loss_fn(output)` counts as part of the last layer; without one, its backward starts from ones;
    - `optimizer`: the optimizer whose memory counts: adamw, adam, sgd or none, or a function that makes one from parameters;
    - `device`: the device to move the model and the sample to; "auto" is a GPU if there is one;
    - `latency` and `bandwidth`: those of a link between two ranks, in seconds and bytes per second, or like "5us" and "12.5GB";
    - `slices`: measures slices of the sequence too, so that a plan may cut it: about how many slices a plan may take at most, or pairs of
      a length and the tokens before it. The sequence is the second dimension of the sample. Layers that cannot run on slices have no
      slice costs, and a model of transformers that cannot is refused.

    Each layer runs as a stage does: its backward is split by the same code, so that W is the work that can really be deferred. Times
    are medians of `repeats` rounds after `warmup`; on a GPU, of the GPU's own time. Memory counts the distinct storages that the
    forward saves, and those kept for the deferred weight gradients; on a GPU also the workspace beyond that. Nothing of the model
    changes except its device.
    """
    warmup, repeats = check_count("warmup", warmup, 0, error=ScheduleError), check_count("repeats", repeats, error=ScheduleError)
    if progress is not None:
        check_function("progress", progress, "progress(what, done, total)")
    latency = parse_time(latency, "latency")
    bandwidth = None if bandwidth is None else parse_rate(bandwidth, "bandwidth")
    split, sample, loss_fn, target = _open_hugging_face(model, split, sample, loss_fn, target)
    named = _name_layers(model, split)
    args, target = _move(device, named, (sample if isinstance(sample, tuple) else (sample,), target))
    loss, make_optimizer = Loss(loss_fn, "mean") if loss_fn is not None else None, _find_optimizer(optimizer)
    sizes = list(dict.fromkeys(_check_sizes(microbatch_sizes) or [count_rows(args)]))
    meter = None if slices is None else _make_meter(model if isinstance(split, HuggingFace) else None, loss, args, slices)

    def measure(size: int) -> Profile:
        """Measure all layers for one microbatch size, in rounds over all of them, so that a disturbance affects one time of each."""
        inputs, target_rows = _resize(args, size), _resize(target, size)
        layers: list[MeasuredLayer] = []
        input_bytes = float(bytes_of(inputs))
        with preserve_state([module for _, module in named]), torch.enable_grad():
            for _, module in named:
                module.zero_grad(set_to_none=True)
            for place, (name, module) in enumerate(named):
                stage = Stage(place, module, unpack=place == 0)
                layers.append(MeasuredLayer(name, stage, loss if place == len(named) - 1 else None, target_rows, inputs))
                inputs = layers[-1].measure_memory(warmup, make_optimizer)
            for done in range(repeats):
                if progress is not None:
                    progress(f"round {done + 1} of {repeats}, microbatches of {size}", done, repeats)
                for layer in layers:
                    layer.times.append(layer.time())
            results = [layer.result() for layer in layers]
            if meter is not None:
                costs = meter.measure(layers, warmup, repeats)
                results = [replace(result, slices=cost) for result, cost in zip(results, costs, strict=True)]
        return Profile(results, microbatch=size, input=input_bytes)

    first, *others = map(measure, sizes)
    device = next(leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
    source = f"measured on {device_name(device)} with torch {torch.__version__}, median of {repeats}"
    tokens = None if meter is None else meter.tokens
    units = replace(first, time_unit="s", size_unit="B", source=source, keeps_output=True, tokens=tokens)
    return replace(units, latency=latency, bandwidth=bandwidth, variants=others)


def _check_sizes(sizes: Any) -> list[int]:
    if sizes is None:
        return []
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ScheduleError(f"microbatch_sizes must be a list of numbers of rows, got {sizes!r}")
    return [check_count("a microbatch size", size, error=ScheduleError) for size in sizes]


def count_rows(sample: Any) -> int:
    """How many rows a sample has."""
    rows = mb.batch_size(sample, 0)
    if rows is None:
        raise ScheduleError("the sample has no tensor with a batch dimension: give at least one tensor")
    return rows


def _make_meter(transformer: Any, loss: Loss | None, args: Any, slices: int | Sequence[SlicePlace]) -> SliceMeter:
    """The meter of slices; `transformer` is a model of transformers, which cuts its inputs by itself."""
    shapes = [leaf.shape for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    if not shapes:
        raise ScheduleError("slices= needs a sample with a sequence: a tensor whose second dimension is its tokens")
    tokens = shapes[0][1]
    places = list_places(tokens, slices) if isinstance(slices, int) else check_places(slices, tokens)

    def make_cutter(lengths: list[int]) -> SequenceCutter:
        cutter = SequenceCutter(len(lengths), loss or Loss(None, "mean"), lengths)
        return cutter if transformer is None else adapt_cutter(cutter, transformer, own_loss=loss is not None)

    def cut(inputs: Any, target: Any, lengths: list[int]) -> tuple[list[Any], list[Any]]:
        parts = make_cutter(lengths).cut(inputs, {}, target, 1)
        return list(parts.args), parts.targets or [None] * len(lengths)

    def can_slice(layer: MeasuredLayer) -> bool:
        try:
            check_sliceable(layer.name, layer.stage.module)
        except ScheduleError:
            return False
        return True

    return SliceMeter(
        places,
        tokens,
        cut,
        make_memory=Prefixes,
        loss=None if loss is None else make_cutter([tokens]).loss,
        can_slice=can_slice,
        cut_input=lambda value, lengths: mb.split_batch(value, 1, lengths),
    )


def _resize(value: Any, size: int) -> Any:
    """A microbatch of this many rows, which repeats those of the sample as needed. It is not a view of a larger batch."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf.clone() if len(leaf) == size else leaf[torch.arange(size, device=leaf.device) % len(leaf)]

    return pytree.tree_map(resize, value)


def _open_hugging_face(model: Any, split: Any, sample: Any, loss_fn: Any, target: Any) -> tuple[Any, Any, Any, Any]:
    """Recognise a model of transformers, which has its own loss if there are labels; all others stay as they are."""
    own, loss, _ = recognise_model(model, split, loss_fn, None)
    if not isinstance(own, HuggingFace):
        return split, sample, loss_fn, target
    args, labels, _ = open_batch((sample,))
    target = labels if target is None else target
    return own, args, None if target is None and loss_fn is None else loss, target


def _name_layers(model: Any, split: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(split, HuggingFace):
        return split.units(model)
    if isinstance(model, (list, tuple, nn.ModuleList)) and split is None:
        layers = [(f"{place} {type(layer).__name__}", layer) for place, layer in enumerate(model)]
        if not layers or not all(isinstance(layer, nn.Module) for _, layer in layers):
            raise PlacementError("a model is a list of at least one layer, each an nn.Module")
        return layers
    if isinstance(split, Layers):
        inner = model.get_submodule(split.layers)
        count = len(split.head) + len(inner) + len(split.tail)
        split = replace(split, sizes=[1] * count)
    elif not isinstance(model, nn.Sequential):
        raise PlacementError(
            f"a {type(model).__name__} does not say which layers it has: give a list, an nn.Sequential or split=Layers(...)"
        )
    else:
        count = len(model)
    parts = partition(model, count, split or [1] * count).parts
    return [(part.layers[0], part.module) for part in parts if part is not None]


def _find_optimizer(optimizer: Optimizer | str | None) -> Optimizer | None:
    if not isinstance(optimizer, str):
        if optimizer is not None:
            check_function("optimizer", optimizer, "optimizer(parameters)")
        return optimizer
    known: dict[str, Optimizer | None] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "none": None}
    if optimizer not in known:
        raise ScheduleError(f"there is no optimizer {optimizer!r}: {nearest(optimizer, known)}")
    return known[optimizer]


def _move(device: str | torch.device | None, named: list[tuple[str, nn.Module]], value: Any) -> Any:
    """Move the layers and a value to a device, and return the value; without a device, everything stays where it is."""
    if device is None:
        return value
    try:
        destination = torch.device(default_device_type() if device == "auto" else device)
        torch.empty(0, device=destination)
    except (RuntimeError, AssertionError) as error:  # raised by torch for an unknown name, and for a device that is not there
        raise ScheduleError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    for _, layer in named:
        layer.to(destination)
    return pytree.tree_map(lambda leaf: leaf.to(destination) if isinstance(leaf, Tensor) else leaf, value)
