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
