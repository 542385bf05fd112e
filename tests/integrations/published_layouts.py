"""Layouts of Megatron-Core that are published, with their source, and the shapes of the models that they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import penstock as ps

DEEPSEEK_V3: dict[str, Any] = {
    "layers": 62,  # 61 blocks, and one of multi-token prediction
    "hidden": 7168,
    "heads": 128,
    "head_size": 128,
    "query_rank": 1536,
    "key_rank": 512,
    "rope": 64,
    "ffn": 18432,
    "gated": True,
    "experts": 256,
    "experts_per_token": 8,
    "shared_experts": 1,
    "expert_ffn": 2048,
    "dense_layers": 3,
    "vocabulary": 129280,
    "sequence": 4096,
    "flops": 400e12,
    "expert_parallel": 64,
    "bandwidth": 50e9,
    "latency": 1e-5,
}
"""The report on DeepSeek-V3 (arXiv 2412.19437), table of section 4.2; speeds of an H100 with one 400 Gbit/s link are ours."""


@dataclass(frozen=True)
class Published:
    """A layout, the ranks that it is for, and where it is published."""

    text: str
    ranks: int
    kinds: str
    source: str

    def profile(self, expert_bandwidth: float | None, heads: int = 1) -> ps.Profile:
        """An estimate of DeepSeek-V3, or of a model like it with other numbers of layers.

        Megatron runs the head once more per layer of multi-token prediction: `heads=2` counts that.
        """
        blocks, predicting = (int(count) for count in self.kinds.removeprefix("E,t*").removesuffix(",L").split(",m*"))
        model = ps.Profile.transformer(**{**DEEPSEEK_V3, "layers": blocks + predicting}, expert_bandwidth=expert_bandwidth)
        head = model.layers[-1]
        return replace(model, layers=[*model.layers[:-1], replace(head, f=heads * head.f, i=heads * head.i, w=heads * head.w)])


PARSER = "megatron-core 0.16.1, PipelineParallelLayerLayout"
CONFIG = "megatron-core 0.16.1, TransformerConfig.pipeline_model_parallel_layout"
DEEPSEEK_LAYOUT = Published("Ettt|(tt|)*29,m|L", 16, "E,t*61,m*1,L", f"{PARSER}.parse_str_to_list: DeepSeek-V3's 61 blocks")
PUBLISHED = [
    DEEPSEEK_LAYOUT,
    Published("Et*3|(tt|)*29,m|L", 16, "E,t*61,m*1,L", CONFIG),
    Published("Ett|(tt|)*29,m|L", 16, "E,t*60,m*1,L", f"{PARSER}.pretty_repr, drawn as a table there"),
    Published("E|(tt|)*2,(t|)*4,mL", 4, "E,t*8,m*1,L", f"{CONFIG}; its list of stages is that of 4 ranks, not of the 2 named there"),
]
