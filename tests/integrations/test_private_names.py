"""Private names of other packages that the adapters use or override: a new version of a package that drops one fails here first."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from accelerate import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from transformers import Trainer

from penstock.integrations.transformers import PipelineMixin

USED: dict[str, Any] = {
    "_prepare_inputs": Trainer,
    "_save": Trainer,
    "_train_batch_size": Trainer,
    "_dataloaders": Accelerator,
    "_is_accelerate_prepared": Accelerator,
    "_layer_sync": ParallelStrategy,
    "_optimizer": LightningOptimizer,
}
OWN = {
    "gather_model",
    "_create_pipeline",
    "_prepare_data_loader",
    "_gather",
    "_count_microbatches",
    "_refuse_objects",
    "_load_plain_optimizer",
    "_list_groups",
}
"""Methods of the mixin that override none of the trainer's."""


@pytest.mark.parametrize("name", USED)
def test_the_name_is_still_there(name: str) -> None:
    owner = USED[name]
    module = inspect.getmodule(owner)
    assert module is not None
    assert hasattr(owner, name) or f".{name}" in inspect.getsource(module)


@pytest.mark.parametrize("name", [name for name, value in vars(PipelineMixin).items() if inspect.isfunction(value) and name not in OWN])
def test_what_is_overridden_is_a_method_of_the_trainer(name: str) -> None:
    """Otherwise the trainer would silently take its own way."""
    assert name == "state_dict" or hasattr(Trainer, name)
