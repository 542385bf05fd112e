"""Lower bounds: times that no schedule can beat.

`lower_bound.py` bounds one problem (a placement with its costs and limits) and `overall.py` a whole model, however it is cut
and placed. A problem becomes `terms.py`, then the events of each stage (`events.py`), then bounds per rank: formulas in
`rank_bounds.py`, linear programs in `linear_program.py`, and CP-SAT on one rank in `one_rank_solver.py`; the best of them
counts.
"""
