"""The state of a module outside its parameters: buffers, tensors kept as attributes, and plain Python attributes such as counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.parts import local

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch keeps in every module: parameters, buffers, submodules and hooks."""

_PLAIN = (bool, int, float, complex, str, bytes, frozenset, torch.dtype, torch.device)
"""Types that are compared by value; objects of other types are the same only if they are one object."""

_CONTAINERS = (list, tuple, set, dict, deque)


class ModuleState:
    """The state of a module and its submodules at one moment, to be put back or compared with later.

    It covers buffers, tensors that are plain attributes, and all other plain attributes. Lists, tuples, dicts, sets and deques are
    copied one level deep, together with the tensors in them. Objects of other types are kept by reference, so a change inside such an
    object is not seen. Parameters are left out.
    """

    def __init__(self, places: list[_Place], values: list[_Value]) -> None:
        self._places = places
        self._values = values

    @classmethod
    def capture(cls, module: nn.Module) -> ModuleState:
        """Record the state of the module as it is now."""
        places = [_Place(prefix, holder) for prefix, part in module.named_modules() for holder in (part._buffers, vars(part))]
        return cls(places, [_Value(place, key, value, _copy(value)) for place in places for key, value in place.entries()])

    def restore(self) -> None:
        """Put everything back: contents of tensors and containers in place, and objects that were replaced where they were."""
        for place, key in self._added():
            del place.holder[key]
        for value in self._values:
            value.restore()

    def changed(self) -> list[str]:
        """List the dotted names of everything that differs now from when it was captured; NaN equals NaN."""
        differing = [value.place.name_of(value.key) for value in self._values if value.differs()]
        return differing + [place.name_of(key) for place, key in self._added()]

    def _added(self) -> list[tuple[_Place, str]]:
        """What did not exist when the state was captured."""
        known = {(id(value.place.holder), value.key) for value in self._values}
        return [(place, key) for place in self._places for key, _ in place.entries() if (id(place.holder), key) not in known]


@dataclass(frozen=True)
class _Place:
    """The buffers or the attributes of one submodule."""

    prefix: str
    holder: dict[str, Any]

    def entries(self) -> Iterator[tuple[str, Any]]:
        """All that is state here; submodules and parameters may lie among the attributes, too."""
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

    def restore(self) -> None:
        if isinstance(self.copy, _Contents):
            self.copy.restore(self.value)
        elif self.copy is not None:
            _restore_tensor(self.value, self.copy)
        self.place.holder[self.key] = self.value

    def differs(self) -> bool:
        return self.key not in self.place.holder or not _is_same(self.place.holder[self.key], self.value, self.copy)


@dataclass(frozen=True)
class _Contents:
    """The contents of a container."""

    keys: list[Any]
    values: list[Any]
    tensors: list[Tensor | None]
    """Copies of those values that are tensors."""

    def restore(self, container: Any) -> None:
        if isinstance(container, dict):
            container.clear()
            container.update(zip(self.keys, self.values, strict=True))
        elif isinstance(container, set):
            container.clear()
            container.update(self.values)
        elif not isinstance(container, tuple):
            container.clear()
            container.extend(self.values)
        for value, tensor in zip(self.values, self.tensors, strict=True):
            if tensor is not None:
                _restore_tensor(value, tensor)

    def is_same(self, container: Any) -> bool:
        if isinstance(container, set):
            return container == set(self.values)
        keys, values = _keys_and_values(container)
        if keys != self.keys or len(values) != len(self.values):
            return False
        return all(map(_is_same, values, self.values, self.tensors))


def _keys_and_values(container: Any) -> tuple[list[Any], list[Any]]:
    return (list(container), list(container.values())) if isinstance(container, dict) else ([], list(container))


def _copy(value: Any) -> Tensor | _Contents | None:
    if isinstance(value, _CONTAINERS):
        keys, values = _keys_and_values(value)
        return _Contents(keys, values, [_copy_tensor(each) for each in values])
    return _copy_tensor(value)


def _copy_tensor(value: Any) -> Tensor | None:
    """A copy of a tensor that holds state; None for parameters, everything that is no tensor, and tensors without plain memory."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return None
    if value.is_meta or value.is_nested or value.layout is not torch.strided:
        return None
    return local(value.detach()).clone()


def _restore_tensor(value: Tensor, copy: Tensor) -> None:
    # Through `data`, past autograd: batch norm saves its buffers for the backward, which would refuse them as changed in place.
    mine = local(value.detach())
    if mine.shape != copy.shape or mine.dtype != copy.dtype or mine.device != copy.device:
        value.data = copy.clone()
    elif not _is_equal(mine, copy):
        mine.data.copy_(copy)


def _is_same(now: Any, value: Any, copy: Any) -> bool:
    """Whether what is there now equals what was captured."""
    if isinstance(copy, _Contents):
        return type(now) is type(value) and copy.is_same(now)
    if copy is not None:
        return isinstance(now, Tensor) and _is_equal(local(now.detach()), copy)
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
