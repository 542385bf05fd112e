"""Capturing and restoring everything that a stage's forward may change, so that it can be run again.

`ModuleState` is the state of a module except for its parameters: buffers, tensors kept as attributes, and plain attributes such as
counters. `ModuleVersions` notices changes of it at low cost. `ForwardState` adds the inputs, the random streams and the side outputs.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.batch.result import SideOutputs
from penstock.runtime.model.random_streams import capture_random_state, preserve_random_state, set_random_state
from penstock.runtime.tensors.dtensor import from_local_like, is_dtensor, to_local
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.modules import NormBase, has_forward_hooks, own_buffers
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks, read_version

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: parameters, buffers, submodules and hooks."""

_PLAIN = (bool, int, float, complex, str, bytes, frozenset, torch.dtype, torch.device)
"""Types that are compared by value; objects of other types are the same only if they are one object."""

_MISSING = object()
"""The value of an attribute that does not exist."""

_CONTAINERS = (list, tuple, set, dict, deque)


@dataclass(eq=False)
class ModuleState:
    """The state of a module and its submodules at one moment, to restore it or compare with it later.

    It covers buffers, tensors that are plain attributes, and all other plain attributes. Lists, tuples, dicts, sets and deques are
    copied one level deep, together with the tensors in them. Objects of other types are kept by reference, so a change inside such an
    object is not noticed. Parameters are left out.
    """

    _places: list[_Place]
    _entries: list[_Value]

    @classmethod
    def capture(cls, module: nn.Module) -> ModuleState:
        """Capture the current state of the module."""
        places = [_Place(prefix, holder) for prefix, part in module.named_modules() for holder in (own_buffers(part), vars(part))]
        return cls(places, [_Value(place, key, value, _copy(value)) for place in places for key, value in place.entries()])

    @classmethod
    def capture_only(cls, module: nn.Module, names: Collection[str]) -> ModuleState:
        """Capture only what has these dotted names; something that does not exist is captured as missing."""
        values = []
        for name in names:
            prefix, _, key = name.rpartition(".")
            part = module.get_submodule(prefix)
            place = _Place(prefix, own_buffers(part) if key in own_buffers(part) else vars(part))
            value = place.holder.get(key, _MISSING)
            values.append(_Value(place, key, value, _copy(value)))
        return cls([], values)

    def keep_changed(self, also: Collection[str] = ()) -> list[str]:
        """Drop everything that has not changed, except what has one of these dotted names; return the names of the rest."""
        self._entries = [value for value in self._entries if value.name in also or value.differs()] + self._list_added()
        self._places = []
        return self.names()

    def extend(self, other: ModuleState) -> None:
        """Add what another state has captured."""
        self._entries += other._entries

    def names(self) -> list[str]:
        """Return the dotted names of everything that was captured."""
        return [value.name for value in self._entries]

    @contextmanager
    def stand_in(self) -> Iterator[None]:
        """A context in which the module has copies of the captured state; afterwards it has its present objects again.

        A forward inside starts from the captured state and does not change the present one. It may keep the copies.
        """
        now = [(value.place.holder, value.key, value.place.holder.get(value.key, _MISSING)) for value in self._entries]
        copies = {id(value.value): value.stand_in() for value in self._entries}
        for value in self._entries:
            _put(value.place.holder, value.key, copies[id(value.value)])
        try:
            yield
        finally:
            for holder, key, before in now:
                _put(holder, key, before)

    def values(self) -> dict[str, Any]:
        """Return what was captured by dotted name, as far as it can be compared with another module's and sent to another process.

        That is tensors, plain values and containers of them.
        """
        contents = {value.name: value.contents() for value in self._entries}
        return {name: value for name, value in contents.items() if _is_plain(value)}

    def assign(self, values: Mapping[str, Any]) -> None:
        """Give the module copies of these values, by dotted name; attributes that it does not have are added."""
        by_name = {value.name: value for value in self._entries}
        attributes = {place.prefix: place.holder for place in self._places}
        for name, contents in values.items():
            value, (prefix, _, key) = by_name.get(name), name.rpartition(".")
            if value is not None:
                value.assign(contents)
            elif prefix in attributes:
                attributes[prefix][key] = copy.deepcopy(contents)

    def restore(self) -> None:
        """Restore the contents of tensors and containers in place, and put back objects that were replaced."""
        for value in self._list_added() + self._entries:
            value.restore()

    def list_changed(self, *, set_first: bool = True) -> list[str]:
        """Return the dotted names of everything that differs from when it was captured; NaN equals NaN.

        Without `set_first`, what was None or did not exist is left out, because a forward may set it once.
        """
        differing = [value.name for value in self._entries if value.differs() and (set_first or value.value is not None)]
        return differing + [value.name for value in self._list_added() if set_first]

    def _list_added(self) -> list[_Value]:
        return _find_added(self._places, ((value.place, value.key) for value in self._entries))


def _find_added(places: Iterable[_Place], known: Iterable[tuple[_Place, str]]) -> list[_Value]:
    """Return everything that is not among the known, as values that did not exist before."""
    before = {(id(place.holder), key) for place, key in known}
    added = ((place, key) for place in places for key, _ in place.entries() if (id(place.holder), key) not in before)
    return [_Value(place, key, _MISSING, None) for place, key in added]


@dataclass(frozen=True)
class ModuleVersions:
    """The identities of the objects in a module's state and the versions of its tensors: notices most changes at low cost.

    Running statistics change without changing the version, so a caller skips them. torch's own layers without buffers and hooks hold no
    state and are not looked at.
    """

    _entries: list[tuple[_Place, str, Any, int]]
    _sizes: list[tuple[_Place, int]]
    _skip: Collection[str]

    @classmethod
    def capture(cls, module: nn.Module, skip: Collection[str] = ()) -> ModuleVersions:
        """Capture the current state, except what has one of these dotted names."""
        parts = [(prefix, part) for prefix, part in module.named_modules() if _may_hold_state(part)]
        places = [_Place(prefix, holder) for prefix, part in parts for holder in (own_buffers(part), vars(part))]
        entries = [(place, key, value, _find_version(value)) for place in places for key, value in place.entries()]
        others = [entry for entry in entries if entry[0].name_of(entry[1]) not in skip]
        return cls(others, [(place, len(place.holder)) for place in places], skip)

    def changes(self, *, set_first: bool = True) -> tuple[ModuleState, list[str]]:
        """Return the earlier state of what was replaced or added, and the names of what was changed in place.

        Without `set_first`, what was None or did not exist is left out.
        """
        replaced: list[_Value] = []
        in_place: list[str] = []
        for place, key, value, version in self._entries:
            now = place.holder.get(key, _MISSING)
            if now is not value and (set_first or value is not None) and not _is_same(now, value, None):
                replaced.append(_Value(place, key, value, None))
            if version != -1 and _find_version(value) != version:
                in_place.append(place.name_of(key))
        if set_first and any(len(place.holder) != size for place, size in self._sizes):
            added = _find_added((place for place, _ in self._sizes), ((place, key) for place, key, _, _ in self._entries))
            replaced += [value for value in added if value.name not in self._skip]
        return ModuleState([], replaced), in_place


def name_running_statistics(module: nn.Module) -> list[str]:
    """Return the dotted names of the running statistics that a forward of the module would change now."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, NormBase) and part.training and part.running_mean is not None
        for name in ("running_mean", "running_var", "num_batches_tracked")
    ]


def _may_hold_state(part: nn.Module) -> bool:
    own = type(part).__module__.startswith("torch.nn.modules.")
    return not own or bool(own_buffers(part) or has_forward_hooks(part))


def _find_version(value: Any) -> int:
    """Return the version of a tensor, or the length of a container; -1 for everything else."""
    if isinstance(value, Tensor):
        return -1 if value.is_inference() else read_version(value)
    return len(value) if isinstance(value, _CONTAINERS) else -1


@dataclass(frozen=True)
class _Place:
    """The buffers or the attributes of one submodule."""

    prefix: str
    holder: dict[str, Any]

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield what is state; attributes may hold submodules and parameters too."""
        for key, value in self.holder.items():
            if key not in _OF_TORCH and not isinstance(value, (nn.Module, nn.Parameter)):
                yield key, value

    def name_of(self, key: str) -> str:
        return f"{self.prefix}.{key}" if self.prefix else key


@dataclass(frozen=True)
class _Value:
    """One named value: the object itself, and a copy of its contents if it is a tensor or a container."""

    place: _Place
    key: str
    value: Any
    copy: Any

    @property
    def name(self) -> str:
        return self.place.name_of(self.key)

    def restore(self) -> None:
        if isinstance(self.copy, _Contents):
            self.copy.restore(self.value)
        elif self.copy is not None:
            _restore_tensor(self.value, self.copy)
        _put(self.place.holder, self.key, self.value)

    def stand_in(self) -> Any:
        """Return a copy with the captured contents, or the object itself if a forward cannot change it."""
        if isinstance(self.copy, _Contents):
            return self.copy.rebuild(self.value)
        return self.value if self.copy is None else _stand_in(self.value, self.copy)

    def contents(self) -> Any:
        """Return what was captured; of a `DTensor`, the part that this process holds."""
        if isinstance(self.copy, _Contents):
            return self.copy.rebuild(self.value)
        return self.value if self.copy is None else self.copy

    def assign(self, contents: Any) -> None:
        """Set the contents."""
        if isinstance(self.copy, Tensor) and isinstance(contents, Tensor) and contents.shape == self.copy.shape:
            _restore_tensor(self.value, contents.to(self.copy))
        elif not is_same_value(self.contents(), contents):
            self.place.holder[self.key] = copy.deepcopy(contents)

    def differs(self) -> bool:
        return not _is_same(self.place.holder.get(self.key, _MISSING), self.value, self.copy)


@dataclass(frozen=True)
class _Contents:
    """The contents of a container."""

    keys: list[Any]
    values: list[Any]
    tensors: list[Tensor | None]
    """A copy of each value that is a tensor."""

    def restore(self, container: Any) -> None:
        if not isinstance(container, tuple):
            _fill(container, self.keys, self.values)
        for value, tensor in zip(self.values, self.tensors, strict=True):
            if tensor is not None:
                _restore_tensor(value, tensor)

    def rebuild(self, container: Any) -> Any:
        """Return a container of the same type with copies of the contents."""
        values = [value if tensor is None else _stand_in(value, tensor) for value, tensor in zip(self.values, self.tensors, strict=True)]
        rebuilt = copy.copy(container)
        if isinstance(container, tuple):
            return rebuilt if all(a is b for a, b in zip(values, container, strict=True)) else tuple(values)
        _fill(rebuilt, self.keys, values)
        return rebuilt

    def is_same(self, container: Any) -> bool:
        if isinstance(container, set):
            return container == set(self.values)
        keys, values = _list_keys_and_values(container)
        if keys != self.keys or len(values) != len(self.values):
            return False
        return all(map(_is_same, values, self.values, self.tensors))


def _fill(container: Any, keys: list[Any], values: list[Any]) -> None:
    """Replace the contents of a list, deque, set or dict."""
    container.clear()
    if isinstance(container, dict):
        container.update(zip(keys, values, strict=True))
    elif isinstance(container, set):
        container.update(values)
    else:
        container.extend(values)


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two values of a state are equal; NaN equals NaN."""
    return _is_same(one, other, _copy(other))


def _is_plain(value: Any) -> bool:
    """Whether a value can be compared and sent: a tensor that is not a parameter, a plain value, or a container of those."""
    if isinstance(value, _CONTAINERS):
        keys, values = _list_keys_and_values(value)
        return type(value) in _CONTAINERS and all(map(_is_plain, (*keys, *values)))
    if isinstance(value, Tensor):
        return type(value) is Tensor and _copy_tensor(value) is not None
    return value is None or type(value) in _PLAIN


def _put(holder: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(key, None)
    else:
        holder[key] = value


def _list_keys_and_values(container: Any) -> tuple[list[Any], list[Any]]:
    return (list(container), list(container.values())) if isinstance(container, dict) else ([], list(container))


def _copy(value: Any) -> Tensor | _Contents | None:
    if isinstance(value, _CONTAINERS):
        keys, values = _list_keys_and_values(value)
        return _Contents(keys, values, [_copy_tensor(value) for value in values])
    return _copy_tensor(value)


def _copy_tensor(value: Any) -> Tensor | None:
    """Copy a tensor that holds state; None for a parameter, anything else than a tensor, and tensors without strided memory."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return None
    if value.is_meta or value.is_nested or value.layout is not torch.strided:
        return None
    return to_local(value.detach()).clone()


def _stand_in(value: Tensor, contents: Tensor) -> Tensor:
    """Return a new tensor with these contents; one that is part of an autograd graph stays itself."""
    if value.requires_grad:
        return value
    return from_local_like(value, contents) if is_dtensor(value) else contents.clone()


def _restore_tensor(value: Tensor, copy: Tensor) -> None:
    # Through `data`, unseen by autograd: batch norm saves its buffers for the backward, which refuses changed ones.
    local = to_local(value.detach())
    if local.shape != copy.shape or local.dtype != copy.dtype or local.device != copy.device:
        value.data = copy.clone()
    elif not _is_equal(local, copy):
        local.data.copy_(copy)


def _is_same(now: Any, value: Any, copy: Any) -> bool:
    """Whether a value equals what was captured."""
    if isinstance(copy, _Contents):
        return type(now) is type(value) and copy.is_same(now)
    if copy is not None:
        return isinstance(now, Tensor) and _is_equal(to_local(now.detach()), copy)
    if now is value:
        return True
    if type(now) is not type(value) or not isinstance(now, _PLAIN):
        return False
    return now == value or (now != now and value != value)  # noqa: PLR0124 - NaN


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point() and not one.is_complex():
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


@dataclass(frozen=True)
class ForwardState:
    """The state before one forward: of modules, inputs, random streams and side outputs."""

    modules: list[ModuleState]
    inputs: list[tuple[Tensor, Tensor]]
    """Each tensor with a copy of its contents."""
    random: dict[str, Any]
    side_outputs: SideOutputs
    side_before: SideOutputs
    versions: list[tuple[nn.Parameter, int]]
    """The version of each parameter, because there are no copies to restore parameters from."""

    @classmethod
    def capture(cls, modules: Sequence[nn.Module], inputs: Any, side_outputs: SideOutputs) -> ForwardState:
        states = [ModuleState.capture(module) for module in modules]
        versions = [(parameter, read_version(parameter)) for module in modules for parameter in module.parameters()]
        side_before = SideOutputs(list(side_outputs.losses), dict(side_outputs.metrics))
        copies = [(leaf, copy) for leaf in pytree.tree_leaves(inputs) if (copy := _copy_tensor(leaf)) is not None]
        return cls(states, copies, capture_random_state(), side_outputs, side_before, versions)

    @property
    def restorable(self) -> bool:
        """Whether no parameter has been changed in place."""
        return all(read_version(parameter) == version for parameter, version in self.versions)

    def restore(self) -> None:
        for state in self.modules:
            state.restore()
        for tensor, before in self.inputs:
            _restore_tensor(tensor, before)
        set_random_state(self.random)
        self.side_outputs.losses, self.side_outputs.metrics = list(self.side_before.losses), dict(self.side_before.metrics)


@contextmanager
def preserve_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore gradients, buffers, attributes and torch's random state after the block, and parameters that gradient hooks may change."""
    parameters = list({id(parameter): parameter for module in modules for parameter in module.parameters()}.values())
    grads = [parameter.grad for parameter in parameters]
    hooked = [(parameter, parameter.detach().clone()) for parameter in parameters if post_accumulate_hooks(parameter)]
    states = [ModuleState.capture(module) for module in modules]
    try:
        with preserve_random_state():
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for parameter, value in hooked:
            parameter.data.copy_(value)
        for state in states:
            state.restore()
