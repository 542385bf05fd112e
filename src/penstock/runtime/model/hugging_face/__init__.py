"""Causal language models of `transformers` as pipelines, cut between their layers without tracing. `transformers` is not imported.

`structure` finds a model's layers and the modules around them; `split`, the door, learns the order in which they run and tries the cuts.
Each stage is then a `HuggingFaceStage` (`stage_module`): the model's own forward, with empty slots in place of the layers of other
stages, and the balance of a mixture of experts summed from stage to stage. `slices` runs stages on slices of a sequence, and
`ends` takes an embedding and a head that are spread over the ranks out of the stages.
"""

from penstock.runtime.model.hugging_face.ends import ModelEnds
from penstock.runtime.model.hugging_face.slices import adapt_cutter
from penstock.runtime.model.hugging_face.split import HuggingFace, count_labels, open_batch, recognise_model

__all__ = ["HuggingFace", "ModelEnds", "adapt_cutter", "count_labels", "open_batch", "recognise_model"]
