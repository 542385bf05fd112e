"""GPUs and links."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import CostsError

RATES = {"flops": 1e12, "memory": "1GB", "memory_bandwidth": "1GB", "node_bandwidth": "100GB", "bandwidth": "10GB"}


def machines(**values):
    return ps.Machines(**{"gpus": 16, "gpus_per_node": 8, **RATES, "node_latency": 0.0, "latency": 0.0, "link_share": 1.0, **values})


def test_a_gather_within_a_node_passes_all_but_its_own_share_over_the_node_s_links():
    assert machines().gather_time(8e9, 8) == pytest.approx(7e9 / 100e9)


def test_a_gather_over_nodes_uses_the_links_of_all_members_in_a_node():
    assert machines().gather_time(16e9, 16) == pytest.approx(15e9 / 80e9)  # 8 members per node, 10 GB/s each
    assert machines().gather_time(2e9, 2, stride=8) == pytest.approx(1e9 / 10e9)  # 1 member per node


def test_one_rank_gathers_nothing():
    assert machines().gather_time(1e9, 1) == 0.0


def test_latency_and_shares_count():
    assert machines(latency=0.5, link_share=0.5).gather_time(2e9, 2, stride=8) == pytest.approx(0.5 + 1e9 / 5e9)
    assert machines(matmul_share=0.5).matmul_time(1e12) == pytest.approx(2.0)
    assert machines(memory_share=0.5).memory_time(1e9) == pytest.approx(2.0)
    assert machines(attention_share=0.25).attention_time(1e12) == pytest.approx(4.0)


def test_a_row_of_gpus_that_leaves_the_node_has_the_slower_link():
    assert machines().link(stride=1, ranks=8) == (0.0, 100e9)
    assert machines().link(stride=1, ranks=16) == (0.0, 10e9)
    assert machines().link(stride=8, ranks=2) == (0.0, 10e9)


def test_latencies_may_have_a_unit():
    assert machines(latency="20us", node_latency="1500 ns") == machines(latency=2e-5, node_latency=1.5e-6)


def test_fields_are_a_mapping():
    with pytest.raises(CostsError, match="machines: the data must be an object, got a whole number"):
        ps.Machines.from_fields(3)


def test_known_kinds_take_further_fields():
    own = ps.Machines.of("H100", gpus=16, memory="40GB")
    assert (own.flops, own.memory, own.nodes) == (989e12, 40e9, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bandwidth": 0}, "bandwidth must be more than 0, because every link needs one"),
        ({"node_bandwidth": "0GB"}, "node_bandwidth must be more than 0"),
        ({"flops": 0}, "flops must be more than 0"),
        ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
        ({"gpus": 12}, "gpus=12 do not fill whole nodes of gpus_per_node=8"),
        ({"link_share": 1.5}, "link_share must be a number above 0 and at most 1, got 1.5"),
        ({"latency": -1}, "latency must be a finite number of at least 0, got -1"),
        ({"latency": "5KB"}, "latency: '5KB' is not a time: write a number and one of s, ms, us, ns"),
        ({"node_latency": 5}, "node_latency=5 is that many seconds: write the unit, like 5us"),
        ({"memory": 80}, "memory=80 is that many bytes: write the unit, like 80GB"),
        ({"bandwidth": 25}, "bandwidth=25 is that many bytes per second: write the unit, like 25GB"),
        ({"bandwidth": "200Gbit"}, "bandwidth: '200Gbit' is not a bandwidth: write how many bytes pass"),
        ({"flops": "312TB"}, "flops must be a number, got '312TB'"),
    ],
)
def test_impossible_machines_are_refused(values, message):
    with pytest.raises(CostsError, match=message):
        machines(**values)


def test_missing_and_unknown_fields_are_refused():
    with pytest.raises(CostsError, match="machines: 'flops', 'memory', 'memory_bandwidth', 'node_bandwidth', 'bandwidth' are missing"):
        ps.Machines.from_fields({"gpus": 8})
    with pytest.raises(CostsError, match="no field 'gpu_count'"):
        ps.Machines.of("a100", gpu_count=8)
    with pytest.raises(CostsError, match="no numbers for the GPU 'v100'"):
        ps.Machines.of("v100", gpus=8)
