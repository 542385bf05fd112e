"""`PipelineTrainer` against Hugging Face's plain `Trainer`: the same losses, norms, metrics and checkpoints, to rounding."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

import penstock as ps
from penstock.errors import IntegrationError
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)
CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
LENGTH, STEPS = 12, 25


class Tokens(torch.utils.data.Dataset):
    """Sequences that count upwards; each with another number of labels that count."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = (torch.randint(0, 64, (rows, 1), generator=generator) + torch.arange(LENGTH)) % 64
        self.lengths = torch.randint(3, LENGTH + 1, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(LENGTH) < self.lengths[row]).long()
        return {"input_ids": self.tokens[row], "attention_mask": mask, "labels": self.tokens[row].masked_fill(mask == 0, -100)}


def build() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends training after some steps, as if it had been interrupted."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self.step
        return control


def arguments(folder: str, batch: int, **more: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "save_strategy": "no",
        "seed": 7,
    }
    return TrainingArguments(folder, **{**options, **more})


def history(trainer: Any) -> list[tuple[float, float, float]]:
    """Loss, norm and learning rate of each step."""
    return [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history if "loss" in log]


def forget() -> None:
    """Let the next run of this process begin with other settings."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run(kind: str, folder: str, batch: int, options: dict[str, Any], pipeline: dict[str, Any], then: Any = None) -> Any:
    """Train on each rank, plainly or on a pipeline."""
    torch.set_num_threads(1)
    from penstock.integrations.transformers import PipelineTrainer

    forget()
    try:
        resume, stop, evaluates = options.pop("resume", None), options.pop("stop", None), options.pop("evaluates", False)
        model = (options.pop("build", None) or build)()
        shared = {"train_dataset": Tokens(64), "eval_dataset": Tokens(22), "callbacks": [Stop(stop)] if stop else None}
        args = arguments(folder, batch, **options)
        trainer = Trainer(model, args, **shared) if kind == "plain" else PipelineTrainer(model, args, **shared, **pipeline)
        trainer.train(resume_from_checkpoint=resume)
        metrics = trainer.evaluate() if evaluates else None
        return history(trainer), metrics, None if then is None else then(trainer)
    finally:
        forget()


TWO_BY_TWO = {"plan_or_schedule": ps.schedule("zb-h1", ranks=2, microbatches=4)}
"""Two pipelines of two ranks on four processes."""
SLICED = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=2)


def assert_same_history(one: Any, other: Any, rtol: float = 2e-4) -> None:
    assert len(one) == len(other)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=1e-6)


def use_whole_model(trainer: Any) -> Any:
    """Use the model as a whole: what was said before it was gathered, and what it holds and generates afterwards."""
    prompt, folder = torch.arange(4)[None], trainer.args.output_dir
    messages = []
    for use in (lambda model: model.generate(prompt), lambda model: model.save_pretrained(folder), lambda model: model(prompt)):
        try:
            use(trainer.model)
        except IntegrationError as error:
            messages.append(str(error))
    model = trainer.gather_model() if hasattr(trainer, "gather_model") else trainer.model
    model.eval()
    return messages, model.generate(prompt, max_new_tokens=4, do_sample=False).tolist(), model.state_dict()


def test_steps_are_those_of_the_plain_trainer(workers: Workers, tmp_path: Path) -> None:
    """With accumulation that the batches of an epoch do not fill, clipping, warm-up and labels of different numbers, on two data ranks of
    two stages each. Afterwards the trained model can be used as a whole on every rank, once it is gathered."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}, use_whole_model), ranks=1)[0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO, use_whole_model), ranks=4)
    assert len(plain[0]) == STEPS
    assert plain[0][-1][0] < plain[0][0][0] - 1
    worst = max(abs(one[0] / other[0] - 1) for steps, *_ in piped for one, other in zip(steps, plain[0], strict=True))
    logger.info("largest relative difference of a loss over %d steps: %.1e", STEPS, worst)
    for steps, _, (messages, tokens, state) in piped:
        assert_same_history(steps, plain[0])
        assert ["trainer.gather_model()" in sentence for sentence in messages] == [True] * 3
        assert tokens == plain[2][1]
        for name, value in plain[2][2].items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-3, msg=name)
    assert plain[2][0] == []


def predict(trainer: Any) -> Any:
    """Predictions for rows that fill no batch, and the metrics of a function of logits and labels."""
    trainer.compute_metrics = lambda seen: {"right": float((seen.predictions[:, :-1].argmax(-1) == seen.label_ids[:, 1:]).mean())}
    output = trainer.predict(Tokens(7))
    tokens, operations = trainer.state.num_input_tokens_seen, trainer.state.total_flos
    return output.predictions, output.label_ids, (output.metrics["test_right"], output.metrics["test_loss"], tokens, operations)


def test_evaluation_and_prediction_are_those_of_the_plain_trainer(workers: Workers, tmp_path: Path) -> None:
    """22 rows fill no whole number of batches: the trainer drops what it had repeated."""
    options = {"max_steps": 3, "evaluates": True, "include_num_input_tokens_seen": "all"}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 4, options, {}, predict), ranks=2)[0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO, predict), ranks=4)
    for _, metrics, (logits, labels, others) in piped:
        assert metrics["eval_loss"] == pytest.approx(plain[1]["eval_loss"], rel=1e-5)
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(plain[2][0]), rtol=1e-3, atol=1e-4)
        assert (labels == plain[2][1]).all()
        assert others == pytest.approx(plain[2][2], rel=1e-4)
        assert others[2] == 3 * 8 * LENGTH


def save(trainer: Any) -> str:
    trainer.save_model()
    return str(trainer.args.output_dir)


class FakeHub:
    """A folder in place of the hub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path: str, ignore_patterns: Any = (), run_as_future: bool = False, **_: Any) -> Any:
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns), dirs_exist_ok=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None


def run_with_hub(hub: str, *arguments: Any) -> Any:
    """`run`, whose trainer pushes into a folder; returns the files that were there when training had ended, too."""
    import transformers.trainer

    before = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: FakeHub(Path(hub))
    try:
        return run(*arguments)
    finally:
        transformers.trainer.hf_api = before


def test_resumed_from_the_plain_trainer_and_with_other_ranks_and_pushed(workers: Workers, tmp_path: Path) -> None:
    """Begun by the plain trainer, continued on 2 x 2 processes and then on one pipeline of three; what is pushed is the plain model."""
    saving = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, saving, {}, save), ranks=1)[0]
    folder, hub = tmp_path / "pipe", tmp_path / "hub"
    begun = {**saving, "stop": 8, "resume": str(tmp_path / "plain" / "checkpoint-4")}
    workers.run(run, ("pipe", str(folder), 4, begun, TWO_BY_TWO), ranks=4)
    three = {"plan_or_schedule": "1f1b", "microbatches": 4}
    pushing = {**saving, "resume": str(folder / "checkpoint-8"), "push_to_hub": True}
    resumed = workers.run(run_with_hub, (str(hub), "pipe", str(folder), 8, pushing, three, save), ranks=3)
    for steps, *_ in resumed:
        assert_same_history(steps, plain[0])
    whole, cut, pushed = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (plain[2], folder, hub))
    assert whole.keys() == cut.keys() == pushed.keys()
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-3, atol=1e-4)
        assert torch.equal(pushed[name], cut[name])
    assert (hub / "README.md").exists()


def build_tied() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True}))


def test_best_model_with_tied_embeddings_and_shards(workers: Workers, tmp_path: Path) -> None:
    """Of three checkpoints the one with the highest loss is loaded at the end, which is the first. Embeddings are tied over two ranks."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {"max_steps": 6, "build": build_tied, **saving, **best}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}, save), ranks=1)[0]
    sharded = {**TWO_BY_TWO, "pipeline_options": {"shard": True}}
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, sharded, save), ranks=4)
    assert_same_history(piped[0][0], plain[0])
    first, whole, cut = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "pipe" / "checkpoint-2", plain[2], piped[0][2]))
    assert cut.lm_head.weight is cut.model.embed_tokens.weight
    for (name, value), saved, wanted in zip(cut.named_parameters(), first.parameters(), whole.parameters(), strict=True):
        assert torch.equal(value, saved), name
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4, msg=name)


def build_lora() -> Any:
    """Adapters in the first layers alone, so that the last rank has nothing to train."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 1], init_lora_weights=False
    )
    return get_peft_model(base, config)


def test_lora_is_resumed(workers: Workers, tmp_path: Path) -> None:
    """Begun on 2 x 2 processes and continued on two."""
    options = {"max_steps": 8, "build": build_lora}
    saving = {**options, "save_strategy": "steps", "save_steps": 4}
    folder = tmp_path / "pipe"
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}, save), ranks=1)[0]
    workers.run(run, ("pipe", str(folder), 4, {**saving, "stop": 4}, TWO_BY_TWO), ranks=4)
    two = {"plan_or_schedule": "1f1b", "microbatches": 4}
    resumed = workers.run(run, ("pipe", str(folder), 8, {**saving, "resume": str(folder / "checkpoint-4")}, two, save), ranks=2)
    for steps, *_ in resumed:
        assert_same_history(steps, plain[0])
    whole, cut = (PeftModel.from_pretrained(build(), path).state_dict() for path in (plain[2], folder))
    adapters = [name for name in whole if "lora" in name]
    assert len(adapters) == 8
    for name in adapters:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-3, atol=1e-5)


def test_mixed_precision(workers: Workers, tmp_path: Path) -> None:
    """bfloat16 rounds differently for other shapes, so that the losses agree to its digits only, and differ from those of float32."""
    options = {"max_steps": 6, "bf16": True}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}), ranks=1)[0][0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO), ranks=4)[0][0]
    exact = workers.run(run, ("plain", str(tmp_path / "exact"), 8, {"max_steps": 1}, {}), ranks=1)[0][0]
    assert_same_history(piped, plain, rtol=2e-2)
    assert abs(piped[0][1] - exact[0][1]) > 1e-4


class Noise(TrainerCallback):  # type: ignore[misc]
    """Notes the largest difference that the embedding's output has from its weights, on the rank that embeds."""

    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        def note(module: Any, inputs: Any, output: torch.Tensor) -> None:
            self.largest.append(float((output - module.weight[inputs[0]]).abs().max()))

        model.get_input_embeddings().register_forward_hook(note)


def add_noise(folder: str, alpha: float | None) -> Any:
    """Losses of two steps that change nothing, the loss of an evaluation, and the noise."""
    from penstock.integrations.transformers import PipelineTrainer

    torch.set_num_threads(1)
    forget()
    try:
        noise, args = Noise(), arguments(folder, 8, max_steps=2, learning_rate=0.0, neftune_noise_alpha=alpha)
        shared = {"train_dataset": Tokens(16), "eval_dataset": Tokens(8), "callbacks": [noise]}
        trainer = PipelineTrainer(build(), args, **shared, plan_or_schedule="1f1b", microbatches=2)
        trainer.train()
        return [loss for loss, *_ in history(trainer)], trainer.evaluate()["eval_loss"], noise.largest
    finally:
        forget()


def test_noise_on_embeddings_is_that_of_neftune(workers: Workers, tmp_path: Path) -> None:
    """Uniform up to alpha / sqrt(length x width), other for each microbatch, and none in evaluation."""
    quiet, loud = (workers.run(add_noise, (str(tmp_path), alpha), ranks=2) for alpha in (None, 5.0))
    limit = 5.0 / (LENGTH * CONFIG.hidden_size) ** 0.5
    trained, evaluated = loud[0][2][:4], loud[0][2][4:]
    assert all(0.95 * limit < largest <= limit * (1 + 1e-5) for largest in trained)
    assert len(set(trained)) == 4
    assert set(evaluated) == {0.0}
    assert quiet[0][2] == [0.0] * len(loud[0][2])
    assert loud[1][2] == []
    assert loud[0][1] == quiet[0][1]
    assert all(abs(one - other) > 1e-4 for one, other in zip(loud[0][0], quiet[0][0], strict=True))


class OwnLoss(Trainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class OwnStep(Trainer):  # type: ignore[misc]
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


def make_trainer(kind: str) -> Any:
    """A trainer with a loss, a step or an optimizer of its own, in front of the mixin or behind it."""
    from penstock.integrations.transformers import PipelineMixin, PipelineTrainer

    class LossInFront(PipelineTrainer):
        compute_loss = OwnLoss.compute_loss

    class StepInFront(PipelineTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    class OptimizerInFront(PipelineTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    class LossBehind(PipelineMixin, OwnLoss):
        pass

    class StepBehind(PipelineMixin, OwnStep):
        pass

    kinds = (PipelineTrainer, LossInFront, StepInFront, OptimizerInFront, LossBehind, StepBehind)
    return next(one for one in kinds if one.__name__ == kind)


def refusals(folder: str, cases: list[tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any]]]) -> list[str]:
    """What each trainer says instead of training."""
    messages = []
    for kind, options, positional, named in cases:
        forget()
        args = arguments(folder, 4, max_steps=1, **options)
        model = None if build in positional else build()
        try:
            make_trainer(kind)(model, args, None, Tokens(8), *positional, **named).train()
            messages.append("trained")
        except IntegrationError as error:
            messages.append(str(error))
        finally:
            forget()
    return messages


SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
REFUSALS: list[tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any], str]] = [
    (
        "PipelineTrainer",
        {"optim": "galore_adamw", "optim_target_modules": ["q_proj"]},
        (),
        {},
        "optim='galore_adamw' needs the whole model",
    ),
    ("PipelineTrainer", {"gradient_checkpointing": True}, (), {}, '"recompute": True'),
    ("PipelineTrainer", {"label_smoothing_factor": 0.1}, (), {}, "label_smoothing_factor=0.1 has no meaning on a pipeline"),
    ("PipelineTrainer", {"torch_compile": True}, (), {}, '"compile": True'),
    ("PipelineTrainer", {"bf16_full_eval": True}, (), {}, "bf16_full_eval=True has no meaning on a pipeline: it casts the layers of all"),
    ("PipelineTrainer", {"average_tokens_across_devices": False}, (), {}, "leave it at True"),
    ("PipelineTrainer", {}, (), {"plan_or_schedule": None}, "no schedule"),
    ("PipelineTrainer", {}, (), {"ranks": 3}, "4 processes cannot form pipelines of 3 ranks"),
    ("PipelineTrainer", {}, (), {"compute_loss_func": print}, "loss_fn"),
    ("PipelineTrainer", {}, (None, None, None, print), {}, "loss_fn"),
    ("PipelineTrainer", {}, (None, None, build), {}, "model_init= builds a new model"),
    ("PipelineTrainer", {}, (), {"optimizers": (SGD, None)}, "optimizer_cls_and_kwargs"),
    ("PipelineTrainer", {}, (None, None, None, None, None, None, (SGD, None)), {}, "optimizer_cls_and_kwargs"),
    ("PipelineTrainer", {}, (), {"optimizer_cls_and_kwargs": (torch.optim.LBFGS, {"lr": 1.0})}, "LBFGS steps by all parameters together"),
    ("PipelineTrainer", {"neftune_noise_alpha": 5.0}, (), {"plan_or_schedule": SLICED}, "a schedule without slices"),
    ("OptimizerInFront", {}, (), {}, "parameters that other ranks update"),
    ("LossInFront", {}, (), {}, "LossInFront.compute_loss is not run on a pipeline"),
    ("LossBehind", {}, (), {}, "OwnLoss.compute_loss is not run on a pipeline"),
    ("StepBehind", {}, (), {}, "OwnStep.training_step is not run on a pipeline"),
    ("StepInFront", {}, (), {}, "trained"),
]
"""Trainers with their arguments, the trainer's further arguments by position and by name, and what is said about them."""


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_meaning_on_a_pipeline_is_refused(workers: Workers, tmp_path: Path) -> None:
    cases = [(kind, options, positional, {**TWO_BY_TWO, **named}) for kind, options, positional, named, _ in REFUSALS]
    for rank, messages in enumerate(workers.run(refusals, (str(tmp_path), cases), ranks=4)):
        for sentence, (*case, reason) in zip(messages, REFUSALS, strict=True):
            assert reason in sentence, f"rank {rank}, {case}"


def resume_without_optimizer(checkpoint: str, pipeline: dict[str, Any]) -> str:
    from penstock.integrations.transformers import PipelineTrainer

    forget()
    try:
        PipelineTrainer(build(), arguments(checkpoint, 4, max_steps=4), train_dataset=Tokens(8), **pipeline).train(checkpoint)
    except IntegrationError as error:
        return str(error)
    finally:
        forget()
    return "trained"


def test_a_checkpoint_without_an_optimizer_is_refused(workers: Workers, tmp_path: Path) -> None:
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    workers.run(run, ("plain", str(tmp_path), 8, saving, {}), ranks=1)
    sharded = {"plan_or_schedule": "1f1b", "microbatches": 2, "pipeline_options": {"shard": True}}
    for pipeline, reason in (
        ({**sharded, "pipeline_options": {}}, "the optimizer and the learning rate cannot continue"),
        (sharded, "shard"),
    ):
        for message in workers.run(resume_without_optimizer, (str(tmp_path / "checkpoint-2"), pipeline), ranks=2):
            assert reason in message


def test_one_process_is_refused() -> None:
    from penstock.integrations.transformers import PipelineTrainer

    with pytest.raises(IntegrationError, match="torchrun"):
        PipelineTrainer(build(), None, plan_or_schedule="1f1b")
