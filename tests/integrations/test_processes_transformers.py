"""`PipelineTrainer` against Hugging Face's plain `Trainer`: the same losses, norms, metrics and checkpoints, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments

import penstock as ps
from penstock.errors import IntegrationError
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
LENGTH = 12


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
        "max_steps": 50,
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


def assert_same_history(one: Any, other: Any, rtol: float = 2e-4) -> None:
    assert len(one) == len(other)
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=1e-6)


def test_fifty_steps_are_those_of_the_plain_trainer(workers: Workers, tmp_path: Path) -> None:
    """With accumulation, clipping, warm-up and labels of different numbers, on two data ranks of two stages each."""
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}), ranks=1)[0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO), ranks=4)
    assert len(plain[0]) == 50
    assert plain[0][-1][0] < plain[0][0][0] - 1
    for steps, *_ in piped:
        assert_same_history(steps, plain[0])


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


def test_resumed_with_other_ranks_and_loaded_by_from_pretrained(workers: Workers, tmp_path: Path) -> None:
    """Stopped on 2 x 2 processes, continued on one pipeline of three; the plain checkpoint is the model."""
    saving = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, {"max_steps": 12}, {}, save), ranks=1)[0]
    folder = tmp_path / "pipe"
    workers.run(run, ("pipe", str(folder), 4, {**saving, "stop": 4}, TWO_BY_TWO), ranks=4)
    three = {"plan_or_schedule": "1f1b", "microbatches": 4}
    resumed = workers.run(run, ("pipe", str(folder), 8, {**saving, "resume": str(folder / "checkpoint-4")}, three, save), ranks=3)
    for steps, *_ in resumed:
        assert_same_history(steps, plain[0])
    whole, cut = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (plain[2], folder))
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-3, atol=1e-4)


def build_tied() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": True}))


def test_tied_embeddings_on_two_ranks_are_saved_under_all_their_names(workers: Workers, tmp_path: Path) -> None:
    options = {"max_steps": 4, "build": build_tied}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}, save), ranks=1)[0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO, save), ranks=4)
    assert_same_history(piped[0][0], plain[0])
    whole, cut = (AutoModelForCausalLM.from_pretrained(path) for path in (plain[2], piped[0][2]))
    assert cut.lm_head.weight is cut.model.embed_tokens.weight
    for (name, value), wanted in zip(cut.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-4, msg=name)


def build_lora() -> Any:
    """Adapters in the first layers alone, so that the last rank has nothing to train."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[0, 1], init_lora_weights=False
    )
    return get_peft_model(base, config)


def test_lora(workers: Workers, tmp_path: Path) -> None:
    options = {"max_steps": 8, "build": build_lora}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}, save), ranks=1)[0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 4, options, TWO_BY_TWO, save), ranks=4)
    for steps, *_ in piped:
        assert_same_history(steps, plain[0])
    torch.manual_seed(0)
    whole, cut = (PeftModel.from_pretrained(build(), path).state_dict() for path in (plain[2], piped[0][2]))
    adapters = [name for name in whole if "lora" in name]
    assert len(adapters) == 8
    for name in adapters:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-3, atol=1e-5)


def test_mixed_precision(workers: Workers, tmp_path: Path) -> None:
    """bfloat16 rounds differently for other shapes, so that the losses agree to its digits only, and differ from those of float32."""
    options = {"max_steps": 6, "bf16": True}
    plain = workers.run(run, ("plain", str(tmp_path / "plain"), 8, options, {}), ranks=1)[0][0]
    piped = workers.run(run, ("pipe", str(tmp_path / "pipe"), 8, options, {"plan_or_schedule": "1f1b", "microbatches": 2}), ranks=2)[0][0]
    exact = workers.run(run, ("plain", str(tmp_path / "exact"), 8, {"max_steps": 6}, {}), ranks=1)[0][0]
    assert_same_history(piped, plain, rtol=2e-2)
    assert abs(piped[0][0] - exact[0][0]) > 1e-5


def refusal(options: dict[str, Any], pipeline: dict[str, Any]) -> str:
    from penstock.integrations.transformers import PipelineTrainer

    forget()
    try:
        PipelineTrainer(build(), arguments("unused", 4, **options), train_dataset=Tokens(8), **pipeline).train()
    except IntegrationError as error:
        return str(error)
    finally:
        forget()
    return ""


@pytest.mark.parametrize(
    ("options", "pipeline", "reason"),
    [
        ({"optim": "galore_adamw", "optim_target_modules": ["q_proj"]}, {}, "optim='galore_adamw' needs the whole model"),
        ({"gradient_checkpointing": True}, {}, '"recompute": True'),
        ({"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1 has no meaning on a pipeline"),
        ({"torch_compile": True}, {}, '"compile": True'),
        ({"average_tokens_across_devices": False}, {}, "leave it at True"),
        ({}, {"plan_or_schedule": None}, "no schedule"),
        ({}, {"compute_loss_func": print}, "loss_fn"),
        ({}, {"ranks": 3}, "4 processes cannot form pipelines of 3 ranks"),
        ({}, {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), None)}, "optimizer_cls_and_kwargs"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_options_without_meaning_are_refused(workers: Workers, options: dict[str, Any], pipeline: dict[str, Any], reason: str) -> None:
    for said in workers.run(refusal, (options, {**TWO_BY_TWO, **pipeline}), ranks=4):
        assert reason in said


def test_one_process_is_refused() -> None:
    from penstock.integrations.transformers import PipelineTrainer

    with pytest.raises(IntegrationError, match="torchrun"):
        PipelineTrainer(build(), None, plan_or_schedule="1f1b")
