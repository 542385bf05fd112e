"""The order search: a good order of compute actions for one problem.

`flat_problem.py` lays a problem out as flat arrays; list scheduling (`dispatch.py`, `dispatch_rules.py`) builds orders,
repeating patterns (`patterns.py`) and local search (`annealing.py`) improve them, and `timing.py` times them; `evaluator.py`
compiles these loops if numba is installed. `search.py` drives all of that within a budget, from a `Problem` and starting
schedules to the best schedule as the simulator times it.
"""
