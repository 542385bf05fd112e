"""What a run gives, flat: one value per name, so that two runs are compared name by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fuzz.case import list_features
from fuzz.layers import Counter
from fuzz.model import Model
from fuzz.trees import Box, Packet

Record = dict[str, Any]
"""Tensors and plain values by name: `0.step.loss`, `0.step.grad.1.layers.1.inner.weight`, `state.buffer...`."""


def record_result(record: Record, where: str, loss: Any, losses: Any, metrics: Any, outputs: Any) -> None:
    """The result of a call."""
    if losses is not None:
        record[f"{where}.loss"] = loss
        record[f"{where}.losses"] = list(losses)
        record[f"{where}.metrics"] = {name: list(values) for name, values in sorted(metrics.items())}
    record_tree(record, f"{where}.outputs", outputs)


def record_tree(record: Record, where: str, value: Any) -> None:
    """A tree's structure in its names, and its leaves."""
    if isinstance(value, dict):
        children = {f"{{{key}}}": value[key] for key in sorted(value)}
    elif isinstance(value, (Packet, Box)):
        children = {f".{name}": child for name, child in vars(value).items()}
    elif isinstance(value, (tuple, list)):
        children = {f"[{number}]": child for number, child in enumerate(value)}
    else:
        record[where] = value.detach() if isinstance(value, Tensor) else value
        return
    record[f"{where}.type"] = type(value).__name__
    for name, child in children.items():
        record_tree(record, where + name, child)


def record_gradients(record: Record, where: str, model: Model, stages: list[int]) -> None:
    """Every gradient, with its strides."""
    for name, parameter in model.tensors_of(stages):
        grad = parameter.grad
        record[f"{where}.grad.{name}"] = None if grad is None else grad.detach().to_dense().clone() if grad.is_sparse else grad.clone()
        record[f"{where}.strides.{name}"] = None if grad is None or grad.is_sparse else _strides(grad)


def _strides(tensor: Tensor) -> list[int]:
    """The strides that say anything: of dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def record_state(record: Record, model: Model, stages: list[int]) -> None:
    """What is left at the end: parameters, buffers, Python counters, modes, and the calls of hooks, which each copy has its own of."""
    copied = {"bidirectional", "layer:tied"} & list_features(model.case)
    for name, parameter in model.tensors_of(stages):
        record[f"state.parameter.{name}"] = parameter.detach().clone()
        if name in model.hook_calls and not copied:
            record[f"state.hook.{name}"] = model.hook_calls[name]
    for stage in stages:
        module = model.stages[stage]
        for name, buffer in module.named_buffers():
            record[f"state.buffer.{stage}.{name}"] = buffer.detach().clone()
        for name, inner in module.named_modules():
            record[f"state.mode.{stage}.{name}"] = inner.training
            if isinstance(inner, Counter):
                record[f"state.counter.{stage}.{name}"] = inner.runs


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> Any:
    """The optimizer of a call. A large epsilon keeps rounding noise of vanishing gradients small."""
    if not parameters:
        return None
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True)
