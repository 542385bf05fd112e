"""Partitions: which layers make up which stage.

`layer_runs.py` tabulates time and memory of every contiguous run of layers, and `cut.py` picks the cuts with the least load, by
`chain.py` for one stage per rank, `nested.py` for V placements and `any_placement.py` for the rest. `stage_costs.py` turns a
partition into the costs that schedules are timed on, and `recut.py` shifts the cuts under a schedule that has been timed.
"""
