"""Measure a model layer by layer; see `penstock.runtime.measure.profile`."""

from penstock.runtime.measure.profile import profile

__all__ = ["profile"]
