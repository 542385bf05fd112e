"""The layers of a job in one configuration, whichever way its model is described."""

from __future__ import annotations

from penstock.planner.job.configuration import Configuration
from penstock.planner.job.job import Job
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.job.profile_costs import ProfileCosts

JobCosts = LayerCosts | ProfileCosts


def make_costs(job: Job, configuration: Configuration, recompute_all: bool = False) -> JobCosts:
    """The layers of the job in this configuration."""
    kind = LayerCosts if job.profile is None else ProfileCosts
    return kind(job, configuration, recompute_all)
