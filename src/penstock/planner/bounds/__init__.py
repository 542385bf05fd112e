"""Lower bounds: times that no schedule can beat.

`lower_bound.py` bounds one problem (a placement with its costs and limits) and `overall.py` a whole model, however it is cut
and placed. A problem becomes `terms.py`, with the events of each stage, then bounds per rank: formulas in `rank_bounds.py`,
linear programs and CP-SAT on one rank in `solver_bounds.py`; the best of them counts. Solvers count in the units of `whole_numbers.py`.
"""
