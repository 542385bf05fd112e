"""A training run: measure, plan, prove, train, compare."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.training.console import TrainConsole
from penstock.cli.training.options import AUTO, TrainOptions
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.planner.plan import Plan
    from penstock.runtime.train.ranks import RankProcesses
    from penstock.runtime.train.trainer import TrainingResult
    from penstock.simulator.comparison.differences import Differences
    from penstock.verifier.proof import Proof


class Session:
    """One run: its options, and its results so far."""

    def __init__(self, options: TrainOptions, *, quiet: bool) -> None:
        from penstock.cli.user_module import load_script

        self.options = options
        self.plan: Plan | None = None
        self.table: Any = None
        self.proof: Proof | None = None
        self.trained: TrainingResult | None = None
        self.first = True
        self.load = partial(load_script, options.source, os.getcwd())
        self.load()  # reports mistakes in the file at once
        self.how = options.how()
        self.console = TrainConsole(quiet)
        self.begun = time.perf_counter()

    def run(self) -> None:
        """Run everything; afterwards, the first rank has the results."""
        from penstock.runtime.train.ranks import open_ranks
        from penstock.runtime.transport.current_group import rank, under_torchrun

        self.first = not under_torchrun() or rank() == 0
        if not self.first:
            self.console = TrainConsole(quiet=True, silent=True)
        ranks = self.options.ranks
        if self.options.loaded is not None and not under_torchrun():
            ranks = self._file_ranks()
        with self.console.busy("starting the processes"), open_ranks(ranks) as started:
            self._prepare(started)
            self._train(started)
        if self.first:
            self._compare()

    def _file_ranks(self) -> int:
        loaded, asked = self.options.loaded, self.options.ranks
        ranks = int(getattr(loaded, "schedule", loaded).ranks)
        if asked not in (None, ranks):
            raise UsageError(f"--ranks {asked}: {self.options.schedule} is for {ranks}: leave it out, or plan again")
        return ranks

    # Before training --------------------------------------------------------------------------------------------------

    def _prepare(self, started: RankProcesses) -> None:
        from penstock.planner.plan import Plan
        from penstock.verifier.verify import verify

        options = self.options
        chosen = self._make_plan(started) if options.is_planned else options.loaded or options.build_schedule(started.ranks)
        if isinstance(chosen, Plan):
            self.plan, self.table = chosen, chosen.schedule
            self.proof = chosen.proof
        else:
            from penstock.passes.lower import lower

            self.table = chosen
            self.proof = verify(chosen if chosen.lowered else lower(chosen))
        self.console.proof(self.proof, self.plan)

    def _make_plan(self, started: RankProcesses) -> Plan:
        from penstock.runtime.train.trainer import profile_file

        sizes = self.options.microbatch_sizes(started.ranks)
        with self.console.measuring(sizes) as tell:
            profile = started.run(profile_file, self.load, self.how, sizes, report=tell)[0]
        self.console.profile(profile)
        plan: Plan = started.run_once(lambda: self._search(profile, started.ranks))
        self.console.plan(plan)
        return plan

    def _search(self, profile: Any, ranks: int) -> Plan:
        """Search for a plan. Ctrl-C ends the whole run here: half a plan is of no use to training."""
        from penstock.cli.progress import catch_interrupt
        from penstock.planner.plan import plan

        given = self.options
        options: dict[str, Any] = {"memory_limit": given.memory_limit, "recompute": given.recompute, "seconds": given.seconds}
        options["schedules"] = None if given.schedule == AUTO else [given.schedule]
        with catch_interrupt() as stopped, self.console.planning(profile) as tell:
            best = plan(profile, ranks=ranks, batch=given.batch, seed=given.seed, progress=tell, stop=stopped, **options)
        if stopped():
            raise KeyboardInterrupt
        return best

    # Training ---------------------------------------------------------------------------------------------------------

    def _train(self, started: RankProcesses) -> None:
        from penstock.runtime.train.trainer import train

        with self.console.training(self.options.steps, self.options.batch) as tell:
            chosen = self.table if self.plan is None else self.plan
            self.trained = started.run(train, self.load, chosen, self.how, report=tell)[0]

    def _compare(self) -> None:
        assert self.trained is not None
        self.console.trained(self.trained, self.options)
        self.console.parity(self.trained)
        found = self.differences
        if found is not None:
            self.console.differences(found)

    @property
    def differences(self) -> Differences | None:
        """The measured step over the predicted one. If ranks share cores, the prediction is scaled by the mean slowdown."""
        from penstock.simulator.comparison.differences import differences

        if self.plan is None or self.trained is None or self.trained.timeline is None:
            return None
        predicted, measured = self.plan.predicted, self.trained.timeline
        shared = self.trained.device == "cpu" and (os.cpu_count() or 1) < predicted.ranks
        return differences(predicted, measured, scale=float(measured.busy.sum() / predicted.busy.sum()) if shared else 1.0)

    @property
    def equal(self) -> bool:
        """Whether all comparisons with the unpipelined model were equal."""
        return self.trained is None or self.trained.equal

    # Results ----------------------------------------------------------------------------------------------------------

    def save(self, plan: Path | None, record: Path | None, report: Path | None) -> None:
        """Write the files that were asked for."""
        if plan is not None and self.plan is not None:
            self.plan.save(plan)
            self.console.saved("plan", plan)
        if record is not None and self.trained is not None and self.trained.timeline is not None:
            self.trained.timeline.save(record, **({} if record.name.endswith(".json") else {"unit": "s"}))
            self.console.saved("measured step", record)
        if report is not None:
            from penstock.cli.training.report import write_report
            from penstock.ir.formats.csv_form import write_whole

            report.parent.mkdir(parents=True, exist_ok=True)
            write_whole(report, write_report(self))
            self.console.saved("report", report)

    def interrupted(self) -> str:
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
            "parity": {str(step): [each.in_words() for each in found.all] for step, found in done.parity.items()},
            "equal": self.equal if done.parity else None,
            "predicted": None if self.plan is None else self.plan.predicted.makespan,
            "scale": None if laid is None else laid.scale,
            "measured": None if done.timeline is None else done.timeline.makespan,
            "loaded": done.loaded,
            "saved": done.saved,
        }
