"""The parameters of one stage: those that it shares with other stages, and the copies of them on its replicas."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.model.partition import Part, Partition
from penstock.runtime.model.tied_parameters import Place, SharedParameters
from penstock.runtime.parallel.data_parallel import ReplicatedTensors
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.group import Group
from penstock.runtime.transport.subgroup import join_members

Candidates = Mapping[Hashable, str]
"""The names of parameters that other stages may have too, by keys that are the same on all of them."""


class StageParameters:
    """The parameters of this rank's stage. Tied ones are shared with other stages as in any pipeline, see `SharedParameters`.

    Names are made unique by their stage while they are compared, because tied layers have one name on several stages.
    """

    def __init__(self, partition: Partition, candidates: Candidates, group: Group, stage: int, deadline: float) -> None:
        self.group, self.rank, self.deadline = group, stage, deadline
        self.partition = Partition(tuple(part and _prefix(part, f"stage {number}") for number, part in enumerate(partition.parts)))
        ties = self._find_ties(candidates)
        self.tied = bool(ties or self.partition.tied())
        """Whether any stages share parameters."""
        self.shared = SharedParameters(
            self.partition,
            ties,
            self.local_parameters(),
            self.gather,
            rank=stage,
            identify=group.ident,
            parallel=group.parallel,
            sums_apart=False,
        )

    def _find_ties(self, candidates: Candidates) -> list[list[str]]:
        """The names of parameters that several stages have."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.local_parameters(unique=False)}
        mine = {key: (self._unique(name), shapes[self._unique(name)]) for key, name in candidates.items()}
        holders: dict[Hashable, list[tuple[int, str, tuple[int, ...]]]] = {}
        for stage, theirs in enumerate(self.gather("tied layers", mine)):
            for key, (name, shape) in theirs.items():
                holders.setdefault(key, []).append((stage, name, shape))
        for key, ((first, _, wanted), *others) in holders.items():
            for stage, _, shape in others:
                if shape != wanted:
                    raise PlacementError(
                        f"tied parameter {key} has shape {list(wanted)} on stage {first} and {list(shape)} on stage {stage}: give layers "
                        "of one key the same arguments"
                    )
        return [[name for _, name, _ in held] for held in holders.values() if len(held) > 1]

    def _unique(self, name: str) -> str:
        return f"stage {self.rank}.{name}"

    def _plain(self, name: str) -> str:
        return name.removeprefix(self._unique(""))

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all stages."""
        return self.group.gather(self.rank, name, value, self.deadline)

    def local_parameters(self, *, unique: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters by their unique names; each once, or under all its names."""
        part, seen = self.partition.parts[self.rank], set[int]()
        assert part is not None
        for name, parameter in part.parameters:
            if not unique or id(parameter) not in seen:
                yield name, parameter
            seen.add(id(parameter))

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage updates, under the model's own names; tied ones come last.

        So the first of them, under whose name a checkpoint notes the options that many have in common, belongs to no other stage.
        """
        mine = [(name, parameter) for name, parameter in self.local_parameters() if name in self.shared.owned]
        return ((self._plain(name), parameter) for name, parameter in sorted(mine, key=lambda each: each[0] in self.shared.tied))

    def places(self) -> dict[str, Place]:
        """For each name of this stage's parameters, the first place of the parameter in the model."""
        first = {id(parameter): self.shared.place[name] for name, parameter in self.local_parameters()}
        return {self._plain(name): first[id(parameter)] for name, parameter in self.local_parameters(unique=False)}

    def begin(self) -> None:
        """Set aside the gradients of earlier batches, so that only those of this batch are summed over the stages."""
        self.shared.begin(self.local_parameters(), self.gather)

    def sum_tied(self) -> None:
        """Sum the gradients of tied parameters over the stages, which all meet here."""
        self.shared.sum_gradients(self.local_parameters(), self.gather, lambda parameter: None)
        self.gather("ReduceTiedGrads", None)


def _prefix(part: Part, prefix: str) -> Part:
    return replace(part, layers=tuple(f"{prefix}.{name}" for name in part.layers))


class Replicas:
    """The ranks that hold the same stage. They start from the values of the first, and take the mean of their gradients.

    `members` are these ranks among all of the launch.
    """

    def __init__(self, whole: Group, rank: int, members: Sequence[int], deadline: float) -> None:
        self.count, self.rank, self.deadline = len(members), list(members).index(rank), deadline
        self._group: Any = join_members(whole, rank, members) if self.count > 1 else None

    def start(self, stage: int, module: nn.Module) -> None:
        """Check that all replicas have the same parameters, and copy the values of the first."""
        if self.count == 1:
            return
        mine = [(name, tuple(each.shape), each.dtype, self._group.ident(each)) for name, each in module.named_parameters()]
        for replica, theirs in enumerate(self._gather("replicas", mine)):
            if [each[:-1] for each in theirs] != [each[:-1] for each in mine]:
                raise ScheduleError(
                    f"stage {stage} has other parameters in replica {replica} than in replica {self.rank}: build the same layers on "
                    "every rank"
                )
            if replica != self.rank and {each[-1] for each in theirs} & {each[-1] for each in mine}:
                raise ScheduleError("two replicas have a parameter that is one object: build the layers on every rank, or give LayerSpec")
        copies = ReplicatedTensors({stage: module}, {})
        copies.broadcast(self._group.connect_collectives(self.deadline), copies.everything())

    def _gather(self, name: str, value: Any) -> list[Any]:
        return [value] if self.count == 1 else self._group.gather(self.rank, name, value, self.deadline)

    def average(self, name: str, value: Any) -> Any:
        """The mean of a tree of tensors over the replicas."""
        everyone = self._gather(name, value)
        return None if value is None else mean(everyone)

    @torch.no_grad()
    def average_gradients(self, module: nn.Module) -> None:
        """Give every replica the mean; a replica whose parameter took no part counts as zero."""
        if self.count == 1:
            return
        held = list(module.parameters())
        present = self._gather("ReduceGrads", [parameter.grad is not None for parameter in held])
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, *some in zip(held, *present, strict=True):
            if any(some):
                grad = parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if grad.is_sparse:
                    raise ScheduleError("a sparse gradient cannot be averaged over replicas: use dense ones")
                buckets.setdefault((grad.dtype, grad.device), []).append(grad)
        for grads in buckets.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._group.connect_collectives(self.deadline).allreduce([flat]).wait(timedelta(seconds=self.deadline))
            parts = torch.split(flat.div_(self.count), [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view(grad.shape))


def mean(values: Sequence[Any]) -> Any:
    """The mean of trees of tensors; None if there are none."""
    if not values:
        return None
    return pytree.tree_map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), values[0], *values[1:])
