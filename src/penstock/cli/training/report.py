"""Reports of a training run: headings and figures on stdout, live progress on stderr, and a web page of all results at its end."""

from __future__ import annotations

import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.output import can_print, show_bar, show_planning
from penstock.draw import terminal
from penstock.draw.figures.plots import draw_loss_curve, draw_tradeoff
from penstock.draw.figures.timelines import draw_overlay, draw_timelines
from penstock.draw.html import Card, Section, report_html
from penstock.draw.summary import describe_differences
from penstock.planner.partition.stage_costs import split_layers
from penstock.planner.report import list_stage_times
from penstock.text.numbers import format_count
from penstock.text.table import format_table
from penstock.text.units import SECONDS, Units

if TYPE_CHECKING:
    from penstock.cli.training.options import TrainOptions
    from penstock.cli.training.session import Session
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

    def announce_start(self, ranks: int | None) -> AbstractContextManager[None]:
        """Announce that processes start, which takes seconds in which nothing else is printed."""
        if ranks is not None:
            self.err.print(f"[dim]starting {format_count(ranks, 'process')} ...[/dim]")
        return nullcontext()

    @contextmanager
    def show_measuring(self, sizes: list[int]) -> Iterator[Callable[[TrainingProgress], None]]:
        self.head(f"Measure the model layer by layer, for microbatches of {' and '.join(map(str, sizes))}")
        if not self._live:
            self._note("measuring ...")
            yield lambda progress: None
            return
        with self.err.status("measuring") as status:
            yield lambda progress: status.update(progress.activity)

    def show_planning_progress(self, profile: Profile, what: str, seconds: float) -> AbstractContextManager[Callable[[Any], None]]:
        """Show the search for a plan: of `what`, for at most so many seconds after the named schedules."""
        if self._live:
            return show_planning(Units(profile.time_unit, in_bytes=True))
        self._note(f"planning {what}, searching for up to {seconds:g} s ...")
        return nullcontext(lambda progress: None)

    @contextmanager
    def show_training(self, steps: int, batch: int) -> Iterator[Callable[[TrainingProgress], None]]:
        self.head(f"Train {format_count(steps, 'step')} of {format_count(batch, 'sample')}")
        with _open_bar(steps, batch) if self._live else nullcontext(self._lines(steps)) as show:

            def tell(progress: TrainingProgress) -> None:
                self.step = max(self.step, progress.step)
                show(progress)

            yield tell

    @contextmanager
    def show_measuring_both(self, name: str, steps: int) -> Iterator[Callable[[TrainingProgress], None]]:
        """Count the steps of all rounds."""
        self.head(f"Measure the plan and {name} in turns, within the same limit")
        done = count(1)
        if not self._live:
            self._note(f"measuring {format_count(steps, 'step')} ...")
            yield lambda progress: None
            return
        with show_bar(steps) as update:

            def tell(progress: TrainingProgress) -> None:
                if progress.loss is not None:
                    update(completed=next(done))

            yield tell

    def _note(self, text: str) -> None:
        """Print a line of progress where no bar can be drawn."""
        self.err.print(f"[dim]   {text}[/dim]")

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
        units, sizes = Units(profile.time_unit, in_bytes=True), [profile.at(size) for size in profile.sizes]
        times = ", ".join(f"{units.time(at.time)} for a microbatch of {at.microbatch}" for at in sizes)
        static = sum(layer.parameters + layer.gradients + layer.optimizer for layer in profile.layers)
        self.say(f"{format_count(len(profile), 'layer')}, {times}; parameters, gradients and optimizer {units.size(static)}")
        if profile.bandwidth is not None:
            self.say(f"messages between ranks: latency {units.time(profile.latency)}, bandwidth {units.size(profile.bandwidth)} per second")

    def plan(self, plan: Plan) -> None:
        self.head(
            f"Plan: {plan.name}, {plan.placement.kind} placement, {format_count(plan.microbatches, 'microbatch')} of {plan.microbatch}"
        )
        units = plan.units
        self.say(f"predicted with a core for every rank: {units.time(plan.objective)} per step, bubble {plan.predicted.bubble:.1%}")
        self.say(f"{describe_bound(plan)}")
        peak = units.size(max(plan.predicted.peak_memory))
        limit = "" if plan.memory_limit is None else f" of {units.size(max(plan.memory_limit))} allowed"
        self.say(f"layers per stage {', '.join(map(str, plan.partition))}; the fullest rank holds {peak}{limit}")
        self.say("\n" + "\n".join(_write_candidates(plan, SHOWN)))

    def report_other_plan(self, name: str, plan: Plan | str) -> None:
        if isinstance(plan, str):
            self.say(f"\n{name} cannot be compared: {plan}")
            return
        peak = plan.units.size(max(plan.predicted.peak_memory))
        self.say(
            f"\nto compare with: {name} within the same limit, {format_count(plan.microbatches, 'microbatch')} of {plan.microbatch}, {peak}"
        )
        self.say(f"predicted with a core for every rank: {plan.units.time(plan.objective)} per step, bubble {plan.predicted.bubble:.1%}")

    def proof(self, proof: Proof) -> None:
        self.head("Prove it before it runs")
        self.say(str(proof))

    def report_training(self, done: TrainingResult, options: TrainOptions) -> None:
        if done.loaded is not None:
            self.say(f"resumed from {done.loaded}")
        if not done.losses:
            self.say(f"nothing to do: the checkpoint is at step {done.resumed_at}; give more --steps")
            return
        median = statistics.median(done.seconds)
        self.say(f"loss {done.losses[0]:.4f} -> {done.losses[-1]:.4f}   {sparkline(done.losses)}")
        self.say(
            f"{format_count(len(done.losses), 'step')}, {format_median(done.seconds)} each, {options.batch / median:.0f} samples per second"
        )

    def parity(self, done: TrainingResult) -> None:
        if not done.parity:
            return
        self.head("Compare loss and gradients with the unpipelined model")
        for step, parity in done.parity.items():
            for comparison in parity.all:
                self.say(f"step {step}, {comparison.in_words()}")

    def differences(self, differences: Differences, cores: int | None) -> None:
        self.head("Overlay the measured and the predicted step")
        if cores is not None:
            self.say(describe_sharing(differences.measured.ranks, cores))
        both, bubble = differences.makespan, differences.bubble
        self.say(
            f"makespan {format_median([both.predicted])} predicted, {format_median([both.measured])} measured (median of the last steps)"
        )
        self.say(f"bubble {bubble.predicted:.1%} predicted, {bubble.measured:.1%} measured")

    def contest(self, session: Session) -> None:
        self.say("\n".join(format_table(contest_rows(session), left=(0,))))

    def report_file(self, result: str, path: Path) -> None:
        self.out.print(f"\nThe {result} is in [bold]{path}[/bold]")


def _write_candidates(plan: Plan, shown: int) -> Iterator[str]:
    """The fastest candidates that fit and the fastest that do not, one line each."""
    units = plan.units
    timed = sorted(
        (candidate for candidate in plan.candidates if candidate.objective is not None), key=lambda candidate: candidate.objective or 0.0
    )
    chosen = plan.alternatives[plan.chosen]
    rows: list[tuple[str, ...]] = [("", "candidate", "placement", "microbatches", "takes", "bubble", "peak", "")]
    fitting, over = [candidate for candidate in timed if candidate.fits], [candidate for candidate in timed if not candidate.fits]
    for candidate in [*dict.fromkeys([chosen, *fitting[:shown]]), *over[: shown // 2]]:
        excess = "" if candidate.fits else f"{units.size(candidate.excess or 0.0)} over the limit"
        rows.append(("->" if candidate is chosen else "", *write_candidate_cells(plan, candidate), excess))
    yield from format_table(rows, left=(1, 2, 7), indent="  ")
    yield f"  {plan.tally}"


def describe_bound(plan: Plan) -> str:
    """Describe the bound and the gap to it."""
    return f"no order with this placement and partition can take less than {plan.units.time(plan.bound)} (bound): {describe_gap(plan)}"


def describe_gap(plan: Plan) -> str:
    """Describe the gap to the bound."""
    return f"at most {plan.gap:.1%} to gain" if plan.gap > 5e-4 else "nothing to gain"


def describe_sharing(ranks: int, cores: int) -> str:
    """Say why measured times differ from those of the plan, and what they are compared with."""
    shared = format_count(cores, "core")
    return (
        f"{format_count(ranks, 'process')} share {shared} of this machine, so a step takes longer than with a core for every rank. "
        f"Measured times are compared with a prediction for {shared}."
    )


def describe_parity(done: TrainingResult) -> str:
    """The end of a sentence: how the numbers compare with the unpipelined model; empty if they were not compared."""
    if not done.parity:
        return ""
    if not done.equal:
        return ", but loss and gradients differ from the unpipelined model"
    exact = all(parity.loop.exact for parity in done.parity.values())
    return f", with the loss and gradients of the unpipelined model{', to the last bit' if exact else ', up to rounding'}"


def contest_rows(session: Session) -> list[tuple[str, ...]]:
    """The plan and the schedule it is compared with: what was predicted for this machine, and what was measured in turns."""
    contest, plan = session.contest, session.plan
    assert contest is not None
    assert plan is not None
    rows: list[tuple[str, ...]] = [("", "microbatches", "peak, predicted", "step, predicted", "step, measured")]
    for name, chosen, seconds in ((f"the plan, {plan.name}", plan, contest.own), (contest.plan.name, contest.plan, contest.other)):
        shape = f"{chosen.microbatches} x {chosen.microbatch}"
        peak = chosen.units.size(max(chosen.predicted.peak_memory))
        rows.append((name, shape, peak, format_median([session.predict(chosen).makespan]), format_median(seconds)))
    return rows


def format_median(seconds: list[float]) -> str:
    """Write the median of times in seconds with three digits.

    >>> format_median([0.25, 0.2531, 4.0]), format_median([0.0000991])
    ('253 ms', '99.1 us')
    """
    median = statistics.median(seconds)
    unit, length = next(((unit, length) for unit, length in SECONDS.items() if median >= length), ("ns", 1e-9))
    return f"{median / length:.3g} {unit}"


def write_candidate_cells(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    """Give the cells of a candidate in a table: name, placement, microbatches, time, bubble and peak memory."""
    units = plan.units
    microbatches, time = f"{candidate.microbatches} x {candidate.microbatch}", units.time(candidate.objective or 0.0)
    return (
        candidate.name,
        candidate.describe_placement(),
        microbatches,
        time,
        f"{candidate.bubble or 0.0:.1%}",
        units.size(candidate.peak or 0.0),
    )


def sparkline(values: list[float], width: int = 32) -> str:
    """Draw a row of blocks, the lowest value lowest; of more values than fit, means of neighbours.

    >>> sparkline([1.0, 2.0, 3.0, 8.0])
    '▁▂▃█'
    """
    means = np.array([part.mean() for part in np.array_split(np.array(values), min(width, len(values)))])
    low, high = means.min(), means.max()
    heights = 0.5 + np.round((means - low) / ((high - low) or 1.0) * (len(terminal.BARS) - 1))
    return terminal.sparkline(heights, len(terminal.BARS)) if can_print(terminal.BARS) and np.isfinite(heights).all() else ""


@contextmanager
def _open_bar(steps: int, batch: int) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show a bar with the loss and its curve."""
    losses: list[float] = []
    with show_bar(steps) as update:

        def show(progress: TrainingProgress) -> None:
            if progress.loss is None:
                update(completed=progress.step, note=progress.activity)
                return
            losses.append(progress.loss)
            speed = f"{batch / progress.seconds:.0f} samples/s" if progress.seconds else ""
            update(completed=progress.step, figure=f"loss {progress.loss:.3f}", note=f"{sparkline(losses, 12)} {speed}")

        update(note="building the pipeline")
        yield show


# The web page ---------------------------------------------------------------------------------------------------------


MOST = 16
"""Candidates in the table."""


def write_report(session: Session) -> str:
    """Write the page of a run that has ended."""
    done = session.trained
    assert done is not None
    table = session.table
    lead = [session.result] if done.losses else []
    lead.append(
        f"{session.options.source} as {format_count(table.stages, 'stage')} on {format_count(table.ranks, 'rank')}, "
        f"{format_count(table.microbatches, 'microbatch')} per step, with the schedule {table.name or 'of the file'}."
    )
    if session.cores is not None and session.plan is not None:
        lead.append(describe_sharing(table.ranks, session.cores))
    return report_html(
        "Penstock training report", lead, list(_list_cards(session, done)), list(_list_sections(session, done)), _describe_machine(done)
    )


def _list_cards(session: Session, done: TrainingResult) -> Iterator[Card]:
    if session.contest is not None:
        own, other = session.contest.own, session.contest.other
        name, faster = f"against {session.contest.plan.name}, measured", session.contest.speedup
        yield Card(name, f"{faster:.2f} times as fast", f"{format_median(own)} against {format_median(other)} per step", faster >= 1)
    if done.losses:
        yield Card("loss, measured", f"{done.losses[0]:.2f} → {done.losses[-1]:.2f}", f"{format_count(len(done.losses), 'step')}")
        speed = session.options.batch / statistics.median(done.seconds)
        yield Card("training step, measured", format_median(done.seconds), f"with the optimizer; {speed:.0f} samples per second")
    if done.parity:
        exact = all(parity.loop.exact for parity in done.parity.values())
        worst = max(parity.loop.worst for parity in done.parity.values())
        value = "equal to the last bit" if exact else f"equal to {worst:.0e}" if done.equal else "different"
        yield Card("loss and gradients", value, "against the unpipelined model, same microbatches", done.equal)
    proof = session.proof
    assert proof is not None
    yield Card(
        "proof",
        f"{len(proof.rules)} rules hold",
        f"{format_count(proof.actions, 'action')}, {format_count(proof.messages, 'message')}",
        True,
    )
    if session.plan is not None:
        yield from _plan_cards(session.plan)
    if session.differences is not None:
        bubble = session.differences.bubble
        here = "" if session.cores is None else f" for {format_count(session.cores, 'core')}"
        yield Card("bubble, measured", f"{bubble.measured:.1%}", f"{bubble.predicted:.1%} predicted{here}")


def _plan_cards(plan: Plan) -> Iterator[Card]:
    units, peak = plan.units, max(plan.predicted.peak_memory)
    limit = "no limit" if plan.memory_limit is None else f"of {units.size(max(plan.memory_limit))} allowed"
    yield Card("fullest rank, predicted", units.size(peak), limit)
    yield Card("bubble, predicted", f"{plan.predicted.bubble:.1%}", f"with a core for every rank; {describe_gap(plan)}")


def _list_sections(session: Session, done: TrainingResult) -> Iterator[Section]:
    plan, differences = session.plan, session.differences
    if session.contest is not None:
        yield _contest(session)
    if plan is not None:
        yield _write_model(plan)
        yield _write_candidate_section(plan)
    yield _write_proof(session)
    if plan is not None:
        yield _write_predicted(plan, None if session.contest is None else session.contest.plan)
    if done.losses:
        yield _write_training(done)
    if done.parity:
        yield _write_parity(done)
    if differences is not None:
        yield _overlay(differences, session.cores)
    elif done.timeline is not None:
        from penstock.draw.figures.timelines import draw_timelines

        text = "One of the last steps, the one that took the median time."
        figure = draw_timelines(done.timeline, names=["measured"], unit="s", memory=False)
        yield Section("The measured step", text).figure(figure, "the measured timeline")
    yield Section("Run it again", "The command that made this page.").code(_write_command())


def _contest(session: Session) -> Section:
    assert session.contest is not None
    header, *rows = contest_rows(session)
    again = sum(session.contest.plan.recompute)
    recompute = f", and recomputes the forwards of {format_count(again, 'stage')} to fit" if again else ""
    name = session.contest.plan.name
    text = (
        f"{name} is planned by the same planner for the same model and limit: it gets the partition that suits it best{recompute}. "
        f"{len(session.contest.own)} steps of each were measured in turns, in the same processes; the medians count. "
        "Predicted steps leave out the optimizer, measured ones contain it."
    )
    return Section(f"The plan against {name}", text).table(header, rows, chosen=0)


def _write_model(plan: Plan) -> Section:
    units = plan.units
    rows, first = [], 0
    for stage, layers in enumerate(split_layers(plan.profile, plan.partition)):
        names = [layer.name or str(first + place) for place, layer in enumerate(layers)]
        times = ["/".join(map(units.time, list_stage_times(plan, name, stage))) for name in ("f", "i", "w")]
        static = sum(layer.parameters + layer.gradients + layer.optimizer for layer in layers)
        ranks = "/".join(str(copy[stage]) for copy in plan.placement.copies)
        rows.append([str(stage), ranks, names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}", *times, units.size(static)])
        first += len(layers)
    header = ("stage", "rank", "layers", "forward", "backward, input", "backward, weights", "state")
    text = f"Every layer was {plan.profile.source}. The plan splits the layers into {format_count(len(rows), 'stage')}; times are measured."
    return Section("The model, measured", text).table(header, rows)


def _write_candidate_section(plan: Plan) -> Section:
    units, chosen = plan.units, plan.alternatives[plan.chosen]
    timed = sorted(
        (candidate for candidate in plan.candidates if candidate.objective is not None), key=lambda candidate: candidate.objective or 0.0
    )
    shown = list(dict.fromkeys([chosen, *timed]))[:MOST]
    shown.sort(key=lambda candidate: (not candidate.fits, candidate.objective or 0.0))
    rows = []
    for candidate in shown:
        fits = "fits" if candidate.fits else f"{units.size(candidate.excess or 0.0)} over"
        rows.append([*write_candidate_cells(plan, candidate), fits])
    header = ("candidate", "placement", "microbatches", "step", "bubble", "peak", "limit")
    bound = describe_bound(plan)
    text = f"{plan.tally}. {bound[0].upper()}{bound[1:]}. The table lists {len(shown)} of them."
    section = Section("The candidates of the plan, predicted", text).figure(
        draw_tradeoff(plan), "predicted time and memory of the candidates"
    )
    return section.table(header, rows, chosen=shown.index(chosen))


def _write_proof(session: Session) -> Section:
    proof = session.proof
    assert proof is not None
    text = "Each of these rules holds for every action and message of the program that ran."
    return Section("Proved before it ran", text).table(("rule", "what holds"), list(proof.rules.items()))


def _write_predicted(plan: Plan, other: Plan | None) -> Section:
    text = (
        "A step as the planner predicts it, with a core for every rank. Each row is a rank, and each box the forward or backward of one "
        "microbatch; the memory of the ranks is below."
    )
    plans = [plan] if other is None else [plan, other]
    names = [f"{plan.name}, predicted" for plan in plans]
    figure = draw_timelines([plan.predicted for plan in plans], names=names, unit="s")
    return Section("The predicted step", text).figure(figure, "the predicted timelines")


def _write_training(done: TrainingResult) -> Section:
    begun = f" It resumed from step {done.resumed_at}." if done.resumed_at else ""
    figure = draw_loss_curve(done.losses, first=done.resumed_at + 1, name="loss, measured")
    return Section("Training", f"The measured loss of each step.{begun}").figure(figure, "the measured loss by step")


def _write_parity(done: TrainingResult) -> Section:
    rows = []
    for step, parity in done.parity.items():
        for comparison in parity.all:
            reference, _, result = comparison.in_words().partition(": ")
            rows.append([f"step {step}", reference, result])
    text = (
        "The loss, every gradient and the gradient norm, compared with the unpipelined model with the same weights: run on the same "
        "microbatches one after the other, and on the whole batch at once, which rounds in another order."
    )
    return Section("Parity with the unpipelined model", text).table(("", "reference", "loss and gradients"), rows)


def _overlay(differences: Differences, cores: int | None) -> Section:
    machine = "" if cores is None else f" for {format_count(cores, 'core')}"
    text = (
        f"For each rank: the step predicted{machine} above, the measured one below, and how late it runs. The measured step is one of the "
        "last, the one that took the median time, without the optimizer."
    )
    figure = draw_overlay(differences, names=["predicted and measured"], unit="s")
    section = Section("Measured over predicted", text).figure(figure, "the measured timeline over the predicted one")
    return section.texts(list(describe_differences(differences, "s")), "all figures, and where they part")


def _write_command() -> str:
    """The command, one option per line."""
    if sys.argv[1:2] != ["train"]:
        return "make demo"
    return re.sub(r" (?=-{1,2}[a-z])", " \\\\\n    ", f"penstock {shlex.join(sys.argv[1:])}")


def _describe_machine(done: TrainingResult) -> str:
    from importlib.metadata import version

    from penstock import __version__

    machine = f"{platform.system()} {platform.machine()}, {format_count(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}"
    return f"Penstock {__version__} on {machine}, torch {version('torch')}, ranks on {done.device}"
