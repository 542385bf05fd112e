"""Weights of models whose vocabulary is spread over ranks: each rank has values of its own rows only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GemmaConfig

from models.tiny import COMMON, batch, llama
from penstock.errors import WeightsError
from penstock.runtime import Built, Initial, Pipeline, Replayed, Safetensors, TokenCrossEntropy, launch
from penstock.runtime.weights.safetensors import SafetensorsFile
from penstock.runtime.weights.source import OwnedTensors
from runtime.spread_models import HIDDEN, VOCABULARY, assert_equal, build_model, draw_batch, plan_for_cluster, spread

BLOCKS = 2


def build(*, tied: bool = False) -> nn.Sequential:
    model = build_model(BLOCKS, bias=True)
    if tied:
        model[-1].weight = model[0].weight
    return model


def build_on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def list_values(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in pipe.local_parameters()}


def compare(found: list[dict[str, Tensor]], wanted: nn.Module) -> None:
    """The values are those of the whole model, and the ranks have every element once."""
    counts = dict.fromkeys(dict(wanted.named_parameters()), 0)
    for values in found:
        for key, value in values.items():
            name, _, rows = key.partition("[")
            own = slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)
            assert torch.equal(value, wanted.get_parameter(name)[own])
            assert value.untyped_storage().nbytes() == value.nbytes
            counts[name] += value.numel()
    assert counts == {name: parameter.numel() for name, parameter in wanted.named_parameters()}


def fill_by_hand(model: OwnedTensors) -> None:
    """A source that knows of no rows."""
    with torch.no_grad():
        for name, tensor in model.list_tensors():
            if id(tensor) in model.idents and tensor.is_meta:
                value = nn.Parameter(torch.full(tensor.shape, float(len(name)), dtype=tensor.dtype))
                torch.utils.swap_tensors(tensor, value)


BUILDERS = {
    "0": lambda: nn.Embedding(VOCABULARY, HIDDEN),
    **{str(k): lambda: nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for k in range(1, BLOCKS + 1)},
    str(BLOCKS + 1): lambda: nn.Linear(HIDDEN, VOCABULARY),
}
SOURCES = {"initial": Initial(seed=3), "built": Built(BUILDERS, seed=3), "replayed": Replayed(build, seed=3), "by hand": fill_by_hand}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_rows_have_the_values_of_the_whole_model(name: str, tied: bool) -> None:
    """Sources that draw whole tensors; nothing of these is left."""
    source = Replayed(lambda: build(tied=tied), seed=3) if name == "replayed" else SOURCES[name]

    def run() -> dict[str, Tensor]:
        model = build_on_meta(lambda: build(tied=tied))
        pipe = Pipeline(model, spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy(), weights=source)
        assert all(model.get_parameter(name).is_meta for name in ("0.weight", f"{BLOCKS + 1}.weight", f"{BLOCKS + 1}.bias"))
        return list_values(pipe)

    wanted = build_on_meta(lambda: build(tied=tied))
    source(OwnedTensors.of(wanted) if name == "by hand" else wanted)
    compare(launch(run, 2), wanted)


def test_shares_of_different_size_are_read_from_files(tmp_path: Path) -> None:
    wanted = build_model(4, bias=True)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    plan = plan_for_cluster(0, 1, shares=(0.25, 0.75))

    def run() -> dict[str, Tensor]:
        model = build_on_meta(lambda: build_model(4, bias=True))
        return list_values(Pipeline(model, plan, loss_fn=TokenCrossEntropy(), weights=Safetensors(tmp_path)))

    found = launch(run, 2)
    compare(found, wanted)
    assert [len(values[next(name for name in values if name.startswith("0.weight"))]) for values in found] == [3, 8]


def test_a_model_that_has_values_gets_others() -> None:
    """As without a spread vocabulary: a source replaces values that are there, and its rows are taken anew."""
    wanted = build()
    Initial(seed=5)(wanted)
    found = launch(lambda: list_values(Pipeline(build(), spread("zbv", 1, 4), loss_fn=TokenCrossEntropy(), weights=Initial(seed=5))), 1)
    compare(found, wanted)


def gemma(**options: Any) -> Any:
    return AutoModelForCausalLM.from_config(GemmaConfig(**COMMON | {"head_dim": 8} | options))


@pytest.mark.parametrize(("make", "tied"), [(gemma, True), (llama, False)])
def test_each_rank_reads_its_rows_of_files(make: Callable[..., Any], tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a transformers model, in several parts; its tables and scale come from its own initialisation."""
    torch.manual_seed(0)
    plain = make(tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path, max_shard_size=4000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with torch.no_grad():
        wanted = plain(**batch(), use_cache=False).loss
    names: list[str] = []
    read = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name: names.append(name) or read(self, name))

    def run() -> dict[str, Tensor]:
        model = build_on_meta(lambda: make(tie_word_embeddings=tied))
        tables = Initial(seed=0, init=lambda name, module: model._init_weights(module))
        pipe = Pipeline(model, spread("1f1b", 3, 3), weights=(Safetensors(tmp_path, strict=False), tables))
        assert model.get_input_embeddings().weight.is_meta
        assert model.get_output_embeddings().weight.is_meta
        values = {name: value.clone() for name, value in list_values(pipe).items()}
        torch.testing.assert_close(pipe.eval_step(batch()).loss, wanted, rtol=1e-6, atol=0)
        pipe.step(batch())
        return values

    compare(launch(run, 3), plain)
    assert names.count("model.embed_tokens.weight") == 3
    assert names.count("model.layers.0.mlp.up_proj.weight") == 1


def test_training_after_weights_were_given() -> None:
    tokens, targets = draw_batch()
    plain = build(tied=True)
    Initial(seed=4)(plain)
    loss = TokenCrossEntropy()(plain(tokens), targets)
    loss.backward()

    def run() -> tuple[Tensor | None, dict[str, Tensor | None]]:
        model = build_on_meta(lambda: build(tied=True))
        pipe = Pipeline(model, spread("zbv", 1, 3), loss_fn=TokenCrossEntropy(), weights=Initial(seed=4))
        return pipe.step(tokens, target=targets).loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}

    for found, gradients in launch(run, 1):
        assert found is not None
        assert_equal(found, loss)
        gradient, whole = gradients[f"0.weight[0:{VOCABULARY}]"], plain.get_parameter("0.weight").grad
        assert gradient is not None
        assert whole is not None
        assert_equal(gradient, whole)


@pytest.mark.parametrize("weights", [None, Built({name: make for name, make in BUILDERS.items() if name != "0"}, seed=0)])
def test_rows_without_values_are_told(weights: Any) -> None:
    model = build_on_meta(build)
    with pytest.raises(WeightsError, match=r"0\.weight.* of this rank's stages is on the meta device and has no values"):
        Pipeline(model, spread("zbv", 1, 4), loss_fn=TokenCrossEntropy(), weights=weights)


def test_files_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    llama(vocab_size=31).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"has .* with shape \[31, 16\], but the model's has \[29, 16\]"):
        Pipeline(build_on_meta(llama), spread("zbv", 1, 4), weights=Safetensors(tmp_path, strict=False))
