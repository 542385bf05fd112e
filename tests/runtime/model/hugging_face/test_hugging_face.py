"""Causal language models of transformers' as pipelines: the loss and every gradient of the whole model."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import penstock as ps
from models.tiny import DEPTH, MODELS, batch, by_stages, by_whole, gpt2, llama, mixtral, qwen
from penstock.cli.main import main
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import HuggingFace, Initial, Pipeline, launch
from penstock.runtime.measure.profile import profile
from runtime.models import Numbers, assert_all_equal, assert_close, assert_equal, gradients

ROUNDING = 1e-6


def assert_same_as_whole(found: Numbers, wanted: Numbers) -> None:
    """Every gradient to the last bit, but for a tied one, which is summed in another order; the loss with its side losses to rounding."""
    assert found.loss is not None
    torch.testing.assert_close(found.loss, wanted.loss, rtol=ROUNDING, atol=0)
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        if "embed" in name or "wte" in name:
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
        else:
            assert_equal(found.grads[name], grad, name)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-zb"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_whole_model(name, schedule):
    model, inputs = MODELS[name]().train(), batch()
    found, wanted = by_stages(model, inputs, schedule, 3), by_whole(model, inputs, 3)
    assert_same_as_whole(found, wanted)


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_tied_embeddings_have_one_gradient(make, schedule):
    model, inputs = make(tie_word_embeddings=True), batch()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_as_whole(by_stages(model, inputs, schedule, 3), by_whole(model, inputs, 3))


@pytest.mark.parametrize("name", MODELS)
def test_every_unit_can_be_a_stage_of_its_own(name):
    """Six stages of one unit each: the embedding alone, the norm and head alone."""
    model, inputs = MODELS[name](), batch(rows=4)
    found = by_stages(model, inputs, "1f1b", 2, ranks=DEPTH + 2, split=HuggingFace(sizes=[1] * (DEPTH + 2)))
    assert_same_as_whole(found, by_whole(model, inputs, 2))


def test_a_microbatch_without_labels_counts_for_nothing():
    inputs = batch(rows=4)
    inputs["labels"][2:] = -100
    model = llama()
    found, wanted = by_stages(model, inputs, "zb-h1", 2), by_whole(model, inputs, 2)
    assert_same_as_whole(found, wanted)
    whole = copy.deepcopy(model)
    whole(**inputs, use_cache=False).loss.backward()
    assert_close(found, Numbers(wanted.loss, [], gradients(whole)), 1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen", "gpt2"])
def test_the_weighted_microbatches_are_the_whole_batch(name):
    """One forward of the whole batch by transformers itself; routers are balanced by microbatch, so that those have no such sum."""
    model, inputs = MODELS[name](), batch()
    whole = copy.deepcopy(model)
    loss = whole(**inputs, use_cache=False).loss
    loss.backward()
    assert_close(by_stages(model, inputs, "zbv", 3), Numbers(loss.detach(), [], gradients(whole)), 1e-5)


def test_positions_are_carried_along():
    inputs = batch()
    inputs["position_ids"] = torch.arange(7).flip(0).expand(6, -1).contiguous()
    for model in (llama(), gpt2()):
        found, wanted = by_stages(model, inputs, "1f1b", 2), by_whole(model, inputs, 2)
        assert_same_as_whole(found, wanted)
        assert not torch.equal(wanted.loss, by_whole(model, {k: v for k, v in inputs.items() if k != "position_ids"}, 2).loss)


def test_masks_matter():
    """Padding on the left, which only a mask that reaches every layer hides."""
    inputs = batch()
    inputs = {name: each.flip(1) for name, each in inputs.items()}
    model = llama()
    found, wanted = by_stages(model, inputs, "zbv", 2), by_whole(model, inputs, 2)
    assert_same_as_whole(found, wanted)
    unmasked = by_whole(model, {name: each for name, each in inputs.items() if name != "attention_mask"}, 2)
    assert not torch.equal(wanted.loss, unmasked.loss)


@pytest.mark.parametrize("masked", [True, False])
def test_router_losses_are_the_whole_model_s(masked):
    """All stages' routers are balanced together, and the balance has a gradient in each of them."""
    inputs = batch() if masked else {name: each for name, each in batch().items() if name != "attention_mask"}
    model, plain = mixtral(), mixtral(output_router_logits=False)
    plain.load_state_dict(model.state_dict())
    found, wanted, without = by_stages(model, inputs, "zbv", 3), by_whole(model, inputs, 3), by_whole(plain, inputs, 3)
    assert_same_as_whole(found, wanted)
    for layer in range(DEPTH):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        assert not torch.allclose(wanted.grads[gate], without.grads[gate])
    assert_same_as_whole(by_stages(plain, inputs, "zbv", 3), without)


def test_evaluation_and_inference_give_the_whole_model_s():
    model, inputs = gpt2(resid_pdrop=0.5).train(), batch()
    scores = copy.deepcopy(model).eval()(**inputs, use_cache=False)

    def run() -> tuple[Any, Any]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=2)
        return pipe.eval_step(inputs).loss, pipe.infer(inputs)

    for loss, logits in launch(run, 2):
        torch.testing.assert_close(loss, scores.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(logits, scores.logits, rtol=1e-5, atol=1e-6)
    assert model.training


def test_batches_as_users_have_them():
    model, inputs = llama(), batch()
    tokens = {name: each for name, each in inputs.items() if name != "labels"}

    def run() -> list[Any]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=3)
        pieces = [{name: each[k : k + 2] for name, each in inputs.items()} for k in (0, 2, 4)]
        plain = pipe.step(inputs["input_ids"], target=inputs["labels"])
        masked = pipe.step_list([{"input_ids": inputs["input_ids"]}], [inputs["labels"]])
        torch.testing.assert_close(plain.loss, masked.loss)
        return [
            each.loss
            for each in (
                pipe.step(inputs),
                pipe.step(BatchEncoding(inputs)),
                pipe.step(tokens, target=inputs["labels"]),
                pipe.step_list(pieces),
                pipe.step_list([(piece,) for piece in pieces]),
                pipe.step(inputs | {"use_cache": True}),
            )
        ]

    for losses in launch(run, 2):
        assert_all_equal(losses, [losses[0]] * 6)


def test_a_loss_of_one_s_own():
    model, inputs = llama(), batch()

    def square(scores: torch.Tensor) -> torch.Tensor:
        return scores.square().mean()

    found = launch(lambda: Pipeline(model, schedule="1f1b", microbatches=1, loss_fn=square).step(inputs).loss, 2)
    torch.testing.assert_close(found[0], square(model(**inputs, use_cache=False).logits).detach())


def test_what_is_drawn_does_not_depend_on_the_cuts():
    inputs = batch()
    model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    found = [by_stages(model, inputs, schedule, 3, ranks=ranks, seed=5) for schedule, ranks in (("1f1b", 1), ("1f1b", 3), ("zbv", 2))]
    for other in found[1:]:
        assert_same_as_whole(other, found[0])
    assert not torch.equal(by_stages(model, inputs, "1f1b", 3, seed=6).loss, found[0].loss)


def test_parity_runs_on_copies():
    model, inputs = mixtral(), batch()
    for parity in launch(lambda: Pipeline(model, schedule="zbv", microbatches=3).parity(inputs), 2):
        assert parity.loop.worst < ROUNDING, str(parity)


def test_the_model_is_left_as_it_was():
    model, inputs = llama(), batch()
    before = [(name, id(each)) for name, each in model.named_modules()]
    hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    by_whole(model, inputs, 1)
    launch(lambda: Pipeline(model, schedule="zbv", microbatches=3).step(inputs), 2)
    assert [(name, id(each)) for name, each in model.named_modules()] == before
    assert sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()) == hooks


def test_names_are_the_model_s_own():
    model = llama()
    names = launch(lambda: [name for name, _ in Pipeline(model, schedule="zbv", microbatches=2).named_parameters()], 2)
    assert sorted(chain(*names)) == sorted(name for name, _ in model.named_parameters())


def test_a_model_on_the_meta_device_gets_its_values_where_they_are_owned():
    with torch.device("meta"):
        model = llama()
    initial = Initial(seed=3, init=lambda name, module: model._init_weights(module))
    whole = llama()
    initial(whole)
    inputs = batch()

    def run() -> Any:
        mine = copy.deepcopy(model)
        pipe = Pipeline(mine, schedule="1f1b", microbatches=2, weights=initial)
        return pipe.step(inputs).loss, sum(p.is_meta for p in mine.parameters())

    for loss, absent in launch(run, 2):
        assert_equal(loss, by_whole(whole, inputs, 2).loss)
        assert absent > 0


def test_slices_of_a_model_are_profiled_with_its_own_cache_and_loss():
    model, inputs = llama(), batch()
    rows, tokens = inputs["input_ids"].shape
    measured = profile(model, inputs, slices=2, warmup=0, repeats=1)
    assert (measured.tokens, measured.lacks_slices) == (tokens, "")
    keys = [layer.slices.keys for layer in measured.layers if layer.slices is not None]
    assert keys == [0.0, *([rows * 2 * 8 * 4] * DEPTH), 0.0]  # keys and values of one head, of 4 bytes each


def test_a_profile_has_every_unit_and_its_plan_runs():
    model, inputs = llama(), batch()
    measured = profile(model, inputs, microbatch_sizes=[2], warmup=1, repeats=1)
    assert [layer.name for layer in measured.layers] == [
        "model.embed_tokens",
        *(f"model.layers.{k}" for k in range(DEPTH)),
        "model.norm + lm_head",
    ]
    assert [layer.parameters for layer in measured.layers[1:-1]] == pytest.approx([measured.layers[1].parameters] * DEPTH)
    plan = ps.plan(measured, ranks=2, microbatches=3, seconds=0)

    def run() -> Any:
        pipe = Pipeline(model, plan)
        return [len(part.layers) for part in pipe.partition.parts if part], pipe.parity(inputs).loop

    for sizes, parity in launch(run, 2):
        extra = [1 + (stage == len(sizes) - 1) for stage in range(len(sizes))]  # the rotary tables, and a tail of two
        assert [size - more for size, more in zip(sizes, extra, strict=True)] == list(plan.partition)
        assert parity.worst < 1e-5, str(parity)  # whatever order of sums the plan has


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_recomputed_stages_have_the_same_numbers(name):
    """Routers' losses too, which are made while a stage runs and count once."""
    model, inputs = MODELS[name]().train(), batch()
    for schedule in ("1f1b", "zbv"):
        assert_same_as_whole(by_stages(model, inputs, schedule, 3, recompute=True), by_whole(model, inputs, 3))
    units = [False, *(number % 2 == 0 for number in range(len(HuggingFace().units(model)) - 2)), False]
    assert_same_as_whole(by_stages(model, inputs, "zbv", 3, recompute=units), by_whole(model, inputs, 3))
    with pytest.raises((ScheduleError, PipelineError), match="computes its loss elsewhere: recompute the whole stage"):
        by_stages(model, inputs, "1f1b", 3, recompute=[*units[:-1], True])


def test_a_profile_on_the_command_line(tmp_path, capsys):
    file = tmp_path / "build.py"
    file.write_text("from models.tiny import batch, llama\n\ndef build():\n    return llama(), batch(rows=2)\n")
    command = ["profile", f"{file}:build", "--device", "cpu", "--warmup", "0", "--repeats", "1", "-o", str(tmp_path / "p.json")]
    assert main(command) == 0
    assert "model.norm + lm_head" in capsys.readouterr().out
    assert len(ps.Profile.load(tmp_path / "p.json").layers) == DEPTH + 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_model_s_own_checkpointing(name, reentrant):
    model, inputs = MODELS[name]().train(), batch()
    renamed = hasattr(model, "activation_checkpointing_enable")  # from transformers 5.23 on
    (model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    assert_same_as_whole(by_stages(model, inputs, "zbv", 3), by_whole(model, inputs, 3))


def test_in_half_precision():
    model, inputs = llama().bfloat16(), batch()
    assert_same_as_whole(by_stages(model, inputs, "zbv", 3), by_whole(model, inputs, 3))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_under_autocast(name):
    model, inputs = MODELS[name](), batch()
    own = copy.deepcopy(model)

    def train() -> Any:
        pipe = Pipeline(own, schedule="zbv", microbatches=3)
        with torch.autocast("cpu", torch.bfloat16):
            return pipe.step(inputs).loss

    loss = launch(train, 2)[0]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = by_whole(model, inputs, 3)
    assert_same_as_whole(Numbers(loss, [], gradients(own)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2])
def test_compiled_stages_have_the_same_numbers(make):
    """Each stage is one graph, whatever the model's forward does around its layers."""
    torch._dynamo.reset()
    model, inputs = make(), batch()
    found = by_stages(model, inputs, "zb-h1", 3, compile={"backend": "aot_eager", "fullgraph": True})
    assert_close(found, by_whole(model, inputs, 3), 1e-5)
