"""Lightning on a pipeline: `Trainer(strategy=PipelineStrategy("zb-h1", microbatches=8))`.

The strategy cuts the module's `model` over the processes and gives the module a `pipeline`, whose `step` runs a whole batch forward and
backward. Lightning wants the two apart, and clears gradients between them, so the gradients of a step are kept with its loss, and
`loss.backward()` delivers them. Everything else is Lightning's own: optimizers, schedules, accumulation, logging, callbacks, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import IntegrationError, MissingExtraError
from penstock.integrations.whole_model import (
    StaleWeights,
    check_optimizer,
    gather_into_module,
    gather_module_state,
    gather_tensor,
    mesh_options,
    shard_like,
)
from penstock.runtime import Pipeline
from penstock.runtime.batch.result import StepResult
from penstock.runtime.checkpoint.training_state import STATE, ModelState, keys_by_parameter, load_optimizer, optimizer_state

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise MissingExtraError("penstock.integrations.lightning", "lightning", "lightning") from error

_OPTIMIZER = "penstock"
"""The key of an optimizer's state in a checkpoint, by parameter name."""


class LightningPipeline(Pipeline):
    """A pipeline whose steps return a loss that still has to be run backward: `loss.backward()` adds the step's gradients, scaled."""

    weights: StaleWeights | None = None
    """What watches that the whole model is not used while it is trained."""

    def step(self, *args: Any, **kwargs: Any) -> StepResult:
        with self._run_stages(trains=True), self._keep_gradients() as finish:
            return finish(super().step(*args, **kwargs))

    def step_list(self, *args: Any, **kwargs: Any) -> StepResult:
        with self._run_stages(trains=True), self._keep_gradients() as finish:
            return finish(super().step_list(*args, **kwargs))

    def eval_step(self, *args: Any, **kwargs: Any) -> StepResult:
        with self._run_stages():
            return super().eval_step(*args, **kwargs)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        with self._run_stages():
            return super().infer(*args, **kwargs)

    @contextmanager
    def _run_stages(self, trains: bool = False) -> Iterator[None]:
        """Let stages use the model that they are a part of."""
        with nullcontext() if self.weights is None else self.weights.ignore():
            yield
        if trains and self.weights is not None:
            self.weights.set()

    @contextmanager
    def _keep_gradients(self) -> Iterator[Callable[[StepResult], StepResult]]:
        """Move the gradients of a step to its loss, and put those from before it back."""
        parameters = [parameter for _, parameter in self.local_parameters()]
        before = [parameter.grad for parameter in parameters]

        def finish(result: StepResult) -> StepResult:
            gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
            anchor = torch.zeros((), requires_grad=True)
            result.loss = _DeliverGradients.apply(anchor, result.loss, gradients)  # type: ignore[no-untyped-call]
            return result

        for parameter in parameters:
            parameter.grad = None
        try:
            yield finish
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient


class _DeliverGradients(torch.autograd.Function):
    """A loss whose gradients are known: its backward adds them to the parameters, times the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: list[tuple[nn.Parameter, Tensor]]) -> Tensor:
        ctx.gradients = gradients
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:
        factor, gradients = float(scale), ctx.gradients
        ctx.gradients = []
        for parameter, gradient in gradients:
            scaled = gradient if factor == 1 else gradient * factor
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None


class PipelineStrategy(DDPStrategy):
    """Trains a `LightningModule` whose `model` is cut over the processes of a pipeline.

    - `plan_or_schedule`: a plan, a schedule, or the name of one;
    - `microbatches`: how many each batch is split into; the plan's or schedule's number by default;
    - `ranks`: how many processes form one pipeline; the plan's or schedule's number, or all processes. If there are more processes, they
      form further pipelines that each get a part of the data;
    - `pipeline_options`: further keyword arguments of `penstock.runtime.Pipeline`.

    The module has its layers in `self.model`, or returns them from `pipeline_model()`, and may have a method
    `pipeline_loss(output, target)`. Its steps call `self.pipeline`, and its optimizer takes the parameters of this rank:

        def training_step(self, batch, index):
            x, y = batch
            return self.pipeline.step(x, target=y).loss

        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": list(self.pipeline.parameters())}], lr=1e-3)
    """

    def __init__(
        self,
        plan_or_schedule: Any,
        *,
        microbatches: int | None = None,
        ranks: int | None = None,
        pipeline_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._request, self._microbatches, self._ranks = plan_or_schedule, microbatches, ranks
        self._options = dict(pipeline_options or {})
        self._pipeline: LightningPipeline | None = None
        self._prefix = ""

    @property
    def pipeline(self) -> LightningPipeline:
        """The pipeline; it exists once the strategy is set up."""
        if self._pipeline is None:
            raise IntegrationError("the pipeline is made when training or evaluation begins: use it in the module's steps")
        return self._pipeline

    @property
    def module(self) -> Any:
        """The user's module."""
        return self.lightning_module

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Cut the model, and let the module create its optimizers of this rank's parameters."""
        module, accelerator, precision = self.module, self.accelerator, cast(Any, self.precision_plugin)
        assert accelerator is not None
        self._refuse_settings()
        accelerator.setup(trainer)
        self.model = precision.convert_module(module)
        module.pipeline = self._pipeline = self._create_pipeline(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._refuse_parameters_outside(module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        precision.clip_grad_by_norm = lambda optimizer, clip_val: self.pipeline.clip_grad_norm_(clip_val)

    def _create_pipeline(self, module: Any) -> LightningPipeline:
        model = module.pipeline_model() if hasattr(module, "pipeline_model") else getattr(module, "model", None)
        if not isinstance(model, nn.Module):
            raise IntegrationError(
                f"{type(module).__name__} has no layers to cut: put them into self.model, or return them from pipeline_model()"
            )
        names = [name for name, other in module.named_modules() if other is model]
        if not names:
            raise IntegrationError(
                f"{type(module).__name__}.pipeline_model() returns a module that is not part of it: assign it in __init__"
            )
        self._prefix = f"{names[0]}." if names[0] else ""
        options = mesh_options(self._request, self._ranks, self._options)
        if hasattr(module, "pipeline_loss"):
            options.setdefault("loss_fn", module.pipeline_loss)
        pipeline = LightningPipeline(model, schedule=self._request, microbatches=self._microbatches, **options)
        for stage in pipeline.stages.values():
            stage.module.to(self.root_device)
        advice = "call trainer.strategy.gather_model() on all processes, or load a checkpoint with load_from_checkpoint"
        pipeline.weights = StaleWeights(pipeline, [model], advice)
        return pipeline

    def gather_model(self) -> Any:
        """Bring the weights of all ranks into the module on every process, and return it. All processes must call it."""
        with self._weights.ignore():
            gather_into_module(self.pipeline, self.module, self._prefix)
        self._weights.clear()
        return self.module

    @property
    def _weights(self) -> StaleWeights:
        assert self.pipeline.weights is not None
        return self.pipeline.weights

    def _refuse_parameters_outside(self, module: Any) -> None:
        inside = {id(parameter) for parameter in module.get_submodule(self._prefix.rstrip(".")).parameters()}
        outside = [name for name, parameter in module.named_parameters() if parameter.requires_grad and id(parameter) not in inside]
        if outside:
            raise IntegrationError(
                f"{type(module).__name__} has trainable parameters outside the layers of its pipeline, which get no gradients: "
                f"{', '.join(outside)}; move them into {self._prefix.rstrip('.') or 'the model'}, or freeze them with requires_grad_(False)"
            )

    def _refuse_settings(self) -> None:
        if getattr(self.precision_plugin, "scaler", None) is not None or getattr(self.precision_plugin, "precision", "") == "16-mixed":
            raise IntegrationError("precision='16-mixed' has no meaning on a pipeline: use 'bf16-mixed', which needs no gradient scaler")
        if self._layer_sync is not None:
            raise IntegrationError("sync_batchnorm has no meaning on a pipeline: its statistics are those of each microbatch")

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers, which must hold this rank's parameters only."""
        super().setup_optimizers(trainer)
        model = self.module.get_submodule(self._prefix.rstrip("."))
        for optimizer in self.optimizers:
            check_optimizer(optimizer, self.pipeline, model, "give it self.pipeline.parameters() in configure_optimizers")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each pipeline gets a part of the data; all of its ranks get the same."""
        return {"num_replicas": self.pipeline.data.ranks, "rank": self.pipeline.data.rank}

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the whole module on the first process, which saves; empty on the others."""
        with self._weights.ignore():
            return gather_module_state(self.pipeline, self.module, self._prefix, keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state dict of the whole module on each rank, as shards if its layers are sharded already."""
        if self._pipeline is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        with self._weights.ignore():
            targets = self.module.state_dict(keep_vars=True)
        state = {name: shard_like(value, targets.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
        self._weights.clear()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of all ranks' optimizers by parameter name, so that it can be loaded with any number of ranks."""
        names = ModelState.of(self.pipeline).list_first_names()
        state, aliases = optimizer_state(getattr(optimizer, "_optimizer", optimizer), names)
        state = {key: gather_tensor(value) for key, value in state.items()}
        state |= {other: state[key] for key, others in aliases.items() for other in others}
        whole: dict[str, Any] = {}
        for share in self.pipeline.gather("optimizer", state):
            whole.update(share)
        return {_OPTIMIZER: whole} if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        names = ModelState.of(self.pipeline).list_first_names()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if _OPTIMIZER not in state:
                raise IntegrationError(
                    "the checkpoint's optimizer was saved by another strategy, by position and not by parameter name: load the weights "
                    "alone, with load_from_checkpoint"
                )
            load_optimizer(getattr(optimizer, "_optimizer", optimizer), names, self._shard_state(state[_OPTIMIZER]))

    def _shard_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of an optimizer, in shards for the parameters that are."""
        names = ModelState.of(self.pipeline).list_first_names()
        targets = {names[id(parameter)]: parameter for _, parameter in self.pipeline.local_parameters()}
        keys = keys_by_parameter(state, targets, STATE)
        sharded = {key: shard_like(state[key], targets[name]) for name, own in keys.items() for key in own.values()}
        return {**state, **sharded}
