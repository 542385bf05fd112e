"""The exact solver: small problems solved by CP-SAT (the `solve` extra).

`instance.py` rounds a problem down to whole numbers, `model.py` writes it as a CP-SAT model and reads schedules back, and
`solver.py` runs the model within a budget. A problem and a starting schedule go in; a schedule that the simulator has timed,
and a lower bound, come out.
"""
