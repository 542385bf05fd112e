"""How long each microbatch's activations live in an order, and how few slots of memory can hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, Literal

from penstock.compat.torch.orders.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, split_action
from penstock.compat.torch.orders.tables import Row

Granularity = Literal["microbatch", "stage_microbatch"]
Key = tuple[int, int]
"""A stage and a microbatch."""
Interval = tuple[int, int]
"""The positions of the first and the last action in which activations live, both included."""


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """Slots for the activations of one rank's stages; activations that live at the same time have different ones.

    Slots are numbers, not memory: allocate one buffer for each, large enough for all activations that share it.
    """

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[Key, int]
    num_slots: int
    _activation_lifetime_by_stage_and_microbatch: Mapping[Key, Interval] = field(repr=False)
    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Return the slot of a microbatch's activations on a stage."""
        slot: int = self._look_up(self.slot_by_stage_and_microbatch, "slot", stage_index, microbatch_index)
        return slot

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> Interval:
        """Return the positions, in the order that was analyzed, of the first and last action in which the activations live."""
        lifetimes = self._activation_lifetime_by_stage_and_microbatch
        lifetime: Interval = self._look_up(lifetimes, "lifetime", stage_index, microbatch_index)
        return lifetime

    def _look_up(self, values: Mapping[Key, Any], what: str, stage: int, microbatch: int) -> Any:
        if (stage, microbatch) not in values:
            raise ValueError(
                f"No activation {what} exists for stage {stage}, microbatch {microbatch}: stages {list(self.stage_indices)} and "
                f"{self.num_microbatches} microbatches were analyzed"
            )
        return values[stage, microbatch]


def analyze_pipeline_activation_liveness(
    schedule: Any, *, pp_rank: int, stage_indices: Sequence[int], granularity: Granularity
) -> PipelineActivationLiveness:
    """Find the lifetime of each microbatch's activations on some stages of a rank, and assign slots to them.

    Activations live from their forward to their full backward, or to their backward for the weights if it is split. With
    `granularity="microbatch"` those of all the stages live together, from the first forward to the last backward.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise ValueError(f"Unsupported activation granularity: {granularity}. Use 'microbatch' or 'stage_microbatch'")
    stages = tuple(stage_indices)
    if not stages:
        raise ValueError("stage_indices must not be empty")
    if len(set(stages)) != len(stages):
        raise ValueError(f"stage_indices must be unique, got {list(stages)}")
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if pp_rank not in order:
        raise ValueError(f"Rank {pp_rank} is not present in the pipeline schedule, which has ranks {sorted(order)}")
    count: int = schedule._n_microbatches
    lifetimes = _find_lifetimes(order[pp_rank], stages, count)
    if granularity == "microbatch":
        for microbatch in range(count):
            together = [lifetimes[stage, microbatch] for stage in stages]
            whole = min(start for start, _ in together), max(end for _, end in together)
            lifetimes.update(dict.fromkeys(((stage, microbatch) for stage in stages), whole))
        of_microbatch, num_slots = assign_slots([lifetimes[stages[0], microbatch] for microbatch in range(count)])
        slots = {key: of_microbatch[key[1]] for key in lifetimes}
    else:
        assigned, num_slots = assign_slots(list(lifetimes.values()))
        slots = dict(zip(lifetimes, assigned, strict=True))
    return PipelineActivationLiveness(pp_rank, granularity, stages, count, MappingProxyType(slots), num_slots, MappingProxyType(lifetimes))


def _find_lifetimes(row: Row, stages: Sequence[int], count: int) -> dict[Key, Interval]:
    """Find the lifetime of each microbatch on each stage; refuse a row in which one does not begin and end once."""
    positions: dict[Any, dict[Key, int]] = {kind: {} for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)}
    for position, action in enumerate(row):
        for part in split_action(action) if action is not None else ():
            if part.stage_index not in stages or part.computation_type not in positions:
                continue
            if part.microbatch_index is None or not 0 <= part.microbatch_index < count:
                raise ValueError(f"Action {part} has a microbatch outside [0, {count})")
            key = part.stage_index, part.microbatch_index
            if key in positions[part.computation_type]:
                raise ValueError(f"Activation lifetime {key} has multiple {part.computation_type.name} actions")
            positions[part.computation_type][key] = position
    starts, inputs, weights = positions[FORWARD], positions[BACKWARD_INPUT], positions[BACKWARD_WEIGHT]
    if both := positions[FULL_BACKWARD].keys() & weights.keys():
        raise ValueError(f"Activation lifetimes have multiple release actions: {sorted(both)}")
    ends = {**positions[FULL_BACKWARD], **weights}
    expected = [(stage, microbatch) for stage in sorted(stages) for microbatch in range(count)]
    for name, present in (("Forward", starts), ("Backward release", ends)):
        if missing := [key for key in expected if key not in present]:
            raise ValueError(f"{name} actions do not match tracked activations; missing={missing}")
    if unsplit := sorted(weights.keys() - inputs.keys()):
        raise ValueError(f"Activation lifetimes have weight backward without input backward: {unsplit}")
    for key in expected:
        if ends[key] < starts[key]:
            raise ValueError(f"Activation lifetime {key} ends before its forward")
    return {key: (starts[key], ends[key]) for key in expected}


def assign_slots(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Assign the lowest free slot to each interval, in the order in which they begin; return the slots and how many there are."""
    slots = [0] * len(intervals)
    used: list[tuple[int, int]] = []
    """The end and the slot of each interval that has begun."""
    free: list[int] = []
    count = 0
    for index in sorted(range(len(intervals)), key=lambda k: (intervals[k], k)):
        start, end = intervals[index]
        while used and used[0][0] < start:
            heappush(free, heappop(used)[1])
        if not free:
            heappush(free, count)
            count += 1
        slots[index] = heappop(free)
        heappush(used, (end, slots[index]))
    return slots, count
