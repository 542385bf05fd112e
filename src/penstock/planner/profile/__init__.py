"""Profiles: what each layer of a model takes and holds.

`profile.py` has `Layer` and `Profile` with their files, `slices.py` what a slice of the sequence takes, `transformer.py` estimates a
profile from a transformer's size, and `vocabulary.py` spreads a model's embedding and head over the ranks. A profile comes from a file, an
estimate or a measurement (`penstock.runtime`), and everything else in the planner reads its numbers from there.
"""

from penstock.planner.profile.profile import Layer, Profile
from penstock.planner.profile.slices import SliceCost, SliceCosts

__all__ = ["Layer", "Profile", "SliceCost", "SliceCosts"]
