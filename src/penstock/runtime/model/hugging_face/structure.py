"""The structure of a causal language model of `transformers`: its layers, and the modules around them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PlacementError
from penstock.runtime.batch.loss import NO_MAP, LogitMap
from penstock.runtime.torch_internals.modules import CHILDREN, own_buffers, own_children, own_parameters

_ADVICE = 'give split=Layers("blocks", head=[...], tail=[...]) or a list with one module per stage'


@dataclass(frozen=True)
class ModelStructure:
    """Where a model has its layers, and what is around them. Names are paths in `model`."""

    model: Any
    """The causal language model, without PEFT's wrapper."""
    prefix: str
    """The prefix of its names in the wrapped model."""
    base: str
    """The module that turns tokens into hidden states."""
    layers: str
    """The list of layers."""
    around: Mapping[str, nn.Module]
    """All other modules beside the path to the layers."""

    @property
    def count(self) -> int:
        return len(self.blocks)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.layers))

    @property
    def config(self) -> Any:
        """The config of the language model, which may be part of a larger model."""
        config = self.model.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def options(self) -> dict[str, Any]:
        """The options of every forward: without a cache, and without router logits, which `router_loss` collects."""
        quiet = {"output_router_logits": False} if hasattr(self.config, "output_router_logits") else {}
        return {"use_cache": False, "return_dict": True, **quiet}

    @property
    def device(self) -> torch.device:
        """The device of its tables, which a trial forward must run on."""
        tables = (buffer for module in self.around.values() for buffer in module.buffers() if not buffer.is_meta)
        return next(tables, torch.empty(0)).device

    def full_name(self, path: str) -> str:
        """Return the name of a path in the wrapped model."""
        return f"{self.prefix}{path}"


@dataclass(frozen=True)
class RunOrder:
    """The order in which the modules of a model run."""

    head: tuple[str, ...]
    """Those before the layers."""
    tail: tuple[str, ...]
    """Those after the layers."""
    tables: tuple[str, ...]
    """Those without parameters that every stage needs, such as rotary tables."""
    tuples: bool
    """Whether layers return tuples that begin with the hidden states."""


@dataclass(frozen=True)
class EndPaths:
    """The token embedding and the head, as far as they are spread over the ranks and so in no stage."""

    embedding: str | None = None
    head: str | None = None
    logits: LogitMap = NO_MAP
    """How the output of that head becomes logits."""

    def list_paths(self) -> list[str]:
        return [path for path in (self.embedding, self.head) if path is not None]


NO_ENDS = EndPaths()


def is_transformers_model(model: Any) -> bool:
    """Whether this is a model of `transformers`, possibly wrapped by PEFT."""
    inner = _unwrap_peft(model)
    return isinstance(inner, nn.Module) and hasattr(inner, "base_model_prefix") and hasattr(getattr(inner, "config", None), "to_dict")


def _unwrap_peft(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def find_structure(wrapped: Any) -> ModelStructure:
    """Find the layers of a model and the modules around them; refuse a model that has no such structure."""
    if not is_transformers_model(wrapped):
        raise PlacementError(f"a {type(wrapped).__name__} is not a transformers model: {_ADVICE}")
    model = _unwrap_peft(wrapped)
    _check_adapter(wrapped)
    base = str(model.base_model_prefix if model.base_model_prefix in own_children(model) else "model")
    core = own_children(model).get(base)
    if core is None or not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise PlacementError(f"{type(model).__name__} has no head over its hidden states: load it with AutoModelForCausalLM, or {_ADVICE}")
    layers = f"{base}.{_find_layer_list(core)}"
    prefix = next(name for name, module in wrapped.named_modules() if module is model)
    return ModelStructure(model, f"{prefix}." if prefix else "", base, layers, _find_around(model, layers))


def _check_adapter(wrapped: Any) -> None:
    """Refuse prompt learning: its tokens are added outside the model's forward. Adapters inside the layers come with them."""
    configs = getattr(wrapped, "peft_config", {})
    wrong = [config for config in configs.values() if getattr(config, "is_prompt_learning", False)] if isinstance(configs, dict) else []
    if wrong:
        kind = getattr(wrong[0].peft_type, "value", wrong[0].peft_type)
        raise PlacementError(
            f"PEFT's {kind} puts its own tokens in front of the model's: use an adapter inside the layers instead, such as LoRA"
        )


def _find_layer_list(core: nn.Module) -> str:
    """Return the path of the layers: from the model's pipeline plan, else the only list that is as long as the model is deep."""
    lists = {name: module for name, module in core.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    config: Any = core.config
    planned = [str(name) for name in getattr(config, "base_model_pp_plan", None) or () if name in lists]
    if len(planned) == 1:
        return planned[0]
    depth = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "num_hidden_layers", None)
    names = [str(name) for name, layers in lists.items() if len(layers) == depth and "." not in name.removeprefix("decoder.")]
    if len(names) != 1:
        shown = f"lists of {depth} layers: {', '.join(names)}" if names else f"no list of {depth} layers"
        raise PlacementError(f"{type(core).__name__} has {shown}: {_ADVICE}")
    return names[0]


def _find_around(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Return everything beside the path from the model to its layers; the modules on it may hold no parameters themselves."""
    around: dict[str, nn.Module] = {}
    module, path = model, ""
    for step in layers.split("."):
        _check_on_path(module, path)
        for name, child in own_children(module).items():
            if child is not None and name != step:
                around[f"{path}{name}"] = child
        module, path = module.get_submodule(step), f"{path}{step}."
    return around


def _check_on_path(module: nn.Module, path: str) -> None:
    place = f"{path.rstrip('.') or 'the model'}, a {type(module).__name__},"
    own = [name for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()) if tensor is not None]
    if own:
        raise PlacementError(f"{place} holds {own[0]!r} itself, which belongs to no layer: {_ADVICE}")
    if "forward" in vars(module):
        raise PlacementError(f"the forward of {place} was replaced, as device_map= does: load the model without it")


def modules_on_path(model: nn.Module, layers: str) -> Sequence[nn.Module]:
    """Return the modules from the model down to the one that holds its layers."""
    modules = [model]
    for step in layers.split(".")[:-1]:
        modules.append(modules[-1].get_submodule(step))
    return modules


def check_layerdrop(path: Sequence[nn.Module]) -> None:
    """Refuse a model in training that skips layers at random: its stages would not skip the same ones."""
    for module in path:
        rate = getattr(module, "layerdrop", 0)
        if module.training and isinstance(rate, (int, float)) and rate > 0:
            raise PlacementError(
                f"{type(module).__name__} leaves out layers at random, with layerdrop={rate}, which its stages cannot agree on: "
                "set its layerdrop to 0, as with config.layerdrop = 0 before it is built, or call model.eval() to train without dropout"
            )


def copy_with(module: nn.Module, replaced: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """Make a shallow copy of a module with some of its submodules replaced, by their paths. The original is not changed."""
    if path in replaced:
        return replaced[path]
    if not any(name.startswith(f"{path}.") or not path for name in replaced):
        return module
    twin = copy.copy(module)
    twin.__dict__[CHILDREN] = {
        name: child if child is None else copy_with(child, replaced, f"{path}.{name}".lstrip("."))
        for name, child in own_children(module).items()
    }
    return twin
