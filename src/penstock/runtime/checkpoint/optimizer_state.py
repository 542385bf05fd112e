"""The state of optimizers by the names of parameters, as torch's own flattened form has it.

`state.<parameter>.<key>` is what the optimizer keeps for a parameter; `param_groups.<parameter>.<option>` are the options of its
group. So the state of a model is the same whichever parameters an optimizer has on which rank.
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
Same = dict[str, list[str]]
"""Keys that a value is written under, and the others that it has."""


def listed(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)


def leaf(value: Any) -> Any:
    """A value that torch.distributed.checkpoint keeps in one piece: it takes mappings and lists apart, and tuples not."""
    return (value,) if isinstance(value, (Mapping, list)) else value


def unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], (Mapping, list)) else value


def optimizer_state(optimizers: Optimizers, names: Mapping[int, str]) -> tuple[dict[str, Any], Same]:
    """What all optimizers keep, by the names of their parameters; an option that many have in common is there once."""
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for optimizer in listed(optimizers):
        packed = optimizer.state_dict()
        for group, (parameters, _) in zip(packed["param_groups"], groups_of(optimizer, names), strict=True):
            for index, name in zip(group["params"], parameters, strict=True):
                state |= {f"{STATE}{name}.{key}": leaf(value) for key, value in packed["state"].get(index, {}).items()}
                options |= {f"{OPTIONS}{name}.{key}": leaf(value) for key, value in group.items() if key not in _NAMES}
    once, same = _once(options)
    return state | once, same


def _once(options: Mapping[str, Any]) -> tuple[dict[str, Any], Same]:
    """Each value under the first of its keys, and the other keys of each."""
    first: dict[bytes, str] = {}
    same: Same = {}
    for key, value in options.items():
        there = first.setdefault(pickle.dumps((key.rpartition(".")[2], value)), key)
        if there != key:
            same.setdefault(there, []).append(key)
    return {key: options[key] for key in first.values()}, same


_NAMES = ("params", "param_names")


def groups_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[list[str], list[nn.Parameter]]]:
    """The names and the parameters of each group."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for parameter in (parameter for group in groups for parameter in group):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of the model's on this rank: "
                "give it pipe.parameters()"
            )
    return [([names[id(parameter)] for parameter in group], group) for group in groups]


def by_parameter(keys: Iterable[str], names: Iterable[str], prefix: str) -> dict[str, dict[str, str]]:
    """The saved keys under this prefix, of each parameter by what comes after its name."""
    wanted: dict[str, dict[str, str]] = {name: {} for name in names}
    for key in keys:
        if not key.startswith(prefix):
            continue
        words = key[len(prefix) :].split(".")
        for count in range(1, len(words)):
            name = ".".join(words[:count])
            if name in wanted:
                wanted[name][".".join(words[count:])] = key
                break
    return wanted


def load_optimizer(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]) -> None:
    """Give an optimizer the state of its parameters."""
    groups = groups_of(optimizer, names)
    mine = [name for parameters, _ in groups for name in parameters]
    state, options = by_parameter(flat, mine, STATE), by_parameter(flat, mine, OPTIONS)
    packed = optimizer.state_dict()
    fresh: dict[int, dict[str, Any]] = {}
    for group, (parameters, _) in zip(packed["param_groups"], groups, strict=True):
        group.update(_options(parameters, options, flat))
        for index, name in zip(group["params"], parameters, strict=True):
            if state[name]:
                fresh[index] = {key: unwrapped(flat[full]) for key, full in state[name].items()}
    optimizer.load_state_dict({**packed, "state": fresh})
    _keep_types(optimizer, fresh, [parameter for _, parameters in groups for parameter in parameters])


def check_options(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any]) -> None:
    """Refuse groups whose parameters were saved with different options, or by an optimizer that has other ones."""
    for group, (parameters, _) in zip(optimizer.param_groups, groups_of(optimizer, names), strict=True):
        options = _options(parameters, by_parameter(flat, parameters, OPTIONS), flat)
        if parameters:
            _refuse_other_kind(optimizer, parameters[0], options.keys(), group.keys())


_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"))
"""How an optimizer computes rather than what; versions of torch differ in which of these there are."""
_SCHEDULED = frozenset(("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"))
"""What torch's schedulers leave in the groups."""


def _refuse_other_kind(optimizer: Optimizer, name: str, saved: Collection[str], mine: Collection[str]) -> None:
    """Whatever class it is: its options are what tells one from another in torch's form."""
    lost, more = set(optimizer.defaults) - set(saved) - _SWITCHES, set(saved) - set(mine) - _SWITCHES - _SCHEDULED
    if lost or more:
        theirs, ours = (sorted(set(keys) - _SWITCHES - _SCHEDULED - set(_NAMES)) for keys in (saved, mine))
        raise CheckpointError(
            f"{name} was saved with an optimizer of the options {', '.join(theirs)}, but {type(optimizer).__name__} "
            f"has {', '.join(ours)}: load with the kind of optimizer that saved, or without one"
        )


def check_state(optimizer: Optimizer, names: Mapping[int, str], keys: Iterable[str]) -> None:
    """Refuse what was saved for parameters that the optimizer keeps other things for. An option may add to them, as `amsgrad` does."""
    groups = groups_of(optimizer, names)
    held = {name: parameter for theirs in groups for name, parameter in zip(*theirs, strict=True) if optimizer.state.get(parameter)}
    for name, saved in by_parameter(keys, held, STATE).items():
        mine, theirs = set(optimizer.state[held[name]]), set(saved)
        if theirs and not (mine <= theirs or theirs <= mine):
            raise CheckpointError(
                f"the optimizer's state of {name} was saved as {', '.join(sorted(theirs))}, but {type(optimizer).__name__} "
                f"keeps {', '.join(sorted(mine))}: load with the kind of optimizer that saved, or without one"
            )


def _options(parameters: Sequence[str], options: Mapping[str, Mapping[str, str]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options that all parameters of a group were saved with."""
    found: dict[str, Any] = {}
    for name in parameters:
        theirs = {key: unwrapped(flat[full]) for key, full in options[name].items()}
        if name != parameters[0] and not _equal(theirs, found):
            wrong = next(key for key in {*theirs, *found} if not _equal(theirs.get(key), found.get(key)))
            raise CheckpointError(
                f"{parameters[0]} and {name} are in one group of the optimizer, but were saved with {wrong} = {found.get(wrong)!r} "
                f"and {theirs.get(wrong)!r}: give the optimizer the groups that it had"
            )
        found = theirs
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and bool(torch.equal(one, other))
    return bool(one == other)


def _keep_types(optimizer: Optimizer, fresh: Mapping[int, Mapping[str, Any]], parameters: Sequence[nn.Parameter]) -> None:
    """An optimizer casts what it loads to the type of the parameter, which loses digits where it had kept more of them."""
    for index, values in fresh.items():
        kept = optimizer.state[parameters[index]]
        for key, value in values.items():
            if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device)
