"""Partitions: which layers make up which stage, and which tokens which slice.

`layer_runs.py` tabulates time and memory of every contiguous run of layers, and `cut.py` picks the cuts with the least load.
`stage_costs.py` turns a partition into the costs that schedules are timed on. `slices.py` cuts sequences into slices.
"""
