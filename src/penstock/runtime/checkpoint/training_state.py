"""Everything that a training run needs to continue, under names that do not depend on ranks: what is saved, and how it is restored.

`ModelState` is one rank's part of a model, under the parameter names of the unpipelined model. The state of optimizers is in torch's
flattened form: `state.<parameter>.<key>` is what the optimizer keeps for a parameter, and `param_groups.<parameter>.<option>` are the
options of its group. So it does not depend on which rank's optimizer holds which parameters. `TrainingState` puts both together with
schedulers, data and random state.
"""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import CheckpointError
from penstock.runtime.model.partition import Part
from penstock.runtime.model.random_streams import capture_random_state, set_random_state
from penstock.runtime.model.tied_parameters import Place
from penstock.runtime.tensors.tensor_rows import TensorRows

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.storage import CheckpointReader
    from penstock.runtime.pipeline import Pipeline

logger = logging.getLogger(__name__)

ParameterNames = dict[Hashable, list[tuple[Place, str]]]
"""The places and names of each parameter, by a key that is the same on all ranks for the same parameter."""
TiedNames = list[tuple[str, ...]]
"""The names of each tied parameter, starting with its name in the first layer that has it."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that compiled and checkpointed modules add to parameter names."""
Optimizers = Optimizer | Sequence[Optimizer] | None
STATE, OPTIONS = "state.", "param_groups."
Aliases = dict[str, list[str]]
"""For keys that a value is written under, the other keys of the same value."""
_NOT_OPTIONS = ("params", "param_names")
_SWITCHES = frozenset(("foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"))
"""Options of how an optimizer computes rather than what; versions of torch differ in which of them exist."""
_SCHEDULED = frozenset(("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"))
"""Options that torch's schedulers add to the groups."""


@dataclass(frozen=True)
class ModelState:
    """The layers of one rank, and the names that checkpoints save their parameters and buffers under.

    Nothing else in this folder reads a `Pipeline`. `Checkpoints` also takes a `ModelState` made by other code, of stages that belong to
    no pipeline.
    """

    stages: Mapping[int, Part] = field(default_factory=dict)
    """This rank's stages by number."""
    shared: Mapping[str, Hashable] = field(default_factory=dict)
    """For each parameter that other stages or ranks may share, by name, the key that all of them know it by."""
    module: nn.Module | None = None
    """A plain module in place of stages."""
    rows: Mapping[str, TensorRows] = field(default_factory=dict)
    """This rank's rows of parameters that are in no stage, by the names of the whole ones: those of a spread vocabulary."""
    pipeline: Pipeline | None = None
    """The pipeline that the stages belong to; its place in the random streams is saved and loaded too."""

    @classmethod
    def of(cls, model: Model) -> ModelState:
        if isinstance(model, ModelState):
            return model
        if isinstance(model, nn.Module):
            return cls(module=model)
        stages = {index: part for index in model.stages if (part := model.partition.parts[index]) is not None}
        rows = {} if model.vocabulary is None else model.vocabulary.row_shards()
        return cls(stages, model.shared.place, rows=rows, pipeline=model)

    def layers(self) -> list[tuple[str, nn.Module]]:
        """The layers, each with the prefix of its names; a plain module is one layer without a prefix."""
        if self.module is not None:
            return [("", self.module)]
        parts = self.stages.values()
        return [(f"{name}.", layer) for part in parts for name, layer in zip(part.layers, part.modules, strict=True)]

    def values(self) -> dict[str, Any]:
        """All parameters, persistent buffers and extra state by name. The tensors are the model's own; some are rows of a whole one."""
        values = {strip_wrappers(prefix + key): value for prefix, layer in self.layers() for key, value in layer.state_dict().items()}
        return values | {name: shard.with_rows(shard.rows.detach()) for name, shard in self.rows.items()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Load values into all layers through their `load_state_dict`, so that hooks run. Rows were read into the model's own."""
        for prefix, layer in self.layers():
            layer.load_state_dict({key: values[strip_wrappers(prefix + key)] for key in layer.state_dict()})

    def list_first_names(self) -> dict[int, str]:
        """The first name of each parameter, by object identity."""
        names: dict[int, str] = {}
        for prefix, layer in self.layers():
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                names.setdefault(id(parameter), strip_wrappers(prefix + name))
        for name, shard in self.rows.items():
            names.setdefault(id(shard.rows), name)
        return names

    def list_shards(self) -> dict[int, TensorRows]:
        """The parameters that are rows of a whole one, by object identity."""
        return {id(shard.rows): shard for shard in self.rows.values()}

    def parameter_names(self) -> ParameterNames:
        """All names of this rank's parameters, for `find_ties` to combine with those of the other ranks."""
        named = {index: part.parameters for index, part in self.stages.items()}
        if self.module is not None:
            named = {0: tuple(self.module.named_parameters(remove_duplicate=False))}
        keys: dict[int, Hashable] = {}
        names: ParameterNames = {}
        for stage, parameters in named.items():
            for k, (name, parameter) in enumerate(parameters):
                key = keys.setdefault(id(parameter), self.shared.get(name, (stage, k)))
                names.setdefault(key, []).append(((stage, k), strip_wrappers(name)))
        for k, (name, shard) in enumerate(self.rows.items()):
            names.setdefault(keys.setdefault(id(shard.rows), name), []).append(((0, k), name))
        return names

    # Of a pipeline ----------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> str:
        """The name of the pipeline's schedule; empty without a pipeline."""
        return "" if self.pipeline is None else self.pipeline.table.name

    def stream_position(self) -> dict[str, Any]:
        """The seed of a pipeline, and how far it is in the streams of that seed."""
        return {} if self.pipeline is None else {"seed": self.pipeline.seed, "steps": self.pipeline.steps}

    def set_stream_position(self, saved: Mapping[str, Any]) -> None:
        """Continue a pipeline's random streams at a saved position; `saved` has the step, and what `stream_position` gave."""
        if self.pipeline is None:
            return
        self.pipeline.steps = saved.get("steps", saved["step"])
        seed = self.pipeline.seed
        if saved.get("seed", seed) != seed:
            logger.warning("saved with seed %s, loaded with seed %s: random numbers will not continue", saved["seed"], seed)


Model: TypeAlias = "Pipeline | nn.Module | ModelState"
"""Models that can be saved and loaded; a plain module is on one process."""


def strip_wrappers(name: str) -> str:
    """Remove what wrappers of torch add to a name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def find_ties(everyone: Sequence[ParameterNames]) -> TiedNames:
    """The parameters that have several names, from the `parameter_names` of all ranks."""
    merged: dict[Hashable, set[tuple[Place, str]]] = {}
    for share in everyone:
        for key, names in share.items():
            merged.setdefault(key, set()).update(names)
    ordered = (list(dict.fromkeys(name for _, name in sorted(names))) for names in merged.values())
    return [tuple(names) for names in ordered if len(names) > 1]


# Optimizers -------------------------------------------------------------------------------------------------------------


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


def name_groups(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[list[str], list[nn.Parameter]]]:
    """The names and the parameters of each group; `names` are by object identity."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for parameter in (parameter for group in groups for parameter in group):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that does not belong to the model on this rank: "
                "give it pipe.parameters()"
            )
    return [([names[id(parameter)] for parameter in group], group) for group in groups]


def optimizer_state(
    optimizers: Optimizers, names: Mapping[int, str], shards: Mapping[int, TensorRows] | None = None
) -> tuple[dict[str, Any], Aliases]:
    """The state of all optimizers in the flattened form. An option with the same value for many parameters is there once, with aliases.

    `names`, and `shards` for parameters that are rows of a whole one, are by object identity.
    """
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for optimizer in list_optimizers(optimizers):
        packed = optimizer.state_dict()
        for group, (parameters, own) in zip(packed["param_groups"], name_groups(optimizer, names), strict=True):
            shared = {key: wrap_collection(value) for key, value in group.items() if key not in _NOT_OPTIONS}
            for index, name, parameter in zip(group["params"], parameters, own, strict=True):
                kept = packed["state"].get(index, {})
                if shards and id(parameter) in shards:
                    kept = {key: _shard_state(f"{name}.{key}", value, shards[id(parameter)]) for key, value in kept.items()}
                state |= {f"{STATE}{name}.{key}": wrap_collection(value) for key, value in kept.items()}
                options |= {f"{OPTIONS}{name}.{key}": value for key, value in shared.items()}
    distinct, aliases = _merge_equal(options)
    return state | distinct, aliases


def _shard_state(name: str, value: Any, parameter: TensorRows) -> Any:
    """The state that an optimizer keeps for rows of a parameter, as the same rows of the whole state."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape != parameter.rows.shape:
        raise CheckpointError(
            f"the optimizer keeps {name} of shape {list(value.shape)} for {len(parameter.rows)} rows of a parameter of shape "
            f"{list(parameter.shape)}, and not one value per element, which cannot be saved for a vocabulary that is spread over ranks: "
            "use another optimizer, or save without it"
        )
    return parameter.with_rows(value)


def _merge_equal(options: Mapping[str, Any]) -> tuple[dict[str, Any], Aliases]:
    """Keep equal values of an option once, under the first key; the other keys become its aliases."""
    first: dict[bytes, str] = {}
    aliases: Aliases = {}
    for key, value in options.items():
        first_key = first.setdefault(pickle.dumps((key.rpartition(".")[2], value)), key)
        if first_key != key:
            aliases.setdefault(first_key, []).append(key)
    return {key: options[key] for key in first.values()}, aliases


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
    groups = name_groups(optimizer, names)
    parameter_names = [name for parameters, _ in groups for name in parameters]
    state, options = keys_by_parameter(flat, parameter_names, STATE), keys_by_parameter(flat, parameter_names, OPTIONS)
    packed = optimizer.state_dict()
    loaded: dict[int, dict[str, Any]] = {}
    for group, (parameters, _) in zip(packed["param_groups"], groups, strict=True):
        group.update(_group_options(parameters, options, flat))
        for index, name in zip(group["params"], parameters, strict=True):
            if state[name]:
                loaded[index] = {key: unwrap_collection(flat[full]) for key, full in state[name].items()}
    optimizer.load_state_dict({**packed, "state": loaded})
    _restore_dtypes(optimizer, loaded, [parameter for _, parameters in groups for parameter in parameters])


def check_optimizer(optimizer: Optimizer, names: Mapping[int, str], flat: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Reject groups whose parameters were saved with different options, and the state of another kind of optimizer.

    Kinds differ in their options, in `flat`, and in the keys of what they keep, of which one may have more, as with `amsgrad`.
    """
    groups = name_groups(optimizer, names)
    for group, (parameters, _) in zip(optimizer.param_groups, groups, strict=True):
        options = _group_options(parameters, keys_by_parameter(flat, parameters, OPTIONS), flat)
        missing, unknown = optimizer.defaults.keys() - options - _SWITCHES, options.keys() - group - _SWITCHES - _SCHEDULED
        if parameters and (missing or unknown):
            saved_keys, own_keys = (set(keys) - _SWITCHES - _SCHEDULED - set(_NOT_OPTIONS) for keys in (options, group))
            raise CheckpointError(
                f"{parameters[0]} was saved with an optimizer of the options {', '.join(sorted(saved_keys))}, but "
                f"{type(optimizer).__name__} has {', '.join(sorted(own_keys))}: load with the kind of optimizer that saved, or without one"
            )
    with_state = {name: parameter for group in groups for name, parameter in zip(*group, strict=True) if optimizer.state.get(parameter)}
    for name, saved in keys_by_parameter(keys, with_state, STATE).items():
        own_keys, saved_keys = set(optimizer.state[with_state[name]]), set(saved)
        if saved_keys and not (own_keys <= saved_keys or saved_keys <= own_keys):
            raise CheckpointError(
                f"the optimizer's state of {name} was saved as {', '.join(sorted(saved_keys))}, but {type(optimizer).__name__} "
                f"keeps {', '.join(sorted(own_keys))}: load with the kind of optimizer that saved, or without one"
            )


def _group_options(parameters: Sequence[str], keys: Mapping[str, Mapping[str, str]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """The options that all parameters of a group were saved with."""
    options: dict[str, Any] = {}
    for name in parameters:
        saved = {key: unwrap_collection(flat[full]) for key, full in keys[name].items()}
        if name != parameters[0] and not _are_equal(saved, options):
            key = next(key for key in {*saved, *options} if not _are_equal(saved.get(key), options.get(key)))
            raise CheckpointError(
                f"{parameters[0]} and {name} are in one group of the optimizer, but were saved with {key} = {options.get(key)!r} "
                f"and {saved.get(key)!r}: give the optimizer the groups that it had"
            )
        options = saved
    return options


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
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


# The whole run ----------------------------------------------------------------------------------------------------------


class Stateful(Protocol):
    """An object whose state can be saved: a scheduler, a data loader, a gradient scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Schedulers = Stateful | Sequence[Stateful] | None


@dataclass(frozen=True)
class TrainingState:
    """The objects that are saved and loaded together.

    A load goes through `allocate`, `load_others` (under `restore_others_on_error`) and `load_tensors`, in this order, so that a
    scheduler or data loader can reject the saved state before any tensor has changed.
    """

    model: ModelState
    optimizer: Optimizers = None
    scheduler: Schedulers = None
    data: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def list_others(self) -> dict[str, Stateful]:
        """Everything but the model and the optimizers, by the key that it is saved under."""
        schedulers = [] if self.scheduler is None else self.scheduler if isinstance(self.scheduler, Sequence) else [self.scheduler]
        others = {f"scheduler.{k}": scheduler for k, scheduler in enumerate(schedulers)}
        if self.data is not None:
            others["data"] = self.data
        return others | {f"extra.{name}": stateful for name, stateful in self.extra.items()}

    # Saving -----------------------------------------------------------------------------------------------------------

    def collect(self, rank: int, step: int, first: Mapping[str, str]) -> tuple[dict[str, Any], Aliases]:
        """This rank's state by key, and further keys of values in it. `first` maps the names of a tied parameter to its first one."""
        values = {first.get(name, name): wrap_collection(value) for name, value in self.model.values().items()}
        missing = next((name for name, value in values.items() if isinstance(value, Tensor) and value.is_meta), None)
        if missing is not None:
            raise CheckpointError(f"{missing} is on the meta device and has no values to save")
        names = {ident: first.get(name, name) for ident, name in self.model.list_first_names().items()}
        optimizer, aliases = optimizer_state(self.optimizer, names, self.model.list_shards())
        state: dict[str, Any] = {"model": values, "optimizer": optimizer}
        state[f"random.{rank}"] = (capture_random_state(),)
        if rank == 0:
            state |= {key: (stateful.state_dict(),) for key, stateful in self.list_others().items()}
            state["training"] = ({"step": step, **self.model.stream_position()},)
        return state, {f"optimizer.{key}": [f"optimizer.{other}" for other in others] for key, others in aliases.items()}

    # Loading ----------------------------------------------------------------------------------------------------------

    def allocate(self, reader: CheckpointReader, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The destinations to read into, by key: tensors, of which the model's are its own; and values that can be rejected first."""
        first_names = self.model.list_first_names()
        groups = [group for optimizer in list_optimizers(self.optimizer) for group in name_groups(optimizer, first_names)]
        shards, named = self.model.list_shards(), (pair for group in groups for pair in zip(*group, strict=True))
        state = reader.allocate_optimizer({name: shards.get(id(parameter), parameter) for name, parameter in named})
        options = {key: state.pop(key) for key in list(state) if key.startswith(f"optimizer.{OPTIONS}")}
        tensors: dict[str, Any] = {f"model.{name}": value for name, value in self.model.values().items()}
        return tensors | state, options | dict.fromkeys((*self.list_others(), "training", f"random.{rank}"))

    def load_others(self, values: Mapping[str, Any], tensor_keys: Iterable[str]) -> None:
        """Load everything but the model and the optimizers; optimizers are only compared with the saved options and keys."""
        names = self.model.list_first_names()
        for optimizer in list_optimizers(self.optimizer):
            check_optimizer(optimizer, names, _list_optimizer_entries(values), _list_optimizer_entries(dict.fromkeys(tensor_keys)))
        for key, stateful in self.list_others().items():
            _check_groups(stateful, values[key][0])
            stateful.load_state_dict(values[key][0])

    def load_tensors(self, tensors: Mapping[str, Any], values: Mapping[str, Any], rank: int) -> None:
        """Load the model, the optimizers and the random state."""
        entries = {key.removeprefix("model."): unwrap_collection(value) for key, value in tensors.items() if key.startswith("model.")}
        self.model.load(entries)
        state = _list_optimizer_entries({key: value.rows if isinstance(value, TensorRows) else value for key, value in tensors.items()})
        for optimizer in list_optimizers(self.optimizer):
            load_optimizer(optimizer, self.model.list_first_names(), state | _list_optimizer_entries(values))
        self.model.set_stream_position(values["training"][0])
        set_random_state(values[f"random.{rank}"][0])

    @contextmanager
    def restore_others_on_error(self) -> Iterator[None]:
        """Restore everything but the model and the optimizers if something fails inside."""
        others = self.list_others()
        before = {key: copy.deepcopy(stateful.state_dict()) for key, stateful in others.items()}
        try:
            yield
        except BaseException:
            for key, stateful in others.items():
                stateful.load_state_dict(before[key])
            raise


def _list_optimizer_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix("optimizer."): value for key, value in entries.items() if key.startswith("optimizer.")}


def _check_groups(scheduler: Any, state: Any) -> None:
    """Check the number of groups: a scheduler keeps its rates by group index, so every rank must have all groups."""
    saved, rates = isinstance(state, dict) and state.get("base_lrs"), getattr(scheduler, "base_lrs", None)
    if isinstance(saved, list) and isinstance(rates, list) and len(saved) != len(rates):
        raise CheckpointError(
            f"the scheduler was saved with {len(saved)} optimizer groups, but has {len(rates)} here: "
            "give the optimizer the same groups on every rank, empty ones if a rank has no such parameters"
        )
