"""The output of a training run: headings and figures on stdout, live progress on stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cli.training.options import TrainOptions
    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan
    from penstock.planner.profile import Profile
    from penstock.runtime.train.trainer import TrainingProgress, TrainingResult
    from penstock.simulator.comparison.differences import Differences
    from penstock.verifier.proof import Proof

SHOWN = 6
"""Candidates of a plan that are listed."""
LINES = 10
"""Lines per training run if no bar can be drawn."""
BLOCKS = "▁▂▃▄▅▆▇█"


class TrainConsole:
    """Prints a run as it goes on. `quiet` prints nothing on stdout, `silent` nothing at all."""

    def __init__(self, quiet: bool, silent: bool = False) -> None:
        from rich.console import Console

        self.out = Console(highlight=False, quiet=quiet, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, quiet=silent, soft_wrap=True)
        self.silent = silent
        self.step = 0
        """The last step that has ended."""
        self._number = 0

    def head(self, title: str) -> None:
        from rich.text import Text

        self._number += 1
        self.out.print(Text(f"{chr(10) if self._number > 1 else ''}{self._number}. {title}", style="bold"))

    def say(self, text: str) -> None:
        self.out.print("\n".join(f"   {line}".rstrip() for line in text.splitlines()), markup=False)

    # Live -------------------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> bool:
        return sys.stderr.isatty() and not self.silent

    def busy(self, work: str) -> AbstractContextManager[None]:
        """Announce work that shows no progress."""
        if self._live:
            self.err.print(f"[dim]{work} ...[/dim]")
        return nullcontext()

    @contextmanager
    def measuring(self, sizes: list[int]) -> Iterator[Callable[[TrainingProgress], None]]:
        self.head(f"Measure the model layer by layer, for microbatches of {' and '.join(map(str, sizes))}")
        if not self._live:
            yield lambda progress: None
            return
        with self.err.status("measuring") as status:
            yield lambda progress: status.update(progress.activity)

    def planning(self, profile: Profile) -> AbstractContextManager[Callable[[Any], None]]:
        from penstock.cli.progress import show_planning
        from penstock.text.units import Units

        return show_planning(Units(profile.time_unit, in_bytes=True)) if self._live else nullcontext(lambda progress: None)

    @contextmanager
    def training(self, steps: int, batch: int) -> Iterator[Callable[[TrainingProgress], None]]:
        from penstock.text.numbers import format_count

        self.head(f"Train {format_count(steps, 'step')} of {format_count(batch, 'sample')}")
        shown = _bar(steps, batch, self) if self._live else nullcontext(self._lines(steps))
        with shown as show:

            def tell(progress: TrainingProgress) -> None:
                self.step = max(self.step, progress.step)
                show(progress)

            yield tell

    def _lines(self, steps: int) -> Callable[[TrainingProgress], None]:
        """Print a line now and then."""

        def tell(progress: TrainingProgress) -> None:
            if progress.loss is None:
                self.err.print(f"   {progress.activity}")
            elif progress.step in (1, steps) or progress.step % max(1, steps // LINES) == 0:
                self.err.print(f"   step {progress.step} of {steps}: loss {progress.loss:.4f}, {progress.seconds * 1e3:.0f} ms")

        return tell

    # Results ----------------------------------------------------------------------------------------------------------

    def profile(self, profile: Profile) -> None:
        from penstock.text.units import Units

        units, sizes = Units(profile.time_unit, in_bytes=True), [profile.at(size) for size in profile.sizes]
        times = ", ".join(f"{units.time(at.time)} for a microbatch of {at.microbatch}" for at in sizes)
        held = sum(layer.parameters + layer.gradients + layer.optimizer for layer in profile.layers)
        self.say(f"{len(profile)} layers, {times}; parameters, gradients and optimizer {units.size(held)}")
        if profile.bandwidth is not None:
            self.say(f"messages between ranks: latency {units.time(profile.latency)}, bandwidth {units.size(profile.bandwidth)} per second")

    def plan(self, plan: Plan) -> None:
        self.head(f"Plan: {plan.name}, {plan.placement.kind} placement, {plan.microbatches} microbatches of {plan.microbatch}")
        units = plan.units
        self.say(f"predicted {units.time(plan.objective)} per step, bubble {plan.predicted.bubble:.1%}; bound {units.time(plan.bound)}")
        peak = units.size(max(plan.predicted.peak_memory))
        limit = "" if plan.memory_limit is None else f" of {units.size(max(plan.memory_limit))} allowed"
        self.say(f"layers per stage {', '.join(map(str, plan.partition))}; the fullest rank holds {peak}{limit}")
        self.say("\n" + "\n".join(_candidate_lines(plan, SHOWN)))

    def proof(self, proof: Proof, plan: Plan | None) -> None:
        self.head("Prove it before it runs")
        self.say(str(proof) if plan is None else _proof_in_units(proof, plan))

    def trained(self, done: TrainingResult, options: TrainOptions) -> None:
        from penstock.text.numbers import format_count

        if done.loaded is not None:
            self.say(f"resumed from {done.loaded}")
        if not done.losses:
            self.say(f"nothing to do: the checkpoint is at step {done.resumed_at}; give more --steps")
            return
        median = sorted(done.seconds)[len(done.seconds) // 2]
        self.say(f"loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f}   {sparkline(done.losses)}")
        self.say(f"{format_count(len(done.losses), 'step')}, {median * 1e3:.0f} ms each, {options.batch / median:.0f} samples per second")

    def parity(self, done: TrainingResult) -> None:
        if not done.parity:
            return
        self.head("Compare loss and gradients with the unpipelined model")
        for step, parity in done.parity.items():
            for comparison in parity.all:
                self.say(f"step {step}, {comparison.in_words()}")

    def differences(self, differences: Differences) -> None:
        from penstock.text.units import Units

        units = Units("s")
        self.head("Overlay the measured and the predicted step")
        if differences.scale != 1.0:
            self.say(f"the ranks share this machine's cores: predicted times are multiplied by {differences.scale:.2f}, the mean slowdown")
        both, bubble = differences.makespan, differences.bubble
        self.say(f"makespan {units.time(both.predicted)} predicted, {units.time(both.measured)} measured (the median of the last steps)")
        self.say(f"bubble {bubble.predicted:.1%} predicted, {bubble.measured:.1%} measured")

    def saved(self, result: str, path: Path) -> None:
        self.out.print(f"\nThe {result} is in [bold]{path}[/bold]")


def _candidate_lines(plan: Plan, shown: int) -> Iterator[str]:
    """The fastest candidates that fit and the fastest that do not, one line each."""
    from penstock.text.table import format_table

    units = plan.units
    timed = sorted((each for each in plan.alternatives if each.objective is not None), key=lambda each: each.objective or 0.0)
    chosen = plan.alternatives[plan.chosen]
    rows: list[tuple[str, ...]] = [("", "candidate", "placement", "microbatches", "takes", "bubble", "peak", "")]
    fitting, over = [each for each in timed if each.fits], [each for each in timed if not each.fits]
    for candidate in [*dict.fromkeys([chosen, *fitting[:shown]]), *over[: shown // 2]]:
        excess = "" if candidate.fits else f"{units.size(candidate.excess or 0.0)} over the limit"
        rows.append(("->" if candidate is chosen else "", *candidate_cells(plan, candidate), excess))
    yield from format_table(rows, left=(1, 2, 7), indent="  ")
    yield f"  {len(fitting)} of {len(plan.alternatives)} candidates fit"


def candidate_cells(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    """Give the cells of a candidate in a table: name, placement, microbatches, time, bubble and peak memory."""
    units = plan.units
    microbatches, time = f"{candidate.microbatches} x {candidate.microbatch}", units.time(candidate.objective or 0.0)
    return candidate.name, candidate.placement, microbatches, time, f"{candidate.bubble or 0.0:.1%}", units.size(candidate.peak or 0.0)


def sparkline(values: list[float], width: int = 32) -> str:
    """Draw a row of blocks, as high as the values.

    >>> sparkline([1.0, 2.0, 3.0, 8.0])
    '▁▂▃█'
    """
    from penstock.cli.output import can_print

    parts = [values[len(values) * at // width : max(len(values) * (at + 1) // width, len(values) * at // width + 1)] for at in range(width)]
    means = [sum(part) / len(part) for part in parts if part] if len(values) > width else list(values)
    low, high = min(means), max(means)
    steps = ((value - low) / (high - low) * (len(BLOCKS) - 1) if high > low else 0.0 for value in means)
    return "".join(BLOCKS[round(step)] for step in steps) if can_print(BLOCKS) and not math.isnan(sum(means)) else ""


def _proof_in_units(proof: Proof, plan: Plan) -> str:
    """Write the proof with memory in the plan's units."""
    lines = [line for line in str(proof).splitlines() if "peak memory:" not in line]
    if plan.memory_limit is None:
        return "\n".join(lines)
    rank = max(range(len(plan.predicted.peak_memory)), key=plan.predicted.peak_memory.__getitem__)
    held, limit = plan.predicted.peak_memory[rank], plan.memory_limit[rank]
    return "\n".join([*lines, f"  peak memory: {plan.units.size(held)} of {plan.units.size(limit)} allowed, on rank {rank}"])


@contextmanager
def _bar(steps: int, batch: int, console: TrainConsole) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show a bar with the loss and its curve."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    loss, what = Column(no_wrap=True, min_width=10), Column(no_wrap=True, ratio=1)
    texts = [TextColumn("{task.fields[loss]}", "bold", table_column=loss), TextColumn("{task.fields[what]}", "dim", table_column=what)]
    columns = [BarColumn(bar_width=16), MofNCompleteColumn(table_column=Column(no_wrap=True)), TimeElapsedColumn(), *texts]
    losses: list[float] = []
    with Progress(*columns, console=console.err, transient=True, expand=True) as bar:
        task = bar.add_task("", total=steps, loss="", what="building the pipeline")

        def show(progress: TrainingProgress) -> None:
            if progress.loss is None:
                bar.update(task, completed=progress.step, what=progress.activity)
                return
            losses.append(progress.loss)
            speed = f"{batch / progress.seconds:.0f} samples/s" if progress.seconds else ""
            bar.update(task, completed=progress.step, loss=f"loss {progress.loss:.3f}", what=f"{sparkline(losses, 12)} {speed}")

        yield show
