"""A training run from the command line: measure, plan, prove, train, compare."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.narrate import Narrator
from penstock.cli.wish import Wish
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.planner.plan import Plan
    from penstock.runtime.train.ranks import RankProcesses
    from penstock.runtime.train.trainer import TrainingResult
    from penstock.simulator.differences import Differences
    from penstock.verifier.proof import Proof


class Session:
    """One run: what was asked for, and what is known of it so far."""

    def __init__(self, wish: Wish, *, quiet: bool) -> None:
        from penstock.cli.loading import load_script

        self.wish = wish
        self.plan: Plan | None = None
        self.table: Any = None
        self.proof: Proof | None = None
        self.trained: TrainingResult | None = None
        self.first = True
        self.load = partial(load_script, wish.source, os.getcwd())
        self.load()  # says at once what is wrong with it
        self.how = wish.how()
        self.narrator = Narrator(quiet)
        self.begun = time.perf_counter()

    def run(self) -> None:
        """All of it; on the first rank the results are there afterwards."""
        from penstock.runtime.train.ranks import open_ranks
        from penstock.runtime.transport.current_group import rank, under_torchrun

        self.first = not under_torchrun() or rank() == 0
        if not self.first:
            self.narrator = Narrator(quiet=True, silent=True)
        ranks = self.wish.ranks
        if self.wish.given is not None and not under_torchrun():
            ranks = self._given_ranks()
        with self.narrator.busy("starting the processes"), open_ranks(ranks) as started:
            self._prepare(started)
            self._train(started)
        if self.first:
            self._compare()

    def _given_ranks(self) -> int:
        given, asked = self.wish.given, self.wish.ranks
        ranks = int(getattr(given, "schedule", given).ranks)
        if asked not in (None, ranks):
            raise UsageError(f"--ranks {asked}: {self.wish.schedule} is for {ranks}: leave it out, or plan anew")
        return ranks

    # Before training --------------------------------------------------------------------------------------------------

    def _prepare(self, started: RankProcesses) -> None:
        from penstock.planner.plan import Plan
        from penstock.verifier.verify import verify

        what = self._planned(started) if self.wish.is_planned else self.wish.given or self.wish.named(started.ranks)
        if isinstance(what, Plan):
            self.plan, self.table = what, what.schedule
            self.proof = what.proof
        else:
            from penstock.passes.lower import lower

            self.table = what
            self.proof = verify(what if what.lowered else lower(what))
        self.narrator.proof(self.proof, self.plan)

    def _planned(self, started: RankProcesses) -> Plan:
        from penstock.runtime.train.trainer import profile_file

        sizes = self.wish.sizes(started.ranks)
        with self.narrator.measuring(sizes) as tell:
            profile = started.run(profile_file, self.load, self.how, sizes, report=tell)[0]
        self.narrator.profile(profile)
        found: Plan = started.run_once(lambda: self._search(profile, started.ranks))
        self.narrator.plan(found)
        return found

    def _search(self, profile: Any, ranks: int) -> Plan:
        """The plan; Ctrl-C ends the whole run here, for a command that trains is not asked for half a plan."""
        from penstock.cli.interrupt import interruptible
        from penstock.planner.plan import plan

        wish = self.wish
        named = None if wish.schedule == "auto" else [wish.schedule]
        limit: Any = wish.memory_limit
        with interruptible() as stopped, self.narrator.planning(profile) as tell:
            asked: dict[str, Any] = {"memory_limit": limit, "schedules": named, "recompute": wish.recompute, "seconds": wish.seconds}
            found = plan(profile, ranks=ranks, batch=wish.batch, seed=wish.seed, progress=tell, stop=stopped, **asked)
        if stopped():
            raise KeyboardInterrupt
        return found

    # Training ---------------------------------------------------------------------------------------------------------

    def _train(self, started: RankProcesses) -> None:
        from penstock.runtime.train.trainer import train

        with self.narrator.training(self.wish.steps, self.wish.batch) as tell:
            what = self.table if self.plan is None else self.plan
            self.trained = started.run(train, self.load, what, self.how, report=tell)[0]

    def _compare(self) -> None:
        assert self.trained is not None
        self.narrator.trained(self.trained, self.wish)
        self.narrator.parity(self.trained)
        found = self.differences
        if found is not None:
            self.narrator.differences(found, self.plan)

    @property
    def differences(self) -> Differences | None:
        """The measured step over the predicted one. Where ranks share cores, what the prediction could not know is scaled away."""
        from penstock.simulator.differences import differences

        if self.plan is None or self.trained is None or self.trained.timeline is None:
            return None
        predicted, measured = self.plan.predicted, self.trained.timeline
        shared = self.trained.device == "cpu" and (os.cpu_count() or 1) < predicted.ranks
        return differences(predicted, measured, scale=float(measured.busy.sum() / predicted.busy.sum()) if shared else 1.0)

    @property
    def equal(self) -> bool:
        """Whether whatever was compared with the unpipelined model is equal to it."""
        return self.trained is None or self.trained.equal

    # Results ----------------------------------------------------------------------------------------------------------

    def save(self, plan: Path | None, record: Path | None, report: Path | None) -> None:
        """Write what was asked for."""
        if plan is not None and self.plan is not None:
            self.plan.save(plan)
            self.narrator.saved("plan", plan)
        if record is not None and self.trained is not None and self.trained.timeline is not None:
            self.trained.timeline.save(record, **({} if record.name.endswith(".json") else {"unit": "s"}))
            self.narrator.saved("measured step", record)
        if report is not None:
            from penstock.cli.training_page import page
            from penstock.ir.csv_form import write_whole

            report.parent.mkdir(parents=True, exist_ok=True)
            write_whole(report, page(self))
            self.narrator.saved("report", report)

    def ended(self) -> str:
        """What to say after Ctrl-C."""
        step, folder = self.narrator.step, self.wish.checkpoints
        where = f" after step {step} of {self.wish.steps}" if step else ""
        again = f"; the same command goes on from the last checkpoint in {folder}" if folder is not None and step else ""
        return f"interrupted{where}: all processes have ended{again}"

    def summary(self) -> list[str]:
        """The last lines."""
        return list(self._summary())

    def _summary(self) -> Iterator[str]:
        done = self.trained
        assert done is not None
        if done.saved is not None:
            yield f"\nThe last checkpoint is {done.saved}"
        yield f"\nThe run took {time.perf_counter() - self.begun:.0f} s in all"

    def data(self) -> dict[str, Any]:
        """The results as plain data."""
        done, laid = self.trained, self.differences
        assert done is not None
        return {
            "source": self.wish.source,
            "schedule": self.table.name,
            "ranks": self.table.ranks,
            "microbatches": self.table.microbatches,
            "begun": done.resumed_at,
            "steps": self.wish.steps,
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
