"""What can be measured of a model and of a run: profiles for the planner, recorded timelines, and parity with the unpipelined model.

`profile.py` times each layer and counts its memory (`memory.py`), and `link.py` times messages between ranks; both give the planner its
`Profile`. `recorder.py` turns the clock readings of all ranks into the `Timeline` of a step. `parity.py` runs a step again on copies of
the model, without the pipeline, and compares everything that the step computed and left behind. Neither profiling nor parity leaves a
trace in the model (`preserved_state.py`).
"""
