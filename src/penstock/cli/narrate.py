"""What a training run says while it goes on: headings and figures on stdout, live progress on stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cli.wish import Wish
    from penstock.planner.plan import Plan
    from penstock.planner.profile import Profile
    from penstock.runtime.train.trainer import TrainingProgress, TrainingResult
    from penstock.simulator.differences import Differences
    from penstock.verifier.proof import Proof

SHOWN = 6
"""Candidates that are listed."""
LINES = 10
"""Lines about training where no bar can be drawn."""
BLOCKS = "▁▂▃▄▅▆▇█"


class Narrator:
    """Speaks for the run. `quiet` says nothing on stdout, `silent` nothing at all."""

    def __init__(self, quiet: bool, silent: bool = False) -> None:
        from rich.console import Console

        self.out = Console(highlight=False, quiet=quiet, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, quiet=silent, soft_wrap=True)
        self.silent = silent
        self.step = 0
        """The last one that was made."""
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

    def busy(self, what: str) -> AbstractContextManager[None]:
        """Say that something is under way which shows nothing of itself."""
        if self._live:
            self.err.print(f"[dim]{what} ...[/dim]")
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
        from penstock.cli.live import live
        from penstock.planner.units import Units

        return live(Units(profile.time_unit, in_bytes=True)) if self._live else nullcontext(lambda progress: None)

    @contextmanager
    def training(self, steps: int, batch: int) -> Iterator[Callable[[TrainingProgress], None]]:
        from penstock.draw.numbers import count

        self.head(f"Train {count(steps, 'step')} of {count(batch, 'sample')}")
        shown = _bar(steps, batch, self) if self._live else nullcontext(self._lines(steps))
        with shown as show:

            def tell(progress: TrainingProgress) -> None:
                self.step = max(self.step, progress.step)
                show(progress)

            yield tell

    def _lines(self, steps: int) -> Callable[[TrainingProgress], None]:
        """A line now and then."""

        def tell(progress: TrainingProgress) -> None:
            if progress.loss is None:
                self.err.print(f"   {progress.activity}")
            elif progress.step in (1, steps) or progress.step % max(1, steps // LINES) == 0:
                self.err.print(f"   step {progress.step} of {steps}: loss {progress.loss:.4f}, {progress.seconds * 1e3:.0f} ms")

        return tell

    # Results ----------------------------------------------------------------------------------------------------------

    def profile(self, found: Profile) -> None:
        from penstock.planner.units import Units

        units, sizes = Units(found.time_unit, in_bytes=True), [found.at(size) for size in found.sizes]
        times = ", ".join(f"{units.time(each.time)} for a microbatch of {each.microbatch}" for each in sizes)
        held = sum(layer.parameters + layer.gradients + layer.optimizer for layer in found.layers)
        self.say(f"{len(found)} layers, {times}; parameters, gradients and optimizer {units.size(held)}")
        if found.bandwidth is not None:
            self.say(f"a message between ranks takes {units.time(found.latency)} at least, then {units.size(found.bandwidth)} a second")

    def plan(self, found: Plan) -> None:
        self.head(f"Plan: {found.name}, {found.placement.kind} placement, {found.microbatches} microbatches of {found.microbatch}")
        units = found.units
        self.say(f"predicted {units.time(found.objective)} a step, bubble {found.predicted.bubble:.1%}; bound {units.time(found.bound)}")
        peak = units.size(max(found.predicted.peak_memory))
        limit = "" if found.memory_limit is None else f" of {units.size(max(found.memory_limit))} allowed"
        self.say(f"layers a stage {', '.join(map(str, found.partition))}; the fullest rank holds {peak}{limit}")
        self.say("\n" + "\n".join(candidates(found, SHOWN)))

    def proof(self, proof: Proof, plan: Plan | None) -> None:
        self.head("Prove it before it runs")
        self.say(str(proof) if plan is None else _without_memory(proof, plan))

    def trained(self, done: TrainingResult, wish: Wish) -> None:
        from penstock.draw.numbers import count

        if done.loaded is not None:
            self.say(f"went on from {done.loaded}")
        if not done.losses:
            self.say(f"nothing was left to do: the checkpoint is of step {done.resumed_at}; ask for more --steps")
            return
        middle = sorted(done.seconds)[len(done.seconds) // 2]
        self.say(f"loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f}   {sparkline(done.losses)}")
        self.say(f"{count(len(done.losses), 'step')}, {middle * 1e3:.0f} ms each, {wish.batch / middle:.0f} samples a second")

    def parity(self, done: TrainingResult) -> None:
        if not done.parity:
            return
        self.head("Compare loss and gradients with the unpipelined model")
        for step, found in done.parity.items():
            for each in found.all:
                self.say(f"step {step}, {each.in_words()}")

    def differences(self, found: Differences, plan: Plan | None) -> None:
        from penstock.planner.units import Units

        units = Units("s")
        self.head("Lay the measured over the predicted step")
        if found.scale != 1.0:
            self.say(f"the ranks share this machine's cores: predicted times are multiplied by {found.scale:.2f}, as the mean action took")
        both, bubble = found.makespan, found.bubble
        self.say(f"makespan {units.time(both.predicted)} predicted, {units.time(both.measured)} measured, the median of the last steps")
        self.say(f"bubble {bubble.predicted:.1%} predicted, {bubble.measured:.1%} measured")

    def saved(self, what: str, path: Path) -> None:
        self.out.print(f"\nThe {what} is in [bold]{path}[/bold]")


def candidates(plan: Plan, shown: int) -> Iterator[str]:
    """The quickest that fit and the quickest that do not, a line each."""
    from penstock.planner.units import table

    units = plan.units
    timed = sorted((each for each in plan.alternatives if each.objective is not None), key=lambda each: each.objective or 0.0)
    chosen = plan.alternatives[plan.chosen]
    rows: list[tuple[str, ...]] = [("", "candidate", "placement", "microbatches", "takes", "bubble", "peak", "")]
    fitting, over = [each for each in timed if each.fits], [each for each in timed if not each.fits]
    for each in [*dict.fromkeys([chosen, *fitting[:shown]]), *over[: shown // 2]]:
        said = (each.name, each.placement, f"{each.microbatches} x {each.microbatch}", units.time(each.objective or 0.0))
        end = "" if each.fits else f"{units.size(each.excess or 0.0)} over the limit"
        rows.append(("->" if each is chosen else "", *said, f"{each.bubble or 0.0:.1%}", units.size(each.peak or 0.0), end))
    yield from table(rows, left=(1, 2, 7))
    yield f"  {len(fitting)} of {len(plan.alternatives)} candidates fit"


def sparkline(values: list[float], width: int = 32) -> str:
    """The course of some values as a row of blocks.

    >>> sparkline([1.0, 2.0, 3.0, 8.0])
    '▁▂▃█'
    """
    from penstock.cli.output import can_print

    parts = [values[len(values) * at // width : max(len(values) * (at + 1) // width, len(values) * at // width + 1)] for at in range(width)]
    means = [sum(part) / len(part) for part in parts if part] if len(values) > width else list(values)
    low, high = min(means), max(means)
    steps = ((value - low) / (high - low) * (len(BLOCKS) - 1) if high > low else 0.0 for value in means)
    return "".join(BLOCKS[round(step)] for step in steps) if can_print(BLOCKS) and not math.isnan(sum(means)) else ""


def _without_memory(proof: Proof, plan: Plan) -> str:
    """The proof, with its memory in the plan's units."""
    lines = [line for line in str(proof).splitlines() if "peak memory:" not in line]
    if plan.memory_limit is None:
        return "\n".join(lines)
    rank = max(range(len(plan.predicted.peak_memory)), key=plan.predicted.peak_memory.__getitem__)
    held, limit = plan.predicted.peak_memory[rank], plan.memory_limit[rank]
    return "\n".join([*lines, f"  peak memory: {plan.units.size(held)} of {plan.units.size(limit)} allowed, on rank {rank}"])


@contextmanager
def _bar(steps: int, batch: int, narrator: Narrator) -> Iterator[Callable[[TrainingProgress], None]]:
    """A bar with the loss and its course."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    loss, what = Column(no_wrap=True, min_width=10), Column(no_wrap=True, ratio=1)
    texts = [TextColumn("{task.fields[loss]}", "bold", table_column=loss), TextColumn("{task.fields[what]}", "dim", table_column=what)]
    columns = [BarColumn(bar_width=16), MofNCompleteColumn(table_column=Column(no_wrap=True)), TimeElapsedColumn(), *texts]
    losses: list[float] = []
    with Progress(*columns, console=narrator.err, transient=True, expand=True) as bar:
        task = bar.add_task("", total=steps, loss="", what="building the pipeline")

        def show(progress: TrainingProgress) -> None:
            if progress.loss is None:
                bar.update(task, completed=progress.step, what=progress.activity)
                return
            losses.append(progress.loss)
            speed = f"{batch / progress.seconds:.0f} samples/s" if progress.seconds else ""
            bar.update(task, completed=progress.step, loss=f"loss {progress.loss:.3f}", what=f"{sparkline(losses, 12)} {speed}")

        yield show
