"""Causal language models of `transformers` as pipelines, cut between their layers without tracing. `transformers` is not imported.

`structure` finds a model's layers and the modules around them; `dry_run` learns the order in which they run and tries the cuts.
Each stage is then a `HuggingFaceStage` (`stage_module`): the model's own forward, with empty slots in place of the layers of other
stages. `router_loss` sums the balance of a mixture of experts from stage to stage, and `split` is the door to all of it.
"""

from penstock.runtime.model.hugging_face.split import HuggingFace, count_labels, open_batch, recognise_model

__all__ = ["HuggingFace", "count_labels", "open_batch", "recognise_model"]
