"""Models of transformers' whose vocabulary is spread over ranks: the numbers of the plain loop, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    Qwen2Config,
)

import penstock as ps
from models.tiny import COMMON, DEPTH, batch, gpt2, llama, mixtral, nanochat, qwen
from penstock.errors import PenstockError, PlacementError, ScheduleError
from penstock.runtime import Checkpoints, HuggingFace, Pipeline, TokenCrossEntropy, launch
from penstock.runtime.batch.loss import LogitMap
from penstock.runtime.model.hugging_face import ModelEnds

WIDE = COMMON | {"head_dim": 8}


def spread(name: str = "1f1b", ranks: int = 2, microbatches: int = 3, **options: Any) -> ps.Schedule:
    return ps.spread_vocabulary(ps.schedule(name, ranks=ranks, microbatches=microbatches), vocabulary=ps.Vocabulary(**options))


def build(make: Callable[..., Any], **options: Any) -> Any:
    """A model in float64, with logits large enough to matter to soft caps."""
    torch.manual_seed(0)
    model = make(**options).double().train()
    model.get_output_embeddings().weight.data.mul_(50)
    return model


def from_config(kind: type, **special: Any) -> Callable[..., Any]:
    return lambda **options: AutoModelForCausalLM.from_config(kind(**WIDE | special | options))


MODELS: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "qwen2": from_config(Qwen2Config),
    "qwen3": qwen,
    "gemma": from_config(GemmaConfig),
    "gemma2": from_config(Gemma2Config, final_logit_softcapping=2.0),
    "gemma3": from_config(Gemma3TextConfig),
    "gpt2": gpt2,
    "granite": from_config(GraniteConfig, logits_scaling=3.0, embedding_multiplier=2.5),
    "cohere2": from_config(Cohere2Config),
    "nanochat": nanochat,
}


def run_plain_loop(model: nn.Module, inputs: dict[str, Tensor], microbatches: int) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """The loss in float64, which the models' own function is not, the logits, and the gradients."""
    model = copy.deepcopy(model)
    total, logits = torch.zeros((), dtype=torch.float64), []
    for k in range(microbatches):
        piece = {name: value.tensor_split(microbatches)[k] for name, value in inputs.items() if name != "labels"}
        labels = inputs["labels"].tensor_split(microbatches)[k]
        logits.append(model(**piece, use_cache=False).logits)
        total = total + functional.cross_entropy(logits[-1][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    total = total / (inputs["labels"][:, 1:] != -100).sum()
    total.backward()
    return total.detach(), torch.cat(logits).detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def compare(model: Any, inputs: dict[str, Tensor], plan: ps.Schedule | ps.Plan, *, factor: float = 1.0, **options: Any) -> None:
    """Loss, evaluation, logits and gradients of a pipeline equal those of the plain loop, and every element is on one rank."""
    schedule, model = plan if isinstance(plan, ps.Schedule) else plan.schedule, copy.deepcopy(model)

    def run() -> Any:
        pipe = Pipeline(model, plan, **options)
        result = pipe.step(inputs, outputs=True)
        evaluated = pipe.eval_step(inputs)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        return SimpleNamespace(loss=result.loss, evaluated=evaluated.loss, logits=result.outputs, gradients=gradients)

    wanted, logits, gradients = run_plain_loop(model, {k: v for k, v in inputs.items() if v.dim()}, schedule.microbatches)
    counts = dict.fromkeys(gradients, 0)
    for of_rank in launch(run, schedule.ranks):
        assert_equal(of_rank.loss, wanted * factor)
        assert_equal(of_rank.evaluated, wanted * factor)
        assert_equal(of_rank.logits, logits)
        for key, gradient in of_rank.gradients.items():
            name, _, rows = key.partition("[")
            whole = gradients[name]
            assert whole is not None
            assert_equal(gradient, factor * whole[slice(*map(int, rows[:-1].split(":"))) if rows else slice(None)])
            counts[name] += gradient.numel()
    assert counts == {name: parameter.numel() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [*MODELS, "gemma2 apart"])
def test_it_trains_like_the_plain_loop(name: str) -> None:
    """Scaled embeddings, factors and soft caps of logits, padding and ignored labels included; half of the models have tied ends."""
    tied = name in ("qwen3", "gemma", "gemma2", "gemma3", "gpt2", "cohere2")
    model = build(MODELS[name.removesuffix(" apart")], tie_word_embeddings=tied)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    compare(model, batch(), spread("1f1b" if tied else "zbv"))


@pytest.mark.parametrize("options", [{"embedding": False}, {"head": False}])
def test_one_end_may_stay_in_its_stage(options: dict[str, bool]) -> None:
    model, inputs, schedule = build(MODELS["gemma2"], tie_word_embeddings=False), batch(), spread(**options)
    if options == {"embedding": False}:
        compare(model, inputs, schedule)
        return
    wanted, _, gradients = run_plain_loop(model, inputs, 3)  # the own loss of the model, which is in float32

    def run() -> Any:
        pipe = Pipeline(model, schedule)
        return pipe.step(inputs).loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}

    for loss, of_rank in launch(run, 2):
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=0)
        for key, gradient in of_rank.items():
            if key.endswith("]"):
                name, rows = key[:-1].split("[")
                torch.testing.assert_close(gradient, gradients[name][slice(*map(int, rows.split(":")))], rtol=1e-4, atol=1e-7)  # type: ignore[index]


def test_the_model_s_own_loss_is_the_same_number() -> None:
    model, inputs = build(llama), batch()
    losses = launch(lambda: Pipeline(model, spread(microbatches=1)).step(inputs).loss, 2)
    torch.testing.assert_close(losses[0].float(), model(**inputs, use_cache=False).loss.detach(), rtol=1e-6, atol=0)


def test_a_microbatch_without_labels_and_the_number_of_items() -> None:
    inputs = batch()
    inputs["labels"][2:4] = -100
    compare(build(llama), inputs, spread("zb-h1"))
    count = int((inputs["labels"][:, 1:] != -100).sum())
    compare(build(llama), inputs | {"num_items_in_batch": torch.tensor(2 * count)}, spread(), factor=0.5)


def test_routers_are_balanced_with_the_rest_of_the_model() -> None:
    """Their loss is added to the side of a head that is not in its stage."""
    model, inputs = build(mixtral).float(), batch()
    losses = launch(lambda: [Pipeline(model, table).step(inputs).loss for table in (spread(), ps.schedule("1f1b", 2, 3))], 2)
    for found, wanted in losses:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_sizes_and_plans_count_the_ends() -> None:
    model, inputs = build(llama), batch()
    compare(model, inputs, spread(), split=HuggingFace(sizes=[4, 2]))
    profile = ps.Profile.transformer(layers=DEPTH, hidden=512, heads=4, sequence=512, vocabulary=262144, flops=400e12, latency=1e-5)
    plan = ps.plan(profile, ranks=2, microbatches=3, seconds=0, schedules=["1f1b"], vocabulary=True)
    assert plan.vocabulary
    assert sum(plan.partition) == DEPTH + 2
    compare(model, inputs, plan)
    names = [[name for name, _ in ModelEnds.find(model, HuggingFace(), embedding=True, head=True).list_layers()][k] for k in (0, -1)]
    assert names == ["model.embed_tokens", "lm_head"]
    cut = ModelEnds.find(model, HuggingFace(sizes=[4, 2]), embedding=True, head=True).cut(model, 2)
    layers = [f"model.layers.{number}" for number in range(DEPTH)]
    assert [part.layers for part in cut.parts if part is not None] == [
        (layers[0], "model.rotary_emb", *layers[1:3]),
        (layers[3], "model.rotary_emb", "model.norm"),
    ]
    with pytest.raises(PlacementError, match=r"stages have \[5, 1\] units, embedding and head included: one has no layer"):
        ModelEnds.find(model, HuggingFace(sizes=[5, 1]), embedding=True, head=True).cut(model, 2)


def test_random_numbers_do_not_depend_on_the_spread() -> None:
    """Dropout with a seed, at the embeddings too."""
    model = build(gpt2, embd_pdrop=0.3, resid_pdrop=0.3)
    tables = spread("zbv"), ps.schedule("1f1b", 2, 3), spread()
    for first, *others in launch(lambda: [Pipeline(model, table, seed=3).step(batch()).loss for table in tables], 2):
        for loss in others:
            torch.testing.assert_close(loss.double(), first.double(), rtol=1e-6, atol=0)


def test_recomputed_stages_and_parity() -> None:
    model = build(MODELS["gemma2"]).float()

    def run() -> float:
        return Pipeline(model, spread("zbv"), recompute=True).parity(batch()).loop.worst

    assert max(launch(run, 2)) < 1e-5


def test_a_checkpoint_has_the_names_of_the_model(tmp_path: Path) -> None:
    """Saved by two ranks after a step, loaded by the model itself and by a pipeline that spreads nothing."""
    model, inputs = build(MODELS["gemma"]), batch()

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), spread())
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(inputs)
        optimizer.step()
        Checkpoints(tmp_path).save(pipe, optimizer, step=1)

    launch(train, 2)
    _, _, gradients = run_plain_loop(model, inputs, 3)
    plain = build(MODELS["gemma"])
    Checkpoints(tmp_path).load_latest(plain)
    for name, parameter in plain.named_parameters():
        assert_equal(parameter.detach(), model.get_parameter(name).detach() - 0.1 * gradients[name])  # type: ignore[operator]
    assert plain.lm_head.weight is plain.model.embed_tokens.weight

    def go_on() -> Tensor | None:
        pipe = Pipeline(build(MODELS["gemma"]), schedule="1f1b", microbatches=3)
        Checkpoints(tmp_path).load_latest(pipe)
        return pipe.eval_step(inputs).loss

    for loss in launch(go_on, 2):
        torch.testing.assert_close(loss, plain(**inputs, use_cache=False).loss.detach(), rtol=1e-6, atol=0)


def test_targets_that_are_shifted_already() -> None:
    """With a loss function that is given, labels are targets as for any other model."""
    model, inputs = build(llama), batch()
    labels = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    options: dict[str, Any] = {"loss_fn": TokenCrossEntropy(), "weight": lambda target: (target != -100).sum()}
    tokens = {name: value for name, value in inputs.items() if name != "labels"}
    wanted, _, _ = run_plain_loop(model, inputs, 3)
    for loss in launch(lambda: Pipeline(model, spread(), **options).step(tokens, target=labels).loss, 2):
        assert_equal(loss, wanted)


# Refusals -------------------------------------------------------------------------------------------------------------


def find(model: Any) -> ModelEnds:
    return ModelEnds.find(model, HuggingFace(), embedding=True, head=True)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", LogitMap()),
        ("gemma2", LogitMap(cap=2.0)),
        ("granite", LogitMap(scale=1 / 3)),
        ("cohere2", LogitMap(scale=0.0625)),
        ("nanochat", LogitMap(cap=15.0)),
    ],
)
def test_what_a_model_makes_of_its_logits_is_found(name: str, wanted: LogitMap) -> None:
    found = find(build(MODELS[name])).logits
    assert found.cap == wanted.cap
    assert found.scale == pytest.approx(wanted.scale, rel=1e-15)


def test_other_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(MODELS["gemma2"])
    inner = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inner(self, *args, **kwargs)
        output.logits = output.logits**3
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(PlacementError, match=r"makes its logits from the output of lm_head in a way .*final_logit_softcapping"):
        find(model)


class Shifted(nn.Embedding):
    """Looks up other tokens than it is given."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward((tokens + 1) % 3) * 2


class ByHand(nn.Embedding):
    """Does not look up its rows by nn.Embedding."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * functional.embedding(tokens, self.weight)


@pytest.mark.parametrize("kind", [Shifted, ByHand])
def test_embeddings_that_do_more_are_refused(kind: type[nn.Embedding]) -> None:
    model = build(llama)
    model.model.embed_tokens = kind(29, 16).double()
    with pytest.raises(PlacementError, match=f"'model.embed_tokens' is a {kind.__name__}, whose forward does more than to change the rows"):
        find(model)


def test_a_model_that_changes_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(llama)
    inner = type(model.model).forward

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return inner(self, input_ids=None if input_ids is None else input_ids.flip(1), **kwargs)

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(PlacementError, match="was tried in stages, and with input_ids they give another output than the whole model"):
        find(model).cut(model, 2)


def adapted() -> Any:
    model = build(llama)
    model.lm_head = nn.utils.parametrizations.weight_norm(model.lm_head)
    return model


def hooked() -> Any:
    model = build(llama)
    model.model.embed_tokens.register_forward_hook(lambda *_: None)
    return model


def tied_elsewhere() -> Any:
    model = build(llama, vocab_size=24)
    model.model.layers[1].mlp.up_proj.weight = model.lm_head.weight
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (adapted, "hooks or parametrizations"),
        (hooked, "'model.embed_tokens' has hooks"),
        (tied_elsewhere, "'lm_head' shares its weight with 'model.layers.1', which is in a stage"),
        (lambda: build(llama, num_hidden_layers=1), "too few for 2 stages"),
    ],
)
def test_ends_that_cannot_be_spread_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        Pipeline(make(), spread("interleaved-1f1b", 1, 2))


def test_another_loss_is_refused() -> None:
    model = build(llama)
    model.loss_function = lambda logits, labels, vocab_size: logits.float().square().mean()
    with pytest.raises(ScheduleError, match="the head is spread over the ranks, which compute the loss together"):
        launch(lambda: Pipeline(model, spread()), 2)


def test_batches_that_need_more_of_the_embedding_are_refused() -> None:
    """Token types, which GPT-2 looks up in the same table, and embeddings in place of tokens."""
    inputs = batch()

    def run() -> list[str]:
        pipe, told = Pipeline(build(gpt2), spread(), deadline=60), []
        types = inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}
        floats = {"inputs_embeds": torch.zeros(6, 7, 16, dtype=torch.float64), "labels": inputs["labels"]}
        for other in (types, floats):
            with pytest.raises(PenstockError) as caught:
                pipe.step(other)
            told.append(str(caught.value))
        assert_equal(pipe.step(inputs).loss, run_plain_loop(build(gpt2), inputs, 3)[0])
        return told

    for types, floats in launch(run, 2):
        assert "looks up more in its embedding than input_ids" in types
        assert "give every rank the tokens" in floats
