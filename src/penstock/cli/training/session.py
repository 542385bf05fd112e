"""A training run: measure, plan, prove, train, compare."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.output import catch_interrupt, show_steps
from penstock.cli.sources import load_script
from penstock.cli.training.options import AUTO, TrainOptions
from penstock.cli.training.report import TrainConsole, describe_parity, format_median, write_report
from penstock.errors import PlanError, UsageError
from penstock.ir.formats.csv_form import write_whole
from penstock.passes.lower import lower
from penstock.planner.plan import Plan, plan
from penstock.simulator.comparison.differences import AUTO as AUTO_SCALE
from penstock.simulator.comparison.differences import Differences, differences
from penstock.simulator.shared_cores import share_cores
from penstock.text.numbers import format_count
from penstock.verifier.verify import verify

if TYPE_CHECKING:
    from penstock.runtime.train.ranks import RankProcesses
    from penstock.runtime.train.trainer import TrainingResult
    from penstock.simulator.timeline import Timeline
    from penstock.verifier.proof import Proof


ROUNDS, ROUND_STEPS, WARM_UP = 3, 6, 2
"""How two schedules are measured in turns: the rounds of each, its steps per round, and the first ones of them, which do not count."""


SAME = 1.0
"""The speedup from which the plan counts as the faster one."""


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Contest:
    """The plan against another schedule within the same limit: the seconds of steps that were measured in turns."""

    plan: Plan
    """The plan of the other schedule."""
    own: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """How many times as fast the plan is: the ratio of the median steps."""
        return statistics.median(self.other) / statistics.median(self.own)


class Session:
    """One run: its options, and its results so far."""

    def __init__(self, options: TrainOptions, *, quiet: bool) -> None:
        self.options = options
        self.plan: Plan | None = None
        self.table: Any = None
        self.proof: Proof | None = None
        self.trained: TrainingResult | None = None
        self.contest: Contest | None = None
        self.first = True
        self.load = partial(load_script, options.source, os.getcwd())
        self.load()  # reports mistakes in the file at once
        self.how = options.build_options()
        self.console = TrainConsole(quiet)
        self.begun = time.perf_counter()

    def run(self) -> None:
        """Run everything; afterwards, the first rank has the results."""
        from penstock.runtime.train.ranks import open_ranks
        from penstock.runtime.transport.current_group import is_under_torchrun, rank

        self.first = not is_under_torchrun() or rank() == 0
        if not self.first:
            self.console = TrainConsole(quiet=True, silent=True)
        ranks = self.options.ranks
        if self.options.loaded is not None and not is_under_torchrun():
            ranks = self._read_file_ranks()
        with self.console.announce_start(ranks), open_ranks(ranks) as started:
            self._prepare(started)
            self._train(started)
            if self.contest is not None:
                self._measure_both(started)

    def _read_file_ranks(self) -> int:
        loaded, asked = self.options.loaded, self.options.ranks
        ranks = int(getattr(loaded, "schedule", loaded).ranks)
        if asked not in (None, ranks):
            raise UsageError(f"--ranks {asked}: {self.options.schedule} is for {ranks}: leave it out, or plan again")
        return ranks

    # Before training --------------------------------------------------------------------------------------------------

    def _prepare(self, started: RankProcesses) -> None:
        options = self.options
        chosen = self._make_plan(started) if options.is_planned else options.loaded or options.build_schedule(started.ranks)
        if isinstance(chosen, Plan):
            self.plan, self.table = chosen, chosen.schedule
            self.proof = chosen.proof
        else:
            self.table = chosen
            self.proof = verify(chosen if chosen.lowered else lower(chosen))
        self.console.proof(self.proof)

    def _make_plan(self, started: RankProcesses) -> Plan:
        from penstock.runtime.train.trainer import profile_file

        sizes = self.options.microbatch_sizes(started.ranks)
        with self.console.show_measuring(sizes) as tell:
            profile = started.run(profile_file, self.load, self.how, sizes, report=tell)[0]
        self.console.profile(profile)
        schedules = None if self.options.schedule == AUTO else [self.options.schedule]
        plan: Plan = started.run_once(lambda: self._search(profile, started.ranks, schedules))
        self.console.plan(plan)
        against = self.options.against
        if against is not None:
            other: Plan | str = started.run_once(lambda: self._search_other(profile, started.ranks, against))
            self.contest = None if isinstance(other, str) else Contest(other)
            self.console.report_other_plan(against, other)
        return plan

    def _search_other(self, profile: Any, ranks: int, name: str) -> Plan | str:
        """Plan the schedule to compare with; if it does not fit, give the reason."""
        try:
            return self._search(profile, ranks, [name])
        except PlanError as error:
            return str(error).partition("\n")[0]

    def _search(self, profile: Any, ranks: int, schedules: list[str] | None) -> Plan:
        """Search for a plan. Ctrl-C ends the whole run here: half a plan is of no use to training."""
        asked = self.options
        options: dict[str, Any] = {"memory_limit": asked.memory_limit, "recompute": asked.recompute, "seconds": asked.seconds}
        options["schedules"] = schedules
        what = "every schedule" if schedules is None else ", ".join(schedules)
        with catch_interrupt() as stopped, self.console.show_planning_progress(profile, what, asked.seconds) as tell:
            best = plan(profile, ranks=ranks, batch=asked.batch, seed=asked.seed, progress=tell, stop=stopped, **options)
        if stopped():
            raise KeyboardInterrupt
        return best

    # Training ---------------------------------------------------------------------------------------------------------

    def _train(self, started: RankProcesses) -> None:
        from penstock.runtime.train.trainer import train

        with self.console.show_training(self.options.steps, self.options.batch) as tell:
            chosen = self.table if self.plan is None else self.plan
            self.trained = started.run(train, self.load, chosen, self.how, report=tell)[0]
        if self.first:
            self._compare()

    def _measure_both(self, started: RankProcesses) -> None:
        """Train a few steps with each of the two plans in turns, so that both meet the machine in the same state."""
        from penstock.runtime.train.trainer import train

        assert self.contest is not None
        how = replace(self.how, steps=ROUND_STEPS, folder=None, recorded=0, check=False, open_metrics=nullcontext)
        with self.console.show_measuring_both(self.contest.plan.name, ROUNDS * 2 * ROUND_STEPS) as tell:
            for _ in range(ROUNDS):
                for chosen, seconds in ((self.plan, self.contest.own), (self.contest.plan, self.contest.other)):
                    result = started.run(train, self.load, chosen, how, report=tell)[0]
                    seconds.extend([] if result is None else result.seconds[WARM_UP:])
        if self.first:
            self.console.contest(self)

    def _compare(self) -> None:
        assert self.trained is not None
        self.console.report_training(self.trained, self.options)
        self.console.parity(self.trained)
        if self.differences is not None:
            self.console.differences(self.differences, self.cores)

    @property
    def cores(self) -> int | None:
        """The cores that the ranks share; None if each rank has one of its own."""
        cores = count_cores()
        return cores if self.how.device == "cpu" and self.first and cores < self.table.ranks else None

    def predict(self, plan: Plan) -> Timeline:
        """Predict a step of a plan on this machine: on shared cores, if there are not enough."""
        return plan.predicted if self.cores is None else share_cores(plan.predicted, self.cores)

    @cached_property
    def differences(self) -> Differences | None:
        """The measured step over the one that was predicted for this machine."""
        if self.plan is None or self.trained is None or self.trained.timeline is None:
            return None
        predicted = self.predict(self.plan)
        return differences(predicted, self.trained.timeline, scale=None if predicted.units.time_unit else AUTO_SCALE)

    @property
    def result(self) -> str:
        """The result of the run in a sentence to repeat."""
        done, contest = self.trained, self.contest
        assert done is not None
        equal = describe_parity(done)
        if contest is None or self.plan is None:
            return f"The loss fell from {done.losses[0]:.2f} to {done.losses[-1]:.2f} on {format_count(self.table.ranks, 'rank')}{equal}."
        limit = self.plan.memory_limit
        within = "" if limit is None else f"Within the same {self.plan.units.size(max(limit))} per rank, "
        faster = f"{contest.speedup:.2f} times as fast as" if contest.speedup >= SAME else f"{1 / contest.speedup:.2f} times as long as"
        verb = "trains" if contest.speedup >= SAME else "takes"
        figures = f"{format_median(contest.own)} against {format_median(contest.other)} per step, measured"
        sentence = f"{within}the plan {verb} {faster} {contest.plan.name} ({figures}){equal}."
        return sentence[0].upper() + sentence[1:]

    @property
    def equal(self) -> bool:
        """Whether all comparisons with the unpipelined model were equal."""
        return self.trained is None or self.trained.equal

    # Results ----------------------------------------------------------------------------------------------------------

    def save(self, plan: Path | None, record: Path | None, report: Path | None) -> None:
        """Write the files that were asked for."""
        if plan is not None and self.plan is not None:
            self.plan.save(plan)
            self.console.report_file("plan", plan)
        if record is not None and self.trained is not None and self.trained.timeline is not None:
            self.trained.timeline.save(record, **({} if record.name.endswith(".json") else {"unit": "s"}))
            self.console.report_file("measured step", record)
        if report is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
            with show_steps(1) as step:
                step("drawing the report")
                write_whole(report, write_report(self))
            self.console.report_file("report", report)

    def describe_interruption(self) -> str:
        """Describe the state of the run after Ctrl-C."""
        step, folder = self.console.step, self.options.checkpoints
        where = f" after step {step} of {self.options.steps}" if step else ""
        again = f"; the same command resumes from the last checkpoint in {folder}" if folder is not None and step else ""
        return f"interrupted{where}: all processes have ended{again}"

    def summary(self) -> Iterator[str]:
        """Give the last lines of the output."""
        done = self.trained
        assert done is not None
        if done.saved is not None:
            yield f"\nThe last checkpoint is {done.saved}"
        yield f"\nThe run took {time.perf_counter() - self.begun:.0f} s in total"
        if done.losses:
            yield f"\n{self.result}"

    def _contest_data(self, contest: Contest) -> dict[str, Any]:
        predicted = None if self.plan is None else self.predict(self.plan).makespan
        other = {"schedule": contest.plan.name, "predicted": self.predict(contest.plan).makespan, "measured": contest.other}
        return {**other, "own_predicted": predicted, "own_measured": contest.own, "speedup": contest.speedup}

    def data(self) -> dict[str, Any]:
        """The results as plain data."""
        done, laid = self.trained, self.differences
        assert done is not None
        return {
            "source": self.options.source,
            "schedule": self.table.name,
            "ranks": self.table.ranks,
            "microbatches": self.table.microbatches,
            "begun": done.resumed_at,
            "steps": self.options.steps,
            "losses": done.losses,
            "seconds": done.seconds,
            "parity": {str(step): [result.in_words() for result in parity.all] for step, parity in done.parity.items()},
            "equal": self.equal if done.parity else None,
            "predicted": None if self.plan is None else self.plan.predicted.makespan,
            "scale": None if laid is None else laid.scale,
            "measured": None if done.timeline is None else done.timeline.makespan,
            "cores": self.cores,
            "against": None if self.contest is None else self._contest_data(self.contest),
            "loaded": done.loaded,
            "saved": done.saved,
        }
