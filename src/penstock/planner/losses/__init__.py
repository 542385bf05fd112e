"""Going on after a loss: the microbatches of a lost rank run on the ranks that hold the same stages in other replicas.

A mesh has several replicas of one pipeline; `survivors.py` says which ranks are left, and which of them run what. When ranks are lost, one
joint schedule over all survivors takes the place of the replicas' own: microbatch k of replica d becomes microbatch k x replicas + d, and
a placement with one copy of the model per replica says which rank runs it. `merged_rows.py` makes such schedules, and `take_over.py` is the
door, which chooses among them. Everything is deterministic: ranks that know who was lost need no messages to agree on the new schedule.
"""

from penstock.planner.losses.survivors import Place, Survivors
from penstock.planner.losses.take_over import TakeOver, take_over

__all__ = ["Place", "Survivors", "TakeOver", "take_over"]
