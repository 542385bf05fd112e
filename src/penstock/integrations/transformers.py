"""Hugging Face's `Trainer` on a pipeline: the same arguments, callbacks, logs and checkpoints, with the model cut over processes.

`PipelineMixin` replaces the places where a trainer touches the model as a whole: the step, the optimizer's parameters, the gradient norm,
evaluation, and the state dict that is saved. Everything else is the trainer's own. `PipelineTrainer` is the mixin on
`transformers.Trainer`; `class PipelineSFTTrainer(PipelineMixin, trl.SFTTrainer)` is TRL's trainer on a pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import IntegrationError, MissingExtraError
from penstock.integrations.whole_model import (
    StaleWeights,
    check_optimizer,
    gather_into_module,
    gather_module_state,
    mesh_options,
    refuse_joint_optimizer,
)
from penstock.runtime import Checkpoints, Pipeline
from penstock.runtime.checkpoint.training_state import OPTIONS, STATE, ModelState, load_optimizer
from penstock.runtime.checkpoint.training_state import check_optimizer as check_optimizer_state
from penstock.runtime.model.hugging_face import count_labels

try:
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import recursively_apply
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise MissingExtraError("penstock.integrations.transformers", "transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import TrainingArguments

STATE_FOLDER = "pipeline"
"""The folder in a checkpoint that holds what a run needs to continue, for any number of processes; the rest is a plain checkpoint."""

_WHOLE_MODEL_OPTIMIZERS = ("galore", "lomo", "apollo", "layerwise", "grokadamw")
"""Parts of the names of optimizers that take the whole model, look at all parameters together, or run inside the backward."""
_KNOWN_STEPS = ("transformers.trainer", "trl.trainer.sft_trainer")
"""The modules whose loss and steps are the ones that a pipeline runs."""


class _LocalParameters:
    """This rank's parameters in place of the model, for `Trainer.create_optimizer`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def named_parameters(self) -> Any:
        return self._pipeline.named_parameters()

    def modules(self) -> Any:
        return (module for stage in self._pipeline.stages.values() for module in stage.module.modules())


class PipelineMixin:
    """A trainer whose model is cut over the processes of a pipeline. Put it before the trainer class: `class Mine(PipelineMixin, Trainer)`.

    - `plan_or_schedule`: a plan, a schedule, or the name of one;
    - `microbatches`: how many each batch is split into; the plan's or schedule's number by default;
    - `ranks`: how many processes form one pipeline; the plan's or schedule's number, or all processes. If there are more processes, they
      form further pipelines that each get a part of the data, as in data parallelism;
    - `pipeline_options`: further keyword arguments of `penstock.runtime.Pipeline`, such as `{"shard": True}` or `{"recompute": True}`.

    `per_device_train_batch_size` is the batch of one pipeline. All other arguments are the trainer's own. The loss is the model's own,
    over all tokens of an update, as with the plain trainer.
    """

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    model_init: Any
    compute_loss_func: Any
    label_names: list[str]
    state: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        plan_or_schedule: Any = None,
        microbatches: int | None = None,
        ranks: int | None = None,
        pipeline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not dist.is_initialized():
            raise IntegrationError(
                "a PipelineTrainer runs in one process per rank: start the script with torchrun, or with "
                'penstock.runtime.launch(..., backend="gloo"), and make the TrainingArguments there, with use_cpu=True if there is no GPU'
            )
        if plan_or_schedule is None:
            raise IntegrationError('no schedule: give plan_or_schedule=, a plan, a schedule or a name such as "1f1b"')
        _refuse_overrides(type(self))
        self._request = plan_or_schedule
        self._microbatches = microbatches
        self._ranks = ranks
        self._options = dict(pipeline_options or {})
        self._pipeline: Pipeline | None = None
        self._stale: StaleWeights | None = None
        super().__init__(model, args, *positional, **kwargs)  # type: ignore[call-arg]
        self._refuse_objects()

    def _refuse_objects(self) -> None:
        """Refuse objects of the whole model that the trainer was given, by keyword or by position."""
        if self.model_init is not None:
            raise IntegrationError("model_init= builds a new model for each run, which a pipeline does not follow: give model=")
        if callable(self.compute_loss_func):
            raise IntegrationError(
                "compute_loss_func= needs the outputs of the whole model, but the loss of a pipeline is computed on its last stage: give "
                'pipeline_options={"loss_fn": ..., "weight": ...} instead'
            )
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise IntegrationError(
                "optimizers= has an optimizer or scheduler of the whole model, but each rank updates its own layers: give "
                "optimizer_cls_and_kwargs=, or choose them by args.optim and args.lr_scheduler_type"
            )
        if self.optimizer_cls_and_kwargs is not None and isinstance(self.optimizer_cls_and_kwargs[0], type):
            refuse_joint_optimizer(self.optimizer_cls_and_kwargs[0])

    # The pipeline -----------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, created when it is first needed; its parameters are those of the model on this rank."""
        if self._pipeline is None:
            self._pipeline = self._create_pipeline()
        return self._pipeline

    def _create_pipeline(self) -> Pipeline:
        _remove_fused_head(self.model)
        options = mesh_options(self._request, self._ranks, self._options)
        pipeline = Pipeline(self.model, schedule=self._request, microbatches=self._microbatches, **options)
        if pipeline.data.ranks > 1 and not self.args.average_tokens_across_devices:
            raise IntegrationError(
                "average_tokens_across_devices=False weighs each process's tokens by its own batch, but the loss of a pipeline is over all "
                "tokens of all data ranks: leave it at True"
            )
        if self.args.neftune_noise_alpha is not None and pipeline.table.slices > 1:
            raise IntegrationError(
                f"neftune_noise_alpha={self.args.neftune_noise_alpha!r} scales its noise by the length of a sequence, but the schedule "
                "cuts sequences into slices: choose a schedule without slices"
            )
        if self.args.load_best_model_at_end and self.args.save_only_model and self._options.get("shard"):
            raise IntegrationError(
                "save_only_model=True saves nothing that load_best_model_at_end=True could load into sharded stages: leave one of them out"
            )
        for stage in pipeline.stages.values():
            stage.module.to(self.args.device)
        modules = dict.fromkeys((self.model, _base_model(self.model)))
        advice = "call trainer.gather_model() on all processes, or save with trainer.save_model() and load that with from_pretrained"
        self._stale = StaleWeights(pipeline, modules, advice)
        return pipeline

    @property
    def _weights(self) -> StaleWeights:
        """What watches the model of the pipeline, which exists from here on."""
        assert self.pipeline is not None
        assert self._stale is not None
        return self._stale

    def gather_model(self) -> Any:
        """Bring the weights of all ranks into `model` on every process, and return it. All processes must call it.

        Each process then holds the whole model in its memory. Layers of this rank stay on their device, the others where they were built.
        """
        with self._weights.ignore():
            gather_into_module(self.pipeline, self.model, "")
        self._weights.clear()
        return self.model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the whole model where it is: only this rank's layers move, once the model is cut."""

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and let the accelerator split data among pipelines instead of processes."""
        _refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator
        accelerator.prepare_model = lambda model, **_: model
        accelerator.prepare_data_loader = self._prepare_data_loader
        accelerator.gather = self._gather

    def _prepare_data_loader(self, loader: Any, device_placement: bool | None = None, **_: Any) -> Any:
        """Give each pipeline its part of the data; all ranks of a pipeline get the same batches."""
        accelerator, data = self.accelerator, self.pipeline.data
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=data.ranks,
            process_index=data.rank,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def _gather(self, tensors: Any) -> Any:
        """Concatenate the tensors of all pipelines; the ranks of a pipeline have the same ones."""
        grid = self.pipeline.grid
        if grid is None or self.pipeline.data.ranks == 1:
            return tensors
        group = grid.data_mesh.get_group() if grid.data_mesh.ndim == 1 else None

        def gather(tensor: Tensor) -> Tensor:
            tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
            parts = [torch.empty_like(tensor) for _ in range(self.pipeline.data.ranks)]
            dist.all_gather(parts, tensor, group=group)
            return torch.cat(parts)

        return recursively_apply(gather, tensors, error_on_other_type=True)

    # Training ---------------------------------------------------------------------------------------------------------

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Decide by the names and layers of the whole model which parameters decay."""
        return cast(list[str], super().get_decay_parameter_names(self.model))  # type: ignore[misc]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer of this rank's parameters."""
        return super().create_optimizer(_LocalParameters(self.pipeline))  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Check the optimizer, which a subclass may have made, and create its learning-rate schedule."""
        advice = "give it trainer.pipeline.parameters() in create_optimizer"
        check_optimizer(_unwrap(self.optimizer if optimizer is None else optimizer), self.pipeline, self.model, advice)
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a batch forward and backward through the pipeline; the last batch of an update also sums gradients over pipelines."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        if num_items_in_batch is None and "labels" in inputs:
            num_items_in_batch = self._gather(count_labels(inputs["labels"])).sum() * self.current_gradient_accumulation_steps
        with self.accelerator.autocast(), self._weights.ignore():
            result = self.pipeline.step(
                {**inputs, "num_items_in_batch": num_items_in_batch},
                microbatches=self._count_microbatches(inputs),
                finalize_gradients=self.accelerator.sync_gradients,
            )
        self._weights.set()
        loss = result.loss
        return torch.zeros((), device=self.args.device) if loss is None else loss.detach().to(self.args.device)

    def _count_microbatches(self, inputs: Mapping[str, Any]) -> int:
        """The pipeline's number, or one per row of a batch with fewer rows."""
        rows = min((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.ndim), default=1)
        return max(1, min(self.pipeline.microbatches, rows))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.pipeline.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The samples of one update, over all pipelines."""
        batch: int = self._train_batch_size  # type: ignore[attr-defined]
        return batch * args.gradient_accumulation_steps * self.pipeline.data.ranks

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """This rank's share of the operations: the trainer adds those of all processes."""
        return float(super().floating_point_ops(inputs)) / self.pipeline.group.ranks  # type: ignore[misc]

    # Evaluation -------------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Run a batch forward: its loss if it has labels, and the logits and labels unless only the loss is wanted."""
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = inputs.get("labels")
        with self.accelerator.autocast(), self._weights.ignore():
            result = self.pipeline.eval_step(inputs, microbatches=self._count_microbatches(inputs), outputs=not prediction_loss_only)
        data, loss = self.pipeline.data, result.loss
        if loss is not None and data.ranks > 1:  # this pipeline's own part, because the trainer averages over pipelines
            parts = [one * scale for one, scale in zip(result.losses, result.scales, strict=True)]
            loss = torch.stack(parts).sum() * data.ranks
        loss = None if loss is None or labels is None else loss.detach().to(self.args.device)
        return (loss, None, None) if prediction_loss_only else (loss, result.outputs, labels)

    # Saving and resuming ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the whole model, on the process that saves; empty on the others. All processes must call it."""
        with self._weights.ignore():
            return gather_module_state(self.pipeline, self.model, "", keep=self.args.should_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a plain checkpoint, which `from_pretrained` loads. All processes must call it."""
        folder, state = output_dir or self.args.output_dir, self.state_dict()
        if self.args.should_save:
            with self._weights.ignore():
                self._save(folder, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        _open_state(output_dir).save(self.pipeline, _unwrap(self.optimizer), step=self.state.global_step, scheduler=self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not _has_state(checkpoint):
            self._load_plain_optimizer(checkpoint)
            return
        self._weights.set()
        _open_state(checkpoint).load_latest(self.pipeline, _unwrap(self.optimizer), scheduler=self.lr_scheduler)

    def _load_plain_optimizer(self, checkpoint: str) -> None:
        """Continue with the optimizer and learning rate of the plain trainer: its parameters are those of the whole model, in its order."""
        optimizer_file, scheduler_file = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if not (os.path.isfile(optimizer_file) and os.path.isfile(scheduler_file)):
            raise IntegrationError(
                f"{checkpoint} has neither a folder {STATE_FOLDER!r} nor the files {OPTIMIZER_NAME} and {SCHEDULER_NAME}, so the optimizer "
                "and the learning rate cannot continue: load its weights with from_pretrained, and train without resume_from_checkpoint"
            )
        saved = torch.load(optimizer_file, map_location="cpu", weights_only=True)
        optimizer, names = _unwrap(self.optimizer), ModelState.of(self.pipeline).list_first_names()
        flat = _name_optimizer_state(saved, self._list_groups(), checkpoint)
        check_optimizer_state(optimizer, names, flat, flat)
        load_optimizer(optimizer, names, flat)
        self.lr_scheduler.load_state_dict(torch.load(scheduler_file, weights_only=True))

    def _list_groups(self) -> list[list[tuple[str, ...]]]:
        """The parameters of each group in the optimizer of the plain trainer: decaying ones, and others. A tied one has several names."""
        decaying = set(self.get_decay_parameter_names(self.model))
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        trained = [names[id(parameter)] for parameter in self.model.parameters() if parameter.requires_grad]
        return [[tuple(aliases) for aliases in trained if (aliases[0] in decaying) == decays] for decays in (True, False)]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load plain weights; those of a pipeline's checkpoint are loaded together with the optimizer."""
        if _has_state(resume_from_checkpoint):
            return
        if self._options.get("shard"):
            raise IntegrationError(
                f"{resume_from_checkpoint} is a checkpoint of the plain trainer, which cannot be resumed with shard=True: resume it "
                "without shard, save a checkpoint, and resume that"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_state(best):
            _open_state(best).load_latest(self.pipeline)
        else:
            super()._load_best_model()  # type: ignore[misc]
            self._weights.clear()  # all layers were loaded


class PipelineTrainer(PipelineMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer` on a pipeline, under `torchrun` or `launch(..., backend="gloo")`; see `PipelineMixin` for its arguments."""


def _has_state(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, STATE_FOLDER))


def _open_state(checkpoint: str) -> Checkpoints:
    return Checkpoints(os.path.join(checkpoint, STATE_FOLDER), keep=1)


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside the accelerator's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _name_optimizer_state(saved: Mapping[str, Any], groups: list[list[tuple[str, ...]]], checkpoint: str) -> dict[str, Any]:
    """The state dict of an optimizer, by parameter name instead of number."""
    counts, expected = [len(group["params"]) for group in saved["param_groups"]], [len(group) for group in groups]
    if counts != expected:
        raise IntegrationError(
            f"the optimizer in {checkpoint} has groups of {counts} parameters, but the model's have {expected}: resume with the model and "
            "the optimizer that were saved"
        )
    flat: dict[str, Any] = {}
    for group, names in zip(saved["param_groups"], groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for number, aliases in zip(group["params"], names, strict=True):
            for name in aliases:
                flat |= {f"{STATE}{name}.{key}": value for key, value in saved["state"].get(number, {}).items()}
                flat |= {f"{OPTIONS}{name}.{key}": value for key, value in options.items()}
    return flat


def _base_model(model: Any) -> Any:
    """The model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _remove_fused_head(model: Any) -> None:
    """Undo TRL's replacement of the model's forward, which computes its loss from hidden states: a pipeline does so on its last stage."""
    base = _base_model(model)
    replaced = getattr(vars(base).get("forward"), "__func__", None)
    if replaced is not None and str(replaced.__globals__.get("__name__")).startswith("trl."):
        del base.forward


def _refuse_overrides(kind: type) -> None:
    """Refuse losses and steps of a trainer's own, which a pipeline would not run.

    A loss may not be overridden at all. Steps may, by a class in front of the mixin, which decides itself whether it calls the pipeline's.
    """
    behind = kind.__mro__[kind.__mro__.index(PipelineMixin) + 1 :]
    for name, classes in (("compute_loss", kind.__mro__), ("training_step", behind), ("prediction_step", behind)):
        owner = next((base for base in classes if name in vars(base)), None)
        if owner is not None and owner.__module__ not in _KNOWN_STEPS:
            raise IntegrationError(
                f"{owner.__name__}.{name} is not run on a pipeline, whose last stage computes the loss: use the loss of Trainer or of "
                "TRL's SFTTrainer, or give one of your own as "
                'pipeline_options={"loss_fn": ..., "weight": ...}'
            )


def _refuse_arguments(args: Any) -> None:
    """Refuse arguments of the trainer that have no meaning on a pipeline."""
    recompute = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
    refusals = {
        "fsdp": (args.fsdp, 'use pipeline_options={"shard": True}, which shards stages over data ranks'),
        "deepspeed": (args.deepspeed, "the pipeline takes DeepSpeed's place"),
        "parallelism_config": (args.parallelism_config, "give the number of ranks per pipeline as ranks="),
        "fp16": (args.fp16, "use bf16=True"),
        "label_smoothing_factor": (
            args.label_smoothing_factor,
            'give a loss of your own as pipeline_options={"loss_fn": ..., "weight": ...}',
        ),
        "loss_type": (getattr(args, "loss_type", "nll") != "nll" and args.loss_type, "use loss_type='nll', the model's own loss"),
        "auto_find_batch_size": (args.auto_find_batch_size, "choose microbatches= instead: it sets how much memory a batch takes"),
        "torch_compile": (args.torch_compile, 'use pipeline_options={"compile": True}, which compiles each stage'),
        "activation_checkpointing": (recompute, 'use pipeline_options={"recompute": True}, or a plan that chooses the stages'),
        "activation_offloading": (
            getattr(args, "activation_offloading", False),
            "use a plan that moves activations: ps.plan(offload=True)",
        ),
        "use_liger_kernel": (
            args.use_liger_kernel,
            "it replaces the forward of the whole model: build the model with the kernels you want",
        ),
        "bf16_full_eval": (args.bf16_full_eval, "it casts the layers of all ranks: use bf16=True, which holds for evaluation too"),
        "fp16_full_eval": (args.fp16_full_eval, "it casts the layers of all ranks: use bf16=True, which holds for evaluation too"),
        "enable_jit_checkpoint": (args.enable_jit_checkpoint, "ranks would save at different steps: save every save_steps= instead"),
        "eval_use_gather_object": (args.eval_use_gather_object, "evaluate tensors"),
        "accelerator_config.dispatch_batches": (args.accelerator_config.dispatch_batches, "every rank of a pipeline reads its data itself"),
    }
    for name, (value, advice) in refusals.items():
        if value:
            raise IntegrationError(f"{name}={value!r} has no meaning on a pipeline: {advice}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in _WHOLE_MODEL_OPTIMIZERS):
        raise IntegrationError(
            f"optim={optimizer!r} needs the whole model, but each rank updates its own layers: choose another, such as 'adamw_torch'"
        )
    if args.n_gpu > 1:
        raise IntegrationError(f"one process with {args.n_gpu} GPUs: start one process per GPU, with torchrun")
