"""What a causal language model of `transformers` is made of: found by its structure, so that nothing of it is imported."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.errors import PlacementError

_REMEDY = 'give split=Layers("blocks", head=[...], tail=[...]) or a list with one module a stage'


@dataclass(frozen=True)
class ModelStructure:
    """Where a model has its layers, and what stands around them. Names are paths in `model`."""

    model: Any
    """The causal language model, without what PEFT wraps around it."""
    prefix: str
    """What its names begin with in the model that was given."""
    base: str
    """The part that makes hidden states of tokens."""
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
        """The language model's own, where it is part of a larger one."""
        config = self.model.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def options(self) -> dict[str, Any]:
        """How every forward is called: without a cache, and without routers' figures, which are seen to elsewhere."""
        quiet = {"output_router_logits": False} if hasattr(self.config, "output_router_logits") else {}
        return {"use_cache": False, "return_dict": True, **quiet}

    @property
    def device(self) -> torch.device:
        """Where tables are, which its forward runs on what it is given with."""
        tables = (each for module in self.around.values() for each in module.buffers() if not each.is_meta)
        return next(tables, torch.empty(0)).device

    def name(self, path: str) -> str:
        """The name in the model that was given."""
        return f"{self.prefix}{path}"


def is_transformers_model(model: Any) -> bool:
    """Whether this is a model of transformers', or one that PEFT has wrapped."""
    inner = _unwrapped(model)
    return isinstance(inner, nn.Module) and hasattr(inner, "base_model_prefix") and hasattr(getattr(inner, "config", None), "to_dict")


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def find_structure(given: Any) -> ModelStructure:
    """Find the parts of a model."""
    if not is_transformers_model(given):
        raise PlacementError(f"a {type(given).__name__} is no model of transformers': {_REMEDY}")
    model = _unwrapped(given)
    _check_adapter(given)
    base = str(model.base_model_prefix if model.base_model_prefix in model._modules else "model")
    core = model._modules.get(base)
    if core is None or _is_headless(model):
        raise PlacementError(f"{type(model).__name__} has no head over its hidden states: load it with AutoModelForCausalLM, or {_REMEDY}")
    layers = f"{base}.{_layer_list(core)}"
    around = _around(model, layers)
    prefix = next(name for name, each in given.named_modules() if each is model)
    return ModelStructure(model, f"{prefix}." if prefix else "", base, layers, around)


def _is_headless(model: Any) -> bool:
    return not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None


def _check_adapter(given: Any) -> None:
    """Adapters inside the layers come along with them; prompts in front of the tokens are made outside of the model's forward."""
    configs = getattr(given, "peft_config", {})
    wrong = [config for config in configs.values() if getattr(config, "is_prompt_learning", False)] if isinstance(configs, dict) else []
    if wrong:
        kind = getattr(wrong[0].peft_type, "value", wrong[0].peft_type)
        raise PlacementError(
            f"PEFT's {kind} puts its own tokens in front of the model's: only adapters inside the layers, LoRA say, can be cut"
        )


def _layer_list(core: nn.Module) -> str:
    """The path of the list of layers: as the model's pipeline plan names it, else the only one that is as long as the model is deep."""
    lists = {name: each for name, each in core.named_modules() if isinstance(each, nn.ModuleList) and len(each)}
    config: Any = core.config
    planned = [str(name) for name in getattr(config, "base_model_pp_plan", None) or () if name in lists]
    if len(planned) == 1:
        return planned[0]
    depth = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "num_hidden_layers", None)
    found = [str(name) for name, each in lists.items() if len(each) == depth and "." not in name.removeprefix("decoder.")]
    if len(found) != 1:
        said = f"lists of {depth} layers: {', '.join(found)}" if found else f"no list of {depth} layers"
        raise PlacementError(f"{type(core).__name__} has {said}: {_REMEDY}")
    return found[0]


def _around(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Everything beside the path from the model to its layers; what is on the path may hold no parameters itself."""
    found: dict[str, nn.Module] = {}
    module, path = model, ""
    for step in layers.split("."):
        _check_on_path(module, path)
        for name, child in module._modules.items():
            if child is not None and name != step:
                found[f"{path}{name}"] = child
        module, path = module.get_submodule(step), f"{path}{step}."
    return found


def _check_on_path(module: nn.Module, path: str) -> None:
    what = f"{path.rstrip('.') or 'the model'}, a {type(module).__name__},"
    own = [name for name, each in (*module._parameters.items(), *module._buffers.items()) if each is not None]
    if own:
        raise PlacementError(f"{what} holds {own[0]!r} itself, which belongs to no layer: {_REMEDY}")
    if "forward" in vars(module):
        raise PlacementError(f"the forward of {what} was replaced, as device_map= does: load the model without it")


def modules_on_path(model: nn.Module, layers: str) -> Sequence[nn.Module]:
    """The modules from the model down to what holds its layers."""
    found = [model]
    for step in layers.split(".")[:-1]:
        found.append(found[-1].get_submodule(step))
    return found


def check_layerdrop(path: Sequence[nn.Module]) -> None:
    """Layers that are left out at random while training would be others on each stage."""
    for each in path:
        rate = getattr(each, "layerdrop", 0)
        if each.training and isinstance(rate, (int, float)) and rate > 0:
            raise PlacementError(
                f"{type(each).__name__} leaves out layers at random, with layerdrop={rate}, which its stages cannot agree on: "
                "set its layerdrop to 0, as with config.layerdrop = 0 before it is built, or call model.eval() to train without dropout"
            )


def copy_with(module: nn.Module, replaced: Mapping[str, nn.Module], path: str = "") -> nn.Module:
    """A module that runs as this one does, with others in place of some of its own. The original stays as it is."""
    if path in replaced:
        return replaced[path]
    if not any(name.startswith(f"{path}.") or not path for name in replaced):
        return module
    made = copy.copy(module)
    made.__dict__["_modules"] = {
        name: child if child is None else copy_with(child, replaced, f"{path}.{name}".lstrip("."))
        for name, child in module._modules.items()
    }
    return made
