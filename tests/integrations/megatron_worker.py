"""Answers questions with megatron-core's own code: one line of JSON in, one line of JSON out.

Imports are inside the functions, because pytest imports every module for its doctests, with or without megatron-core.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def parse(text: str) -> list[str] | None:
    """The stages of a text as letters; None if Megatron refuses it."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        return None
    return ["".join(LETTERS[layer.name] for layer in stage) for stage in stages]


def validate(text: str, ranks: int, layers: int, predicting: int) -> str | None:
    """Why Megatron refuses a layout of so many blocks and layers of multi-token prediction; None if it takes it."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        PipelineParallelLayerLayout(text, ranks).validate_layer_layout(layers, predicting)
    except (AssertionError, IndexError) as error:
        return str(error) or type(error).__name__
    return None


def place(text: str, ranks: int, stage: int) -> list[int]:
    """The blocks that Megatron builds in a stage, by their numbers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout(text, ranks)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(layout.virtual_pipeline_model_parallel_size)
    return layout.get_layer_id_list(LayerType.decoder, vp_stage=stage // ranks, pp_rank=stage % ranks)


def order(ranks: int, chunks: int, microbatches: int, group_size: int, rank: int) -> list[str]:
    """Forwards and backwards of a rank, from Megatron's table and its number of warm-up steps."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    peers = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
    total, _, warm_up, remaining = get_pp_rank_microbatches(microbatches, chunks, group_size, p2p_communicator=peers)
    table = get_schedule_table(microbatches, chunks, group_size)
    forwards = [f"{chunk * ranks + rank}F{microbatch}" for microbatch, chunk in table]
    backwards = [f"{(chunks - 1 - chunk) * ranks + rank}B{microbatch}" for microbatch, chunk in table]
    steady = [action for k in range(remaining) for action in (forwards[warm_up + k], backwards[k])]
    return [*forwards[:warm_up], *steady, *backwards[remaining:total]]


def list_settings() -> dict[str, list[str]]:
    """Every setting of a transformer, with the names of its argument if they differ from its own."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {field.name: field.metadata.get("argparse_meta", {}).get("arg_names", []) for field in fields(TransformerConfig)}


if __name__ == "__main__":
    functions: dict[str, Any] = {"parse": parse, "validate": validate, "place": place, "order": order, "list_settings": list_settings}
    for line in sys.stdin:
        print(json.dumps([functions[name](*arguments) for name, *arguments in json.loads(line)]), flush=True)
