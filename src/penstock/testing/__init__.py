"""The public conformance suite: give it your schedule, get every check.

    from penstock.testing import ScheduleConformance

    class TestMine(ScheduleConformance):
        name = "mine"  # as registered

runs under pytest over a grid of ranks, chunks and microbatches. Without pytest, `check_schedule` checks one schedule and
`conformance_cases` lists the grid. Nothing here imports pytest.
"""

from penstock.testing.conformance import Case, ScheduleConformance, check_schedule, conformance_cases

__all__ = ["Case", "ScheduleConformance", "check_schedule", "conformance_cases"]
