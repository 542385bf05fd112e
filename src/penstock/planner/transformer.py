"""`Transformer` under its public name; it lives in `penstock.planner.profile.transformer`."""

from penstock.planner.profile.transformer import Transformer

__all__ = ["Transformer"]
