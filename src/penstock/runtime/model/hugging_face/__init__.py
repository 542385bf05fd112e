"""Causal language models of `transformers` as pipelines. Nothing of `transformers` is imported: its models say what they are made of."""

from penstock.runtime.model.hugging_face.split import HuggingFace, count_labels, opened, recognised

__all__ = ["HuggingFace", "count_labels", "opened", "recognised"]
