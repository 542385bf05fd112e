"""The contract of weight sources, the tensors that they fill (only those that this rank holds), and sources of initial values.

Initial values do not depend on who draws them: they are the same for the whole model and for the stages of a rank. What torch draws for a
layer depends on everything drawn before it. So every module, or every layer, draws from its own stream, derived from the seed and its
name; or (`Replayed`) each rank builds the whole model again, draws everything in the same order, and keeps the values of its own stages.
The memory of a finished module whose values belong to other ranks is freed before the next module is built: memory never holds more than
this rank's own values and one module, or a few tensors if an initialisation visits all at the end. Of the ends of a spread vocabulary a
rank keeps its rows; a source that draws values holds them whole until it is done, and `Safetensors` reads only the rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from penstock.errors import WeightsError
from penstock.runtime.model.partition import Partition
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.tensors.tensor_rows import TensorRows
from penstock.runtime.torch_internals import pytree
from penstock.runtime.torch_internals.autograd import TorchDispatchMode
from penstock.runtime.torch_internals.lookup import find_private
from penstock.runtime.torch_internals.modules import own_buffers, own_children, own_parameters
from penstock.runtime.torch_internals.tensors import identify_storage


@dataclass(frozen=True)
class OwnedTensors:
    """A model, and which of its parameters and buffers need values on this rank."""

    modules: Mapping[str, nn.Module]
    """The parts of the model by name; a whole model is one part with an empty name."""
    idents: frozenset[int]
    """The object identities of the tensors that need values."""
    rows: Mapping[int, TensorRows] = field(default_factory=dict)
    """For tensors on the meta device of which this rank has some rows only, as of a spread vocabulary: these, by the identity of the
    whole. A source may fill them in place of the whole one."""

    @classmethod
    def of(cls, model: nn.Module | OwnedTensors) -> OwnedTensors:
        """All tensors of a plain model."""
        if isinstance(model, OwnedTensors):
            return model
        return cls({"": model}, frozenset(id(tensor) for _, tensor in list_tensors("", model)))

    def list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers of the model, also those of other ranks, under each of their names."""
        for prefix, module in self.modules.items():
            yield from list_tensors(prefix, module)

    def names(self) -> dict[int, list[str]]:
        """The names of each tensor that needs values, by identity."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.list_tensors():
            if id(tensor) in self.idents:
                names.setdefault(id(tensor), []).append(name)
        return names

    def submodule(self, name: str) -> nn.Module:
        """The module of this name in the model."""
        for prefix, module in self.modules.items():
            inner = name if not prefix else name.removeprefix(prefix).removeprefix(".") if f"{name}.".startswith(f"{prefix}.") else None
            if inner is not None:
                try:
                    return module.get_submodule(inner)
                except AttributeError:
                    continue
        raise WeightsError(f"the model has no part {name!r}")

    def select_unset(self) -> OwnedTensors:
        """Those that are still on the meta device."""
        own = (tensor for _, tensor in self.list_tensors() if id(tensor) in self.idents)
        missing = frozenset(id(tensor) for tensor in own if self.rows.get(id(tensor), tensor).is_meta)
        return OwnedTensors(self.modules, missing, self.rows)

    def take_rows(self) -> None:
        """Take this rank's rows of tensors that a source has filled, and free the whole ones."""
        for tensor in {id(tensor): tensor for _, tensor in self.list_tensors() if id(tensor) in self.rows}.values():
            shard = self.rows[id(tensor)]
            if not tensor.is_meta:
                put(shard.rows, shard.take_from(tensor.detach()), tensor.device)
                drop(tensor)


class WeightSource(Protocol):
    """Gives values to the tensors that a rank owns: `Initial`, `Built`, `Replayed`, `Safetensors`, or any function of this form.

    `Pipeline` calls each source once per rank in its constructor, after cutting the model into stages and before sharding and compiling
    them. A source must

    - give values to tensors with `put`, which keeps the objects, so that tied layers and optimizers see them. It may skip tensors, which
      are left to the next source; a tensor that no source has filled is an error of the pipeline;
    - leave all tensors that are not in `model.idents` without values, because they belong to other ranks and may not fit here;
    - fill a tensor in `model.rows`, or only this rank's rows of it, which the pipeline takes from the whole one otherwise;
    - give a tensor the same values on every rank and for every partition, because replicas and tied copies are not compared;
    - leave torch's random state as it was.

    The classes of this folder also take a plain `nn.Module`, to fill the unpipelined model with the same values.
    """

    def __call__(self, model: OwnedTensors, /) -> None: ...


Weights = WeightSource | Sequence[WeightSource] | None


def _list_sources(weights: Any) -> list[WeightSource]:
    sources = [] if weights is None else [weights] if callable(weights) or not isinstance(weights, Iterable) else list(weights)
    for source in sources:
        if not callable(source):
            raise WeightsError(f"weights must be a source, such as Safetensors(path), or a list of them, got {source!r}")
    return sources


def list_tensors(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of a module, under each of their names."""
    yield from module.named_parameters(prefix, remove_duplicate=False)
    yield from module.named_buffers(prefix, remove_duplicate=False)


def give_weights(
    weights: Weights, model: Any, partition: Partition, stages: Iterable[int], ends: Sequence[tuple[Tensor, TensorRows | None]] = ()
) -> None:
    """Give values to the tensors of these stages from one source after the other; raises if a tensor is left without values.

    `ends` are tensors of layers that are in no stage, and the rows that this rank needs, unless it needs the whole one.
    """
    parts = [part for index in stages if (part := partition.parts[index]) is not None]
    tensors = [tensor for part in parts for layer in part.modules for _, tensor in list_tensors("", layer)]
    if isinstance(model, nn.Module):
        modules: dict[str, nn.Module] = {"": model}
    else:
        modules = {str(k): module for k, module in (model.items() if isinstance(model, Mapping) else enumerate(model))}
    rows = {id(tensor): shard for tensor, shard in ends if shard is not None and tensor.is_meta}
    owned = OwnedTensors(modules, frozenset(map(id, [*tensors, *(tensor for tensor, _ in ends)])), rows)
    sources = _list_sources(weights)
    for number, source in enumerate(sources):
        source(owned if number == 0 else owned.select_unset())
        owned.take_rows()
    for tensor, shard in ends if sources else ():
        if shard is not None and id(tensor) not in rows:
            put(shard.rows, shard.take_from(tensor.detach()), tensor.device)
    missing = [names[0] for names in owned.select_unset().names().values()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        advice = "weights= gave it none" if sources else "give Pipeline(weights=...), for example Initial(seed=0)"
        raise WeightsError(f"{missing[0]}{more} of this rank's stages is on the meta device and has no values: {advice}")


def put(tensor: Tensor, value: Tensor, device: torch.device | str) -> None:
    """Give a parameter or buffer these values. One on the meta device gets memory on `device`, and stays the same object."""
    with torch.no_grad():
        if _is_sharded(tensor):
            tensor.copy_(_shard_like(value, tensor))
        elif tensor.is_meta:
            _replace(tensor, value.to(device=device, dtype=tensor.dtype, copy=True).reshape(tensor.shape))
        else:
            tensor.copy_(value)


def put_built(tensor: Tensor, value: Tensor | None, device: torch.device | str, name: str, builder: str) -> None:
    """Give a tensor the value that `builder` made for it; raises if there is none, or it has another shape."""
    if value is None or value.shape != tensor.shape:
        built = "nothing" if value is None else f"shape {list(value.shape)}"
        raise WeightsError(f"{builder} gives {built} for {name}, which has shape {list(tensor.shape)} in the model")
    put(tensor, value.detach(), device)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _shard_like(value: Tensor, like: Any) -> Tensor:
    """Shard a value that every rank has in full."""
    from torch.distributed.tensor import distribute_tensor

    if like.is_meta:
        raise WeightsError("a sharded parameter on the meta device cannot get values: call to_empty() on its module before")
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements, src_data_rank=None)


def drop(tensor: Tensor) -> None:
    """Free a tensor's values: it is on the meta device again."""
    _replace(tensor, torch.empty_like(tensor, device="meta"))


def move(tensor: Tensor, device: torch.device | str) -> None:
    if not _is_sharded(tensor) and tensor.device != torch.device(device):
        _replace(tensor, tensor.detach().to(device))


def _replace(tensor: Tensor, value: Tensor) -> None:
    """Replace the values but keep the object and its attributes, so that all who hold it, tied layers for example, see them."""
    if isinstance(tensor, nn.Parameter):
        value = find_private("torch.Tensor._make_subclass")(type(tensor), value.detach(), tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]


_AT_ONCE = 8
"""How many tensors of other ranks have memory at once: an initialisation goes back and forth between a few."""


@dataclass(frozen=True)
class Initial:
    """Initial values from the modules' own `reset_parameters`, or from `init(name, module)`, each drawn from a stream of (seed, name).

    `Initial(seed=0)(model)` fills a plain model, and `Pipeline(model, ..., weights=Initial(seed=0))` fills the stages of each rank of a
    model built on the meta device with the same values. Submodules come before the module that holds them. A tied parameter has the
    values of the first module that has it. Values are drawn on the host, and moved to `device`.
    """

    seed: int
    init: Callable[[str, nn.Module], None] | None = None
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        done: set[int] = set()
        with preserve_random_state(), torch.no_grad():
            for name, module in _order_submodules_first(owned):
                self._initialise(name, module, owned.idents, done)
        for _, tensor in owned.list_tensors():
            if id(tensor) in done and self.device != "cpu":
                move(tensor, self.device)

    def _initialise(self, name: str, module: nn.Module, owned: frozenset[int], done: set[int]) -> None:
        """Initialise one module with all tensors that it holds itself, so that it draws the same whichever of them are owned."""
        direct = {
            f"{name}.{key}".lstrip("."): tensor
            for key, tensor in (*own_parameters(module).items(), *own_buffers(module).items())
            if tensor is not None
        }
        new = {key: tensor for key, tensor in direct.items() if id(tensor) in owned and id(tensor) not in done}
        if not new or not self._can_initialise(name, module, new):
            return
        absent = {key: tensor for key, tensor in direct.items() if tensor.is_meta}
        saved = [(tensor, tensor.clone()) for tensor in direct.values() if id(tensor) in done]
        for tensor in absent.values():
            put(tensor, torch.full(tensor.shape, _choose_unset(tensor.dtype), dtype=tensor.dtype), "cpu")
        draw_from(self.seed, name)
        reset = _find_reset(module)
        if self.init is not None:
            self.init(name, module)
        elif reset is not None:
            reset()
        for tensor, value in saved:
            tensor.copy_(value)
        for key, tensor in absent.items():
            if id(tensor) not in owned:
                drop(tensor)
            elif _is_unset(tensor):
                initialiser = "init" if self.init is not None else f"{type(module).__name__}.reset_parameters()"
                raise WeightsError(f"{key} was left without values by {initialiser}: give Initial an init= that sets it, or use Built")
        done.update(map(id, new.values()))

    def _can_initialise(self, name: str, module: nn.Module, new: Mapping[str, Tensor]) -> bool:
        """Whether the module has an initialiser; one that only holds buffers with values needs none."""
        if self.init is not None or _find_reset(module) is not None:
            return True
        if all(not isinstance(tensor, nn.Parameter) and not tensor.is_meta for tensor in new.values()):
            return False
        raise WeightsError(
            f"{name or 'the model'}, a {type(module).__name__}, holds {next(iter(new))} and has no reset_parameters(): "
            "write one, give Initial an init=, or use Built"
        )


def _find_reset(module: nn.Module) -> Callable[[], None] | None:
    """The module's own initialiser; some modules of torch have it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _order_submodules_first(owned: OwnedTensors) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, after its submodules."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for key, inner in own_children(module).items():
            if inner is not None:
                yield from walk(f"{name}.{key}".lstrip("."), inner)
        yield name, module

    for prefix, part in owned.modules.items():
        yield from walk(prefix, part)


def _choose_unset(dtype: torch.dtype) -> float | int | bool:
    """The value that marks an element as not set."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).max


def _is_unset(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and tensor.numel() > 0 and bool((tensor == _choose_unset(tensor.dtype)).all())


@dataclass(frozen=True)
class Built:
    """Initial values from building layers: one function per layer name, which draws from a stream of (seed, name).

    For layers that set values, buffers included, in their constructor. Only this rank's layers are built:
    `Built({"embed": lambda: Embed(...), "blocks.0": lambda: Block(...), ...}, seed=0)`. A tied parameter has the values of the first
    layer that has it.
    """

    builders: Mapping[str, Callable[[], nn.Module]]
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        done: set[int] = set()
        with preserve_random_state():
            for name, build in self.builders.items():
                layer = dict(list_tensors("", owned.submodule(name)))
                new = {key: tensor for key, tensor in layer.items() if id(tensor) in owned.idents and id(tensor) not in done}
                if new:
                    draw_from(self.seed, name)
                    built = dict(list_tensors("", build()))
                    for key, tensor in new.items():
                        put_built(tensor, built.get(key), self.device, key, f"the builder of {name}")
                    done.update(map(id, new.values()))


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
        tensors, names = {id(tensor): tensor for _, tensor in owned.list_tensors()}, owned.names()
        with preserve_random_state(), torch.no_grad():
            registered = self._list_registered()
            torch.manual_seed(self.seed)
            freeing = _FreeOthers(registered, {name for tied in names.values() for name in tied})
            with _watch_registration(freeing.free_module), freeing:
                built = dict(list_tensors("", self.build()))
            for ident, (name, *_) in names.items():
                put_built(tensors[ident], built.get(name), self.device, name, "building the model again")

    def _list_registered(self) -> list[list[str]]:
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
            named = list(list_tensors(prefix, module))
            storages = {identify_storage(tensor.untyped_storage()) for name, tensor in named if name in self._owned}
            for _, tensor in named:
                storage = tensor.untyped_storage()
                if identify_storage(storage) not in storages | self._sizes.keys():
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
