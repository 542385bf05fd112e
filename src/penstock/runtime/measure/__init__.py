"""Measurements of a model and of a run: profiles for the planner, recorded timelines, metrics, and parity with the unpipelined
model.

`profile.py` times each layer and counts its memory for the planner's `Profile`. `recorder.py` turns the clock readings of all ranks into
the `Timeline` of a step, and `metrics.py` into sums that callbacks get each step, in which `drift.py` finds ranks that slow down.
`parity.py` runs a step again on copies of the model, without the pipeline, and compares everything that the
step computed and left behind. Neither profiling nor parity leaves a trace in the model.
"""
