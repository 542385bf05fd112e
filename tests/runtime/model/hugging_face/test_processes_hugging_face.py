"""Models of transformers' on processes: masks, routers' sums and tied weights between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from models import tiny
from models.tiny import batch, by_whole
from penstock.runtime import Checkpoints, Initial, Pipeline, Safetensors
from penstock.runtime.launch.workers import Workers
from runtime.distributed import local_grads

MODELS = {"mixtral": tiny.mixtral, "tied": lambda: tiny.llama(tie_word_embeddings=True)}


def step(name: str, state: Any, inputs: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = MODELS[name]()
    model.load_state_dict(state)
    pipe = Pipeline(model, schedule="zbv", microbatches=3)
    return pipe.step(inputs).loss, local_grads(pipe)


@pytest.fixture
def by_value() -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(tiny)


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_whole_model(workers: Workers, name: str) -> None:
    model, inputs = MODELS[name](), batch()
    wanted = by_whole(model, inputs, 3)
    found = workers.run(step, (name, model.state_dict(), inputs), ranks=2)
    seen = set()
    for loss, grads in found:
        torch.testing.assert_close(loss, wanted.loss, rtol=1e-6, atol=0)
        for each, grad in grads.items():
            whole = wanted.grads.get(each, wanted.grads["model.embed_tokens.weight"])  # the head's, where it is tied
            torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-7)
            seen.add(each)
    assert seen >= wanted.grads.keys()


def saved_and_loaded(folder: str, file: str, inputs: Any) -> Any:
    """A step from the file, saved; and a step of what is loaded from that."""
    torch.set_num_threads(1)

    def build() -> Pipeline:
        with torch.device("meta"):
            model = tiny.llama()
        tables = Initial(seed=0, init=lambda name, module: model._init_weights(module))
        return Pipeline(model, schedule="1f1b", microbatches=3, weights=(Safetensors(file, strict=False), tables))

    pipe, again = build(), build()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    first = pipe.step(inputs).loss
    optimizer.step()
    optimizer.zero_grad()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(pipe, optimizer, step=1)
        checkpoints.load_latest(again)
    return first, pipe.step(inputs).loss, again.step(inputs).loss


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_weights_from_a_file_of_transformers_and_checkpoints(workers: Workers, tmp_path: Path) -> None:
    """Each rank reads its own layers of what `save_pretrained` wrote; rotary tables, which are in no file, are made anew."""
    model, inputs = tiny.llama(), batch()
    model.save_pretrained(tmp_path / "pretrained")
    found = workers.run(saved_and_loaded, (str(tmp_path / "run"), str(tmp_path / "pretrained"), inputs), ranks=2)
    for first, second, loaded in found:
        assert torch.equal(first, by_whole(model, inputs, 3).loss)
        assert torch.equal(second, loaded)
        assert second < first


def spread_over_ranks(folder: str, file: str, inputs: Any) -> Any:
    """A step whose tied vocabulary is spread over two ranks, saved and loaded again; each rank reads its rows of the file."""
    torch.set_num_threads(1)
    schedule = ps.spread_vocabulary(ps.schedule("1f1b", ranks=2, microbatches=3))

    def build() -> Pipeline:
        with torch.device("meta"):
            model = MODELS["tied"]()
        tables = Initial(seed=0, init=lambda name, module: model._init_weights(module))
        return Pipeline(model, schedule, weights=(Safetensors(file, strict=False), tables))

    pipe, again = build(), build()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    first, gradients = pipe.step(inputs).loss, {name: value.grad.clone() for name, value in pipe.named_parameters()}
    optimizer.step()
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(pipe, optimizer, step=1)
        checkpoints.load_latest(again)
    return first, gradients, pipe.eval_step(inputs).loss, again.eval_step(inputs).loss


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_a_vocabulary_that_is_spread_over_the_ranks(workers: Workers, tmp_path: Path) -> None:
    model, inputs = MODELS["tied"](), batch()
    model.save_pretrained(tmp_path / "pretrained")
    found = workers.run(spread_over_ranks, (str(tmp_path / "run"), str(tmp_path / "pretrained"), inputs), ranks=2)
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    wanted, counts = dict(model.named_parameters()), dict.fromkeys(dict(model.named_parameters()), 0)
    for first, gradients, second, loaded in found:
        torch.testing.assert_close(first, loss.detach(), rtol=1e-6, atol=0)
        assert second < first
        assert torch.equal(second, loaded)
        for key, gradient in gradients.items():
            name, _, rows = key.partition("[")
            own = slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)
            torch.testing.assert_close(gradient, wanted[name].grad[own], rtol=1e-5, atol=1e-7)
            counts[name] += gradient.numel()
    assert counts == {name: parameter.numel() for name, parameter in wanted.items()}
