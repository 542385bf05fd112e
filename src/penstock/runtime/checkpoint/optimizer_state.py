"""The state of optimizers by parameter name, in torch's flattened form.

`state.<parameter>.<key>` is what the optimizer keeps for a parameter; `param_groups.<parameter>.<option>` are the options of its
group. So the saved state does not depend on which rank's optimizer holds which parameters.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import CheckpointError

Optimizers = Optimizer | Sequence[Optimizer] | None
STATE, OPTIONS = "state.", "param_groups."
Aliases = dict[str, list[str]]
"""For keys that a value is written under, the other keys of the same value."""
_NOT_OPTIONS = ("params", "param_names")
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"))
"""Options of how an optimizer computes rather than what; versions of torch differ in which of them exist."""
_SCHEDULED = frozenset(("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"))
"""Options that torch's schedulers add to the groups."""


def list_optimizers(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def wrap_collection(value: Any) -> Any:
    """Make torch.distributed.checkpoint keep a value in one piece: it takes mappings and lists apart, but not tuples."""
    return (value,) if isinstance(value, (Mapping, list)) else value


def unwrap_collection(value: Any) -> Any:
    """Undo `wrap_collection`."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], (Mapping, list)) else value


def named_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[list[str], list[nn.Parameter]]]:
    """The names and the parameters of each group; `names` are by object identity."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for parameter in (parameter for group in groups for parameter in group):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that does not belong to the model on this rank: "
                "give it pipe.parameters()"
            )
    return [([names[id(parameter)] for parameter in group], group) for group in groups]


# Saving -----------------------------------------------------------------------------------------------------------------


def optimizer_state(optimizers: Optimizers, names: Mapping[int, str]) -> tuple[dict[str, Any], Aliases]:
    """The state of all optimizers in the flattened form. An option with the same value for many parameters is there once, with aliases."""
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for optimizer in list_optimizers(optimizers):
        packed = optimizer.state_dict()
        for group, (parameters, _) in zip(packed["param_groups"], named_groups(optimizer, names), strict=True):
            shared = {key: wrap_collection(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for index, name in zip(group["params"], parameters, strict=True):
                state |= {f"{STATE}{name}.{key}": wrap_collection(value) for key, value in packed["state"].get(index, {}).items()}
                options |= {f"{OPTIONS}{name}.{key}": value for key, value in shared.items()}
    distinct, aliases = _merge_equal(options)
    return state | distinct, aliases


def _merge_equal(options: Mapping[str, Any]) -> tuple[dict[str, Any], Aliases]:
    """Keep equal values of an option once, under the first key; the other keys become its aliases."""
    first: dict[bytes, str] = {}
    aliases: Aliases = {}
    for key, value in options.items():
        first_key = first.setdefault(pickle.dumps((key.rpartition(".")[2], value)), key)
        if first_key != key:
            aliases.setdefault(first_key, []).append(key)
    return {key: options[key] for key in first.values()}, aliases


# Loading ----------------------------------------------------------------------------------------------------------------


def keys_by_parameter(keys: Iterable[str], names: Iterable[str], prefix: str) -> dict[str, dict[str, str]]:
    """For each parameter name, the saved keys under `prefix` by what follows the name."""
    by_name: dict[str, dict[str, str]] = {name: {} for name in names}
    for key in keys:
        if not key.startswith(prefix):
            continue
        words = key[len(prefix) :].split(".")
        for count in range(1, len(words)):
            name = ".".join(words[:count])
            if name in by_name:
                by_name[name][".".join(words[count:])] = key
                break
    return by_name


def load_optimizer(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]) -> None:
    """Load the state of an optimizer's parameters from the flattened form."""
    groups = named_groups(optimizer, names)
    mine = [name for parameters, _ in groups for name in parameters]
    state, options = keys_by_parameter(flat, mine, STATE), keys_by_parameter(flat, mine, OPTIONS)
    packed = optimizer.state_dict()
    loaded: dict[int, dict[str, Any]] = {}
    for group, (parameters, _) in zip(packed["param_groups"], groups, strict=True):
        group.update(_group_options(parameters, options, flat))
        for index, name in zip(group["params"], parameters, strict=True):
            if state[name]:
                loaded[index] = {key: unwrap_collection(flat[full]) for key, full in state[name].items()}
    optimizer.load_state_dict({**packed, "state": loaded})
    _restore_dtypes(optimizer, loaded, [parameter for _, parameters in groups for parameter in parameters])


def check_options(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]) -> None:
    """Reject groups whose parameters were saved with different options, or by an optimizer with other options."""
    for group, (parameters, _) in zip(optimizer.param_groups, named_groups(optimizer, names), strict=True):
        options = _group_options(parameters, keys_by_parameter(flat, parameters, OPTIONS), flat)
        if parameters:
            _check_kind(optimizer, parameters[0], options.keys(), group.keys())


def _check_kind(optimizer: Optimizer, name: str, saved: Collection[str], mine: Collection[str]) -> None:
    """Reject state of another kind of optimizer: the options are all that tells kinds apart in torch's form."""
    missing, unknown = set(optimizer.defaults) - set(saved) - _SWITCHES, set(saved) - set(mine) - _SWITCHES - _SCHEDULED
    if missing or unknown:
        theirs, ours = (sorted(set(keys) - _SWITCHES - _SCHEDULED - set(_NOT_OPTIONS)) for keys in (saved, mine))
        raise CheckpointError(
            f"{name} was saved with an optimizer of the options {', '.join(theirs)}, but {type(optimizer).__name__} "
            f"has {', '.join(ours)}: load with the kind of optimizer that saved, or without one"
        )


def check_state(optimizer: Optimizer, names: Mapping[int, str], keys: Iterable[str]) -> None:
    """Reject saved state whose keys differ from what the optimizer keeps. One may have more, as with `amsgrad`."""
    groups = named_groups(optimizer, names)
    held = {name: parameter for group in groups for name, parameter in zip(*group, strict=True) if optimizer.state.get(parameter)}
    for name, saved in keys_by_parameter(keys, held, STATE).items():
        mine, theirs = set(optimizer.state[held[name]]), set(saved)
        if theirs and not (mine <= theirs or theirs <= mine):
            raise CheckpointError(
                f"the optimizer's state of {name} was saved as {', '.join(sorted(theirs))}, but {type(optimizer).__name__} "
                f"keeps {', '.join(sorted(mine))}: load with the kind of optimizer that saved, or without one"
            )


def _group_options(parameters: Sequence[str], keys: Mapping[str, Mapping[str, str]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options that all parameters of a group were saved with."""
    options: dict[str, Any] = {}
    for name in parameters:
        theirs = {key: unwrap_collection(flat[full]) for key, full in keys[name].items()}
        if name != parameters[0] and not _equal(theirs, options):
            key = next(key for key in {*theirs, *options} if not _equal(theirs.get(key), options.get(key)))
            raise CheckpointError(
                f"{parameters[0]} and {name} are in one group of the optimizer, but were saved with {key} = {options.get(key)!r} "
                f"and {theirs.get(key)!r}: give the optimizer the groups that it had"
            )
        options = theirs
    return options


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and bool(torch.equal(one, other))
    return bool(one == other)


def _restore_dtypes(optimizer: Optimizer, loaded: Mapping[int, Mapping[str, Any]], parameters: Sequence[nn.Parameter]) -> None:
    """Undo the cast to the parameter's type that an optimizer applies on loading: it loses digits of state kept in higher precision."""
    for index, values in loaded.items():
        state = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(state.get(key), Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)
