"""A training run as a web page: what was measured, planned, proved, trained and compared."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.training.console import candidate_cells
from penstock.draw.html import Card, Section, report_html
from penstock.text.numbers import format_count

if TYPE_CHECKING:
    from penstock.cli.training.session import Session
    from penstock.planner.plan import Plan
    from penstock.runtime.train.trainer import TrainingResult
    from penstock.simulator.comparison.differences import Differences

MOST = 16
"""Candidates in the table."""


def write_report(session: Session) -> str:
    """Write the page of a run that has ended."""
    done = session.trained
    assert done is not None
    table = session.table
    lead = (
        f"{session.options.source} as {format_count(table.stages, 'stage')} on {format_count(table.ranks, 'rank')}, "
        f"{format_count(table.microbatches, 'microbatch')} per step, with the schedule {table.name or 'of the file'}: "
        "planned, proved, trained, and compared with the unpipelined model."
    )
    return report_html("Penstock training report", lead, list(_cards(session, done)), list(_sections(session, done)), _machine(done))


def _cards(session: Session, done: TrainingResult) -> Iterator[Card]:
    if done.losses:
        yield Card("loss", f"{done.losses[0]:.2f} → {done.losses[-1]:.2f}", f"{format_count(len(done.losses), 'step')}")
        median = statistics.median(done.seconds)
        yield Card("step time", f"{median * 1e3:.0f} ms", f"{session.options.batch / median:.0f} samples per second")
    if done.parity:
        exact = all(parity.loop.exact for parity in done.parity.values())
        worst = max(parity.loop.worst for parity in done.parity.values())
        value = "equal to the last bit" if exact else f"equal to {worst:.0e}" if done.equal else "different"
        yield Card("loss and gradients", value, "against the unpipelined model, same microbatches", done.equal)
    proof = session.proof
    assert proof is not None
    yield Card("proof", f"{len(proof.rules)} rules hold", f"{proof.actions} actions, {proof.messages} messages", True)
    if session.plan is not None:
        yield from _plan_cards(session.plan)


def _plan_cards(plan: Plan) -> Iterator[Card]:
    units, peak = plan.units, max(plan.predicted.peak_memory)
    limit = "no limit" if plan.memory_limit is None else f"of {units.size(max(plan.memory_limit))} allowed"
    yield Card("fullest rank", units.size(peak), limit)
    yield Card("bubble", f"{plan.predicted.bubble:.1%}", f"at most {plan.gap:.1%} to gain in this setting")


def _sections(session: Session, done: TrainingResult) -> Iterator[Section]:
    plan, differences = session.plan, session.differences
    if plan is not None:
        yield _model(plan)
        yield _candidates(plan)
    yield _proof(session)
    if plan is not None:
        yield _predicted(plan)
    if done.losses:
        yield _training(done)
    if done.parity:
        yield _parity(done)
    if differences is not None:
        yield _overlay(differences)
    elif done.timeline is not None:
        from penstock.draw.figures.timelines import draw_timelines

        text = "One of the last steps, the one that took the median time."
        yield Section("The measured step", text).figure(draw_timelines(done.timeline, unit="s", memory=False), "the measured timeline")
    yield Section("Run it again", "The command that made this page.").code(_command())


def _model(plan: Plan) -> Section:
    from penstock.planner.partition.stage_costs import split_layers

    units = plan.units
    rows, first = [], 0
    for stage, layers in enumerate(split_layers(plan.profile, plan.partition)):
        names = [layer.name or str(first + place) for place, layer in enumerate(layers)]
        times = [units.time(plan.costs.of_stage(name, stage)) for name in ("f", "i", "w")]
        held = sum(layer.parameters + layer.gradients + layer.optimizer for layer in layers)
        ranks = "/".join(str(copy[stage]) for copy in plan.placement.copies)
        rows.append([str(stage), ranks, names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}", *times, units.size(held)])
        first += len(layers)
    header = ("stage", "rank", "layers", "forward", "backward, input", "backward, weights", "state")
    text = f"Every layer was {plan.profile.source}; the plan splits them into {format_count(len(rows), 'stage')}."
    return Section("The model, measured", text).table(header, rows)


def _candidates(plan: Plan) -> Section:
    from penstock.draw.figures.tradeoff import draw_tradeoff

    units, chosen = plan.units, plan.alternatives[plan.chosen]
    timed = sorted((each for each in plan.alternatives if each.objective is not None), key=lambda each: each.objective or 0.0)
    shown = list(dict.fromkeys([chosen, *timed]))[:MOST]
    shown.sort(key=lambda each: (not each.fits, each.objective or 0.0))
    rows = []
    for candidate in shown:
        fits = "fits" if candidate.fits else f"{units.size(candidate.excess or 0.0)} over"
        rows.append([*candidate_cells(plan, candidate), fits])
    header = ("candidate", "placement", "microbatches", "takes", "bubble", "peak memory", "limit")
    text = (
        f"{len(plan.alternatives)} candidates were considered, {sum(each.fits for each in plan.alternatives)} fit. "
        f"No schedule with this placement and partition can take less than {units.time(plan.bound)}."
    )
    section = Section("The candidates of the plan", text).figure(draw_tradeoff(plan), "time against memory of the candidates")
    return section.table(header, rows, chosen=shown.index(chosen))


def _proof(session: Session) -> Section:
    proof = session.proof
    assert proof is not None
    text = "Each of these rules holds for every action and message of the program that ran."
    return Section("Proved before it ran", text).table(("rule", "what holds"), list(proof.rules.items()))


def _predicted(plan: Plan) -> Section:
    from penstock.draw.figures.timelines import draw_timelines

    text = "Each row is a rank, and each box the forward or backward of one microbatch; the memory of the ranks is below."
    return Section("The predicted step", text).figure(draw_timelines(plan.predicted, unit="s"), "the predicted timeline")


def _training(done: TrainingResult) -> Section:
    from penstock.draw.figures.loss_curve import draw_loss_curve

    begun = f" It resumed from step {done.resumed_at}." if done.resumed_at else ""
    return Section("Training", f"The loss of each step.{begun}").figure(
        draw_loss_curve(done.losses, first=done.resumed_at + 1), "the loss by step"
    )


def _parity(done: TrainingResult) -> Section:
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


def _overlay(differences: Differences) -> Section:
    from penstock.draw.differences import describe_differences
    from penstock.draw.figures.overlay import draw_overlay

    text = "For each rank: the predicted step above, the measured one below, and how late it runs."
    if differences.scale != 1.0:
        text += f" The ranks shared this machine's {os.cpu_count()} cores: predicted times are multiplied by {differences.scale:.2f}, "
        text += "the mean slowdown."
    section = Section("Measured over predicted", text).figure(
        draw_overlay(differences, unit="s"), "the measured timeline over the predicted one"
    )
    return section.texts(list(describe_differences(differences, "s")), "all figures, and where they part")


def _command() -> str:
    return f"penstock {shlex.join(sys.argv[1:])}" if sys.argv[1:2] == ["train"] else "make demo"


def _machine(done: TrainingResult) -> str:
    from importlib.metadata import version

    from penstock import __version__

    machine = f"{platform.system()} {platform.machine()}, {format_count(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}"
    return f"Penstock {__version__} on {machine}, torch {version('torch')}, ranks on {done.device}"
