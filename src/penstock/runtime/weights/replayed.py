"""The same values that torch draws for the unpipelined model, of which only those of this rank's stages are kept.

What torch draws for a layer depends on everything drawn before it, so each rank builds the whole model again and draws everything in
the same order. But the memory of a finished module whose values belong to other ranks is freed before the next module is built: memory
never holds more than this rank's own values and one module, or a few tensors if an initialisation visits all of them at the end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from penstock.errors import WeightsError
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.autograd import TorchDispatchMode
from penstock.runtime.torch_internals.tensors import identify_storage
from penstock.runtime.weights.source import OwnedTensors, named_tensors, put_built

_AT_ONCE = 8
"""How many tensors of other ranks have memory at once: an initialisation goes back and forth between a few."""


@dataclass(frozen=True)
class Replayed:
    """Initial values bitwise equal to those of `torch.manual_seed(seed); model = build()`.

    `Pipeline(model, ..., weights=Replayed(lambda: GPT(config), seed=0))`, where `model` is what `build` made on the meta device. It
    takes each rank the time of drawing all values. `build` must draw only from torch's own stream of the host, and make the same
    modules in the same order each time.
    """

    build: Callable[[], nn.Module]
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        if set(owned.modules) != {""}:
            raise WeightsError("Replayed builds a whole model: give the pipeline one, rather than one module per stage")
        tensors, names = {id(tensor): tensor for _, tensor in owned.named()}, owned.names()
        with preserve_random_state(), torch.no_grad():
            registered = self._registered_names()
            torch.manual_seed(self.seed)
            freeing = _FreeOthers(registered, {name for tied in names.values() for name in tied})
            with _watch_registration(freeing.free_module), freeing:
                built = dict(named_tensors("", self.build()))
            for ident, (name, *_) in names.items():
                put_built(tensors[ident], built.get(name), self.device, name, "building the model again")

    def _registered_names(self) -> list[list[str]]:
        """The names of each module that is registered in another one, in the order of registration."""
        registered: list[nn.Module] = []
        with torch.device("meta"), _watch_registration(registered.append):
            model = self.build()
        names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            names.setdefault(id(module), []).append(name)
        return [names.get(id(module), []) for module in registered]


class _FreeOthers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Frees the memory of other ranks' tensors, and allocates it again while one of them is used, for the last few used.

    Code that gives values to such a tensor notices nothing, so that everything is drawn as usual; the values are lost.
    """

    def __init__(self, names: list[list[str]], owned: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._owned = iter(names), owned
        self._sizes: dict[int, tuple[Any, int]] = {}
        """The freed storages and their sizes, by address."""
        self._present: OrderedDict[int, None] = OrderedDict()

    def free_module(self, module: nn.Module) -> None:
        """Free the tensors of a module that is built and now registered in another one."""
        for prefix in next(self._names, []):
            named = list(named_tensors(prefix, module))
            kept = {identify_storage(tensor.untyped_storage()) for name, tensor in named if name in self._owned}
            for _, tensor in named:
                storage = tensor.untyped_storage()
                if identify_storage(storage) not in kept | self._sizes.keys():
                    self._sizes[identify_storage(storage)] = storage, storage.nbytes()
                    storage.resize_(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and not value.is_meta:
                self._allocate(identify_storage(value.untyped_storage()))
        return func(*args, **(kwargs or {}))

    def _allocate(self, address: int) -> None:
        if address in self._sizes:
            storage, size = self._sizes[address]
            if not storage.nbytes():
                storage.resize_(size)
            self._present[address] = None
            self._present.move_to_end(address)
            if len(self._present) > _AT_ONCE:
                oldest, _ = self._present.popitem(last=False)
                self._sizes[oldest][0].resize_(0)


@contextmanager
def _watch_registration(callback: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Call back with every module that this thread registers in another one."""
    thread = threading.get_ident()

    def hook(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None and threading.get_ident() == thread:
            callback(module)

    handle = register_module_module_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
