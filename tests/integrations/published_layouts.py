"""Layouts of Megatron-Core that are published, with their source, and the shapes of the models that they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import penstock as ps

SPEED: dict[str, Any] = {"sequence": 4096, "flops": 400e12, "bandwidth": 50e9, "latency": 1e-5}
"""Speeds of an H100 with one 400 Gbit/s link, which are ours."""

DEEPSEEK_V3: dict[str, Any] = {
    **SPEED,
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
    "expert_parallel": 64,
}
"""The report on DeepSeek-V3 (arXiv 2412.19437), table of section 4.2."""

KIMI_K2: dict[str, Any] = {**DEEPSEEK_V3, "heads": 64, "experts": 384, "dense_layers": 1, "vocabulary": 163840, "expert_parallel": 32}
"""megatron-bridge 0.3.1, `KimiK2Provider` and recipes/kimi/kimi_k2.py."""

MOONLIGHT: dict[str, Any] = {
    **SPEED,
    "hidden": 2048,
    "heads": 16,
    "head_size": 128,
    "key_rank": 512,
    "rope": 64,
    "ffn": 11264,
    "gated": True,
    "experts": 64,
    "experts_per_token": 6,
    "shared_experts": 2,
    "expert_ffn": 1408,
    "dense_layers": 1,
    "vocabulary": 163842,
    "expert_parallel": 8,
}
"""megatron-bridge 0.3.1, `MoonlightModelProvider16B` and recipes/moonlight/moonlight_16b.py."""

OLMOE: dict[str, Any] = {
    **SPEED,
    "hidden": 2048,
    "heads": 16,
    "ffn": 1024,
    "gated": True,
    "experts": 64,
    "experts_per_token": 8,
    "expert_ffn": 1024,
    "vocabulary": 50304,
    "expert_parallel": 8,
}
"""megatron-bridge 0.3.1, `OlMoEModelProvider` and recipes/olmoe/olmoe_7b.py."""


@dataclass(frozen=True)
class Published:
    """A layout, the ranks and the model that it is for, and where it is published."""

    text: str
    ranks: int
    blocks: int
    predicting: int
    source: str
    model: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.text} on {self.ranks}"

    @property
    def kinds(self) -> str:
        """The layers of the model, as `--kinds` takes them."""
        return ",".join(["E", f"t*{self.blocks}", *([f"m*{self.predicting}"] if self.predicting else []), "L"])

    def profile(self, expert_bandwidth: float | None, heads: int = 1) -> ps.Profile:
        """An estimate of the model. Megatron runs the head once more per layer of multi-token prediction: `heads=2` counts that."""
        model = ps.Profile.transformer(**self.model, layers=self.blocks + self.predicting, expert_bandwidth=expert_bandwidth)
        head = model.layers[-1]
        return replace(model, layers=[*model.layers[:-1], replace(head, f=heads * head.f, i=heads * head.i, w=heads * head.w)])


PARSER = "megatron-core 0.16.1, PipelineParallelLayerLayout"
CONFIG = "megatron-core 0.16.1, TransformerConfig.pipeline_model_parallel_layout"
DEEPSEEK_LAYOUT = Published("Ettt|(tt|)*29,m|L", 16, 61, 1, f"{PARSER}.parse_str_to_list: DeepSeek-V3's 61 blocks", DEEPSEEK_V3)
DOCUMENTED = [
    DEEPSEEK_LAYOUT,
    Published("Ett|(tt|)*29,m|L", 16, 60, 1, f"{PARSER}.pretty_repr, drawn as a table there", DEEPSEEK_V3),
    Published("E|(tt|)*2,(t|)*4,mL", 4, 8, 1, f"{CONFIG}; its stages are those of 4 ranks, not of the 2 named there", DEEPSEEK_V3),
]
"""Examples in the documentation of megatron-core, whose numbers of layers are those of DeepSeek-V3 or close."""

RESPELLED = Published("Et*3|(tt|)*29,m|L", 16, 61, 1, CONFIG, DEEPSEEK_V3)
"""DeepSeek-V3's layout, written otherwise."""

RECIPES = "megatron-bridge 0.3.1, recipes/"
SIXTEENS, EIGHTS, FOURS = "Et*16|(t*16|)*2,t*13,", "Et*8|(t*8|)*6,t*5,", "Et*4|(t*4|)*14,t,"
RECIPE_LAYOUTS = [
    *(
        Published(f"{text}{last}", ranks, 61, predicting, f"{RECIPES}{file}", model)
        for file, model, last, predicting in (
            ("deepseek/deepseek_v3.py", DEEPSEEK_V3, "mL", 1),
            ("kimi/kimi_k2.py", KIMI_K2, "L", 0),
        )
        for ranks, text in ((4, SIXTEENS), (8, EIGHTS), (4, EIGHTS), (16, FOURS), (8, FOURS), (4, FOURS))
    ),
    Published(f"{FOURS}L", 2, 61, 0, f"{RECIPES}kimi/kimi_k2.py", KIMI_K2),
    *(
        Published(text, ranks, 27, 0, f"{RECIPES}moonlight/moonlight_16b.py", MOONLIGHT)
        for ranks, text in ((2, "Et*14|t*13,L"), (4, "Et*7|(t*7|)*2,t*6,L"), (2, "Et*7|(t*7|)*2,t*6,L"))
    ),
    *(
        Published(text, ranks, 16, 0, f"{RECIPES}olmoe/olmoe_7b.py", OLMOE)
        for ranks, text in ((2, "Et*8|t*8,L"), (4, "Et*4|(t*4|)*2,t*4,L"), (2, "Et*4|(t*4|)*2,t*4,L"))
    ),
]
"""Layouts that recipes for these models use."""

MISCOUNTED = [
    Published("Et*4|(t*4|)*6,t*3,L", 8, 27, 0, f"{RECIPES}moonlight/moonlight_16b.py: 31 blocks, and the model has 27", MOONLIGHT),
    Published("Et*4|(t*4|)*6,t*3,L", 4, 27, 0, f"{RECIPES}moonlight/moonlight_16b.py: 31 blocks, and the model has 27", MOONLIGHT),
    Published("E|(t*3|)*14,t*3,L", 16, 46, 0, f"{RECIPES}glm_vl/glm_45v.py: 45 blocks, and the model has 46", {}),
]
"""Layouts of recipes that do not have the layers of their model, so that Megatron refuses them."""

VISION = [
    Published(text, ranks, 46, 0, f"{RECIPES}glm_vl/glm_45v.py", {})
    for ranks, text in (
        (4, "Et*11|(t*12|)*2,t*11,L"),
        (8, "Et*5|(t*6|)*6,t*5,L"),
        (16, "Et*2|(t*3|)*14,t*2,L"),
        (8, "Et|(t*7|)*6,t*3,L"),
    )
]
"""Layouts whose first stage also runs a vision encoder, of which an estimate of the language model knows nothing: read, not timed."""

PUBLISHED = [*DOCUMENTED, RESPELLED, *RECIPE_LAYOUTS, *VISION]
