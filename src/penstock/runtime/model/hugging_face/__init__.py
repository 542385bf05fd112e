"""Causal language models of `transformers` as pipelines. Nothing of `transformers` is imported: its models say what they are made of."""

from penstock.runtime.model.hugging_face.split import HuggingFace, count_labels, open_batch, recognise_model

__all__ = ["HuggingFace", "count_labels", "open_batch", "recognise_model"]
