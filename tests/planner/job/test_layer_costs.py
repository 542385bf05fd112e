"""What layers take and hold in a configuration."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.transformer import Transformer
from planner.job.small_jobs import SIZES, small_job

FREE = {"memory_bandwidth": 1e30, "node_bandwidth": 1e30, "bandwidth": 1e30, "node_latency": 0.0, "latency": 0.0}
FULL = {"matmul_share": 1.0, "attention_share": 1.0, "memory_share": 1.0, "link_share": 1.0}


def costs(gpus=4, job=None, **chosen):
    return LayerCosts(job or small_job(gpus), ps.Configuration(**chosen))


@pytest.mark.parametrize("flash", [True, False])
def test_on_one_gpu_with_free_memory_and_links_it_is_the_profile_of_the_transformer(flash):
    job = small_job(model={"flash": flash}, **FREE, **FULL)
    wanted = Transformer(**SIZES, flash=flash, flops=1e12, microbatch=2).profile()
    own = LayerCosts(job, ps.Configuration(microbatch=2)).profile()
    assert len(own) == len(wanted)
    for layer, other in zip(own.layers, wanted.layers, strict=True):
        for name in ("f", "i", "w", "activation", "weight_stash", "output", "parameters", "gradients", "optimizer"):
            assert getattr(layer, name) == pytest.approx(getattr(other, name), abs=1e-15), (layer.name, name)


def test_tensor_and_context_ranks_share_work_and_activations():
    job = small_job(**FREE)
    whole, shared = LayerCosts(job, ps.Configuration()), LayerCosts(job, ps.Configuration(tensor=2, context=2))
    for name in ("f", "i", "w", "activation", "weight_stash", "output"):
        assert getattr(shared.block, name) == pytest.approx(getattr(whole.block, name) / 4)
    assert shared.block.parameters == whole.block.parameters / 2


def test_tensor_collectives_are_four_per_direction():
    job = small_job(node_latency=0.5, memory_bandwidth=1e30, node_bandwidth=1e30, bandwidth=1e30)
    one, two = (LayerCosts(job, ps.Configuration(tensor=degree)).block for degree in (1, 2))
    assert two.f - one.f / 2 == pytest.approx(4 * 0.5)
    assert two.i - one.i / 2 == pytest.approx(4 * 0.5)
    assert two.w == pytest.approx(one.w / 2)


def test_context_collectives_are_one_forward_and_two_back():
    job = small_job(node_latency=0.5, memory_bandwidth=1e30, node_bandwidth=1e30, bandwidth=1e30)
    one, two = (LayerCosts(job, ps.Configuration(context=degree)).block for degree in (1, 2))
    assert (two.f - one.f / 2, two.i - one.i / 2) == (pytest.approx(0.5), pytest.approx(2 * 0.5))


def test_sharding_divides_state_then_gradients_then_parameters():
    plain, first, second, third = (costs(data=4, sharding=stage).block for stage in range(4))
    assert first.optimizer == plain.optimizer / 4
    assert (first.gradients, first.parameters) == (plain.gradients, plain.parameters)
    assert (second.optimizer, second.gradients, second.parameters) == (first.optimizer, plain.gradients / 4, plain.parameters)
    assert (third.optimizer, third.gradients, third.parameters) == (first.optimizer, plain.gradients / 4, plain.parameters / 4)


def test_sharding_moves_the_reduction_into_every_backward():
    slow = small_job(bandwidth=1e5, node_bandwidth=1e5, node_latency=0.0, latency=0.0)
    plain, first, second, third = (costs(job=slow, data=4, sharding=stage).block for stage in range(4))
    assert plain.reduction == pytest.approx(2 * first.reduction)  # an all-reduce is a reduce-scatter and an all-gather
    assert (second.reduction, third.reduction) == (0.0, 0.0)
    assert second.w == pytest.approx(first.reduction)  # longer than the product that it runs behind
    gathered = first.reduction * slow.transformer.bytes / slow.transformer.gradient_bytes
    assert (third.f, third.i) == (pytest.approx(gathered), pytest.approx(gathered))


def test_recomputed_blocks_keep_their_input_and_run_forward_twice():
    layers = costs(tensor=2)
    kept, again = layers.block, layers.recomputed_block
    assert again.activation == kept.output
    assert again.i == pytest.approx(kept.i + kept.f)
    assert again.workspace == pytest.approx(kept.activation - kept.output)
    profile = layers.profile([True, False, True, False, False, False])
    assert [layer.activation == kept.output for layer in profile.layers[1:-1]] == [True, False, True, False, False, False]


def test_selective_recompute_drops_the_scores_of_attention_and_runs_them_again():
    job = small_job(model={"flash": False}, **FREE, **FULL)
    kept, again = (LayerCosts(job, ps.Configuration(selective=flag)).block for flag in (False, True))
    scores = 128 * 128 * 4
    statistics = 4 * 128 * 4  # bytes that flash attention keeps per head and token
    assert kept.activation - again.activation == pytest.approx(5 * scores - statistics)
    assert again.i - kept.i == pytest.approx(4 * 128 * 128 * 64 / 1e12)


@pytest.mark.parametrize(("vocabulary", "gathers"), [("head", 2), ("spread", 4)])
def test_the_shares_of_all_ranks_are_the_ends_of_the_model(vocabulary, gathers):
    """With tensor ranks, each pipeline rank gathers the hidden states for its own rows."""
    for tensor in (1, 2):
        ends, shared = (costs(job=small_job(gpus=8), pipeline=4, tensor=tensor, vocabulary=where) for where in ("ends", vocabulary))
        size = 2 * 128 * 64
        gather = ends.job.machines.gather_time(size, tensor)
        for name, more in (("time", 3 * gathers * gather), ("parameters", 0.0), ("gradients", 0.0), ("optimizer", 0.0)):
            whole = sum(getattr(layer, name) for layer in ends.profile().layers)
            layers = sum(getattr(layer, name) for layer in shared.profile().layers)
            assert layers + 4 * sum(getattr(share, name) for share in shared.shares) == pytest.approx(whole + more), name
        assert len(shared.profile()) == len(ends.profile())
        assert shared.block == ends.block


def test_s_gathers_sharded_rows_once():
    job = small_job(node_latency=0.5, memory_bandwidth=1e30, node_bandwidth=1e30, bandwidth=1e30)
    embedding, head = LayerCosts(job, ps.Configuration(pipeline=2, data=2, sharding=3, vocabulary="spread")).shares
    assert (embedding.f + embedding.i, head.f + head.i) == (pytest.approx(0.5), pytest.approx(0.5))


def test_muon_holds_less_and_takes_longer_than_adam():
    adam, muon = (costs(job=small_job(optimizer=name, **FREE, **FULL)).block for name in ("adam", "muon"))
    assert muon.optimizer == pytest.approx(adam.optimizer * 8 / 12)
    square, wide = 6 * 64**3, 4 * 64**2 * 256 + 2 * 64**3  # per step: X X', its square, and the product with X
    assert muon.update - adam.update == pytest.approx(5 * (4 * square + 2 * wide) / 1e12)


def test_the_update_of_sharded_state_is_shared_and_gathers_parameters():
    job = small_job(node_latency=0.0)
    one, four = LayerCosts(job, ps.Configuration()), LayerCosts(job, ps.Configuration(data=4, sharding=1))
    count = one.block.parameters / job.transformer.bytes
    gathered = job.machines.gather_time(count * 2, 4)
    assert four.block.update == pytest.approx(one.block.update / 4 + gathered)


def test_messages_cross_nodes_only_if_the_pipeline_does():
    near, far = small_job(4), small_job(8)
    assert LayerCosts(near, ps.Configuration(pipeline=4)).profile().bandwidth == pytest.approx(2e10 * 0.8)
    assert LayerCosts(far, ps.Configuration(pipeline=2, data=4)).profile().bandwidth == pytest.approx(2e9 * 0.8)
