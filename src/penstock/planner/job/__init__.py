"""Whole jobs: how many GPUs for pipeline, data, tensor and context parallelism, and what each of them holds and does.

`job.py` has the model, the batch and the optimizer; `machines.py` the GPUs and their links; `configuration.py` one choice of degrees,
microbatch size, sharding and vocabulary split. `layer_costs.py` turns a configuration of a transformer into a profile of layers, and
`profile_costs.py` that of a measured model; both shard them by `sharding.py`. `pipelines.py` has layers shared out by `block_shares.py` or
`layer_shares.py` and the named schedules timed on the result by the simulator, `search.py` goes through the configurations in the order of
their lower bounds, and `plan.py` is the door. `report.py` writes the result in words.
"""

from penstock.planner.job.configuration import Configuration
from penstock.planner.job.job import Job
from penstock.planner.job.machines import Machines
from penstock.planner.job.plan import JobPlan, plan_job, predict_job

__all__ = ["Configuration", "Job", "JobPlan", "Machines", "plan_job", "predict_job"]
