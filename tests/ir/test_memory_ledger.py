"""The memory ledger against the rules, written again one holding at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.memory_ledger import CATEGORIES, LIFETIMES, When, list_changes, net_changes, sum_static
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.verifier.rules.offload import peak_host_memory

COSTS = ps.Costs(activation=[5.0, 7.0, 11.0, 13.0], weight_stash=2.0, output=[3.0, 17.0, 19.0, 23.0], parameters=29.0, shard=31.0)
SKIPS = Schedule.from_rows(
    ps.schedule("interleaved-1f1b", 2, 4).rows, Placement.custom([0, 1, 0, 1]), 4, graph=StageGraph.chain(4, skips=[(0, 3), (1, 3)])
)
TABLES = [
    ps.schedule("zb-h1", 4, 5),
    ps.lower(ps.schedule("zb-h1", 4, 5)),
    ps.lower(ps.schedule("interleaved-1f1b", 2, 4), fsdp=True),
    ps.lower(ps.schedule("inference", 4, 3)),
    SKIPS,
    ps.lower(SKIPS),
]


def changes_by_action(table: Table) -> Counter[tuple[str, str, str, float]]:
    changes = list_changes(table, COSTS)
    columns = zip(*(column.tolist() for column in changes), strict=True)
    return Counter((CATEGORIES[k], str(table.rows.part_at(entry)), When(when).name, size) for k, entry, when, size in columns)


def expected(table: Table) -> Counter[tuple[str, str, str, float]]:
    """Only what a stage holds by itself; messages are checked apart."""
    found: Counter[tuple[str, str, str, float]] = Counter()
    parts = [part for row in table for action in row for part in action.parts]
    training = any(part.kind in (Kind.B, Kind.I) for part in parts)
    for part in parts:
        activation, stash = COSTS.of_stage("activation", part.stage), COSTS.of_stage("weight_stash", part.stage)
        name = str(part)
        if part.kind is Kind.F and training:
            found["activations", name, "START", activation] += 1
        if part.kind in (Kind.B, Kind.I):
            found["activations", name, "END", -activation] += 1
        if part.kind is Kind.I:
            found["weight stash", name, "END", stash] += 1
        if part.kind is Kind.W:
            found["weight stash", name, "END", -stash] += 1
        if part.kind is Kind.UNSHARD:
            found["parameters", name, "START", 29.0] += 1
        if part.kind is Kind.RESHARD:
            found["parameters", name, "END", -29.0] += 1
    return found


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_each_kind_of_action_changes_memory_as_the_rules_say(table: Table) -> None:
    changes = changes_by_action(table)
    assert Counter({key: count for key, count in changes.items() if key[0] != "receive buffers"}) == expected(table)


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_everything_but_the_gathered_parameters_is_freed_by_the_end(table: Table) -> None:
    changes = list_changes(table, COSTS)
    for category in range(3):
        sizes = np.where(changes.category == category, changes.size, 0.0)
        assert np.bincount(table.rows.rank[changes.entry], weights=sizes, minlength=table.ranks).tolist() == [0.0] * table.ranks


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_one_buffer_per_received_message(table: Table) -> None:
    changes = changes_by_action(table)
    received = {key: count for key, count in changes.items() if key[0] == "receive buffers" and key[3] > 0 and key[2] != "END"}
    if table.lowered:
        receives = [part for row in table for action in row for part in action.parts if part.kind in (Kind.RECV_F, Kind.RECV_B)]
        assert Counter(key[1] for key in received) == Counter(str(part) for part in receives)
    else:
        assert {key[2] for key in received} == {"ARRIVAL"}
        assert sum(received.values()) == len(table.deliveries.sent)


def test_a_sum_of_gradients_is_held_between_its_parts() -> None:
    """Stage 0 is read by stages 1 and 3 on rank 1: their gradients go back as one, begun by the first of the two."""
    between = {key for key in changes_by_action(SKIPS) if key[0] == "receive buffers" and key[2] == "END" and key[3] > 0}
    assert between == {("receive buffers", f"3B{microbatch}", "END", 3.0) for microbatch in range(4)}


def test_static_memory_is_the_shards_if_anything_is_sharded() -> None:
    schedule = ps.schedule("interleaved-1f1b", 2, 4)
    assert sum_static(ps.lower(schedule), COSTS).tolist() == [58.0, 58.0]
    assert sum_static(ps.lower(schedule, fsdp=True), COSTS).tolist() == [62.0, 62.0]


def test_net_changes_of_all_lifetimes_add_up_to_nothing() -> None:
    sizes = {lifetime.size: float(2**k) for k, lifetime in enumerate(LIFETIMES)}
    changes = net_changes(LIFETIMES, sizes)
    assert sum(changes.values()) == 0.0
    assert changes[Kind.F, When.START] == sizes["activation"] + sizes["received"]
    assert changes[Kind.I, When.END] == sizes["weight_stash"] - sizes["activation"] - sizes["returned"]


# Slices ---------------------------------------------------------------------------------------------------------------


def held_after_each(table: Table, costs: ps.Costs) -> list[float]:
    """What rank 0 holds after each action, by going through the rules action by action; slices of a microbatch are units in a row."""
    slices, held, total = table.slices, 0.0, []

    def of(name: str, stage: int, unit: int) -> float:
        return costs.table(name, table.stages, table.units)[stage, unit]

    for action in table[0]:
        stage, unit = action.stage, action.unit(slices)
        first, last = unit - unit % slices, unit - unit % slices + slices - 1
        if action.kind is Kind.F:
            held += of("activation", stage, unit) + of("kept", stage, unit)
        if action.kind in (Kind.B, Kind.I):
            held -= of("activation", stage, unit)
            held += sum(of("kept_gradients", stage, other) for other in range(first, last)) if unit == last else 0.0
            held -= of("kept_gradients", stage, unit) if unit != last else 0.0
            held -= sum(of("kept", stage, other) for other in range(first, last + 1)) if unit == first else 0.0
        total.append(held)
    return total


@pytest.mark.parametrize("name", ["seq1f1b", "slimpipe", "zbv", "interleaved-1f1b"])
def test_slices_keep_keys_until_the_first_and_sums_of_gradients_from_the_last(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=2, slices=3)
    size = np.arange(schedule.stages * 6, dtype=float).reshape(schedule.stages, 6)
    costs = ps.Costs(activation=size + 100, kept=size + 7, kept_gradients=2 * size + 3)
    changes = list_changes(schedule, costs)
    own = (changes.category == CATEGORIES.index("activations")) & (schedule.rows.rank[changes.entry] == 0)
    change = np.bincount(schedule.rows.group[changes.entry[own]], weights=changes.size[own], minlength=len(schedule[0]))
    assert np.cumsum(change[: len(schedule[0])]).tolist() == pytest.approx(held_after_each(schedule, costs))
    assert held_after_each(schedule, costs)[-1] == 0.0


def test_the_last_backward_slice_holds_the_sums_of_all_others_while_it_runs() -> None:
    row = [f"0F0.{part}" for part in range(4)] + [f"0B0.{part}" for part in (3, 2, 1, 0)]
    schedule = Schedule.from_actions([row], slices=4)
    costs = ps.Costs(activation=10.0, kept=1.0, kept_gradients=2.0)
    assert ps.verify(schedule, costs=costs).peak_memory == (4 * 11 + 3 * 2,)
    moved = ps.lower(schedule, offload=100)
    assert moved.rows.is_kind(Kind.OFFLOAD).any()
    kept_alone = ps.verify(moved, costs=ps.Costs(activation=0.0, kept=1.0, kept_gradients=2.0)).peak_memory
    assert kept_alone == (4 + 3 * 2,)  # nothing of what is kept leaves the device, nor goes to the host
    assert peak_host_memory(moved, costs) == peak_host_memory(moved, ps.Costs(activation=10.0))
