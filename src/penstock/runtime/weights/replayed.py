"""The very values that torch draws for a model, of which only those of this rank's stages are kept.

What torch draws for a layer depends on all that was drawn before it, so the whole model is built again, and everything is drawn in
its order. But the memory of a module that is done, and whose values belong to other ranks, is taken before the next one is built:
there is never more than this rank's own and that of one module, or of a few tensors where an initialisation goes over all at the end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import WeightsError
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.weights.source import Owned, put, tensors_of

_AT_ONCE = 8
"""How many tensors that are not wanted here have memory at once: an initialisation goes back and forth between a few."""


@dataclass(frozen=True)
class Replayed:
    """Initial values as `torch.manual_seed(seed); model = build()` gives them to the unpipelined model, to the last bit.

    `Pipeline(model, ..., weights=Replayed(lambda: GPT(config), seed=0))`, where `model` is what `build` made on the meta device. It
    takes every rank as long as drawing all values. `build` must draw from torch's own stream of the host alone, and make the same
    modules in the same order each time.
    """

    build: Callable[[], nn.Module]
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | Owned) -> None:
        owned = Owned.of(model)
        if set(owned.modules) != {""}:
            raise WeightsError("Replayed builds a whole model: give the pipeline one, rather than one module a stage")
        wanted = {name for names in owned.names().values() for name in names}
        with preserve_random_state(), torch.no_grad():
            names = self._names()
            torch.manual_seed(self.seed)
            absent = _Absent(names, wanted)
            with _watched(absent.done), absent:
                built = dict(tensors_of("", self.build()))
            self._take(owned, built)

    def _names(self) -> list[list[str]]:
        """The names of each module that becomes a part of another one, in the order in which they do."""
        made: list[nn.Module] = []
        with torch.device("meta"), _watched(made.append):
            whole = self.build()
        names: dict[int, list[str]] = {}
        for name, module in whole.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        return [names.get(id(module), []) for module in made]

    def _take(self, owned: Owned, built: Mapping[str, Tensor]) -> None:
        done: set[int] = set()
        for name, tensor in owned.named():
            if id(tensor) in owned.tensors and id(tensor) not in done:
                value = built.get(name)
                if value is None or value.shape != tensor.shape:
                    found = "nothing" if value is None else f"shape {list(value.shape)}"
                    raise WeightsError(f"building the model again gives {found} for {name}, which has shape {list(tensor.shape)}")
                put(tensor, value.detach(), self.device)
                done.add(id(tensor))


class _Absent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the memory of values that are not wanted here, and gives it back to those that are worked on, the last few of them.

    Such a tensor is as any other to whoever gives it values, so that all is drawn as it would be; the values are lost.
    """

    def __init__(self, names: list[list[str]], wanted: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._wanted = iter(names), wanted
        self._sizes: dict[int, tuple[Any, int]] = {}
        """What took how much memory, by its address."""
        self._present: OrderedDict[int, None] = OrderedDict()

    def done(self, module: nn.Module) -> None:
        """A module is built, and becomes a part of another one."""
        for prefix in next(self._names, []):
            named = list(tensors_of(prefix, module))
            kept = {tensor.untyped_storage()._cdata for name, tensor in named if name in self._wanted}
            for _, tensor in named:
                memory = tensor.untyped_storage()
                if memory._cdata not in kept | self._sizes.keys():
                    self._sizes[memory._cdata] = memory, memory.nbytes()
                    memory.resize_(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not value.is_meta:
                self._touch(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))

    def _touch(self, address: int) -> None:
        if address in self._sizes:
            memory, size = self._sizes[address]
            if not memory.nbytes():
                memory.resize_(size)
            self._present[address] = None
            self._present.move_to_end(address)
            if len(self._present) > _AT_ONCE:
                oldest, _ = self._present.popitem(last=False)
                self._sizes[oldest][0].resize_(0)


@contextmanager
def _watched(see: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Show every module that becomes a part of another one, in this thread."""
    here = threading.get_ident()

    def hook(whole: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is not None and threading.get_ident() == here:
            see(part)

    handle = register_module_module_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
