"""The planner: from a model and a memory limit to the best schedule found, with proof.

`plan.py` is the door. A checked `Request` is cut into `Problem`s (one placement with its costs and limits), the `Explorer` turns each
into `Candidate`s by timing named schedules, searching orders and bounding what is possible, and the best candidate becomes the `Plan`, or
`advice.py` explains why none fits. The rooms: `profile/` the model's numbers, `partition/` layers to stages, `order_search/` good orders,
`bounds/` lower bounds; `exact.py` is the CP-SAT solver.
"""
