"""Every setting and every name of torchtitan on its page is there in the installed torchtitan."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from docs.blocks import text_of

if find_spec("torchtitan") is None or find_spec("torchtitan.trainer") is None:
    pytest.skip("torchtitan is not installed: `make titan` installs it into an environment of its own", allow_module_level=True)

from torch.distributed.pipelining.schedules import get_schedule_class
from torchtitan.config.configs import ParallelismConfig
from torchtitan.trainer import Trainer

PAGE = text_of("docs/torchtitan.md")
SECTIONS = {field.name: field for field in fields(Trainer.Config)}


def list_settings(page: str) -> set[tuple[str, str]]:
    """List the settings on a page as (section, name): arguments, dotted names, and names that begin as settings of pipelines do."""
    dotted = set(re.findall(r"--([a-z_]+)\.(\w+)", page))
    dotted |= {match for match in re.findall(r"`([a-z_]+)\.(\w+)`", page) if match[0] in SECTIONS}
    bare = set(re.findall(r"\b(?:pipeline_parallel_\w+|module_fqns_\w+)", page))
    return dotted | {("parallelism", name) for name in bare}


def is_setting(section: str, name: str) -> bool:
    if section not in SECTIONS:
        return False
    factory: Any = SECTIONS[section].default_factory
    return factory is not MISSING and is_dataclass(value := factory()) and name in {field.name for field in fields(value)}


def list_dotted_names(page: str) -> set[str]:
    return set(re.findall(r"\btorchtitan(?:\.\w+)+", page))


def resolve(dotted: str) -> Any:
    """Import a module, or the attribute of a module."""
    module, _, name = dotted.rpartition(".")
    try:
        return import_module(dotted)
    except ModuleNotFoundError:
        return getattr(import_module(module), name)


def test_settings_on_the_page_exist():
    settings = list_settings(PAGE)
    assert ("parallelism", "pipeline_parallel_schedule_csv") in settings
    assert ("comm", "train_timeout_seconds") in settings
    assert len(settings) >= 8
    assert [setting for setting in sorted(settings) if not is_setting(*setting)] == []


def test_names_on_the_page_exist():
    names = list_dotted_names(PAGE)
    assert "torchtitan.distributed.pipeline_parallel.pipeline_llm" in names
    for name in sorted(names):
        assert resolve(name) is not None
    spec = resolve("torchtitan.protocols.model_spec.ModelSpec")
    assert {"pipelining_fn", "parallelize_fn"} <= {field.name for field in fields(spec)}
    assert "activation_checkpoint" in SECTIONS


def test_schedules_on_the_page_exist():
    assert "pipeline_parallel_schedule" in {field.name for field in fields(ParallelismConfig)}
    names = [*re.findall(r"pipeline_parallel_schedule (\w+)", PAGE), "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
    assert "PipelineScheduleMulti" in names
    for name in names:
        assert name in PAGE
        assert get_schedule_class(name) is not None


def test_configurations_on_the_page_exist():
    module, config = re.search(r"--module (\w+) --config (\w+)", PAGE).groups()
    assert callable(getattr(import_module(f"torchtitan.models.{module}.config_registry"), config))


@pytest.mark.parametrize("gone", ["--training.batch_size 8", "`parallelism.pipeline_parallel_split_points`", "--nowhere.steps 3"])
def test_settings_that_do_not_exist_are_found_out(gone):
    assert not all(is_setting(*setting) for setting in list_settings(gone))
    assert list_settings(gone)
