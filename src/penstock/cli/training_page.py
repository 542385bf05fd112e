"""A training run as a page: what was measured, planned, proved, trained and compared."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.draw.numbers import count
from penstock.draw.page import Card, Section
from penstock.draw.page import page as put_together

if TYPE_CHECKING:
    from penstock.cli.training import Session
    from penstock.planner.plan import Plan
    from penstock.runtime.train.trainer import TrainingResult
    from penstock.simulator.differences import Differences

MOST = 16
"""Candidates in the table."""


def page(session: Session) -> str:
    """The page of a run that has ended."""
    done = session.trained
    assert done is not None
    table = session.table
    lead = (
        f"{session.wish.source} as {count(table.stages, 'stage')} on {count(table.ranks, 'rank')}, "
        f"{count(table.microbatches, 'microbatch')} a step, by the schedule {table.name or 'of the file'}: "
        "planned, proved, trained, and compared with the unpipelined model."
    )
    return put_together("Penstock training report", lead, list(_cards(session, done)), list(_sections(session, done)), _machine(done))


def _cards(session: Session, done: TrainingResult) -> Iterator[Card]:
    if done.losses:
        yield Card("loss", f"{done.losses[0]:.2f} → {done.losses[-1]:.2f}", f"{count(len(done.losses), 'step')}")
        middle = statistics.median(done.seconds)
        yield Card("a step", f"{middle * 1e3:.0f} ms", f"{session.wish.batch / middle:.0f} samples a second")
    if done.parity:
        exact = all(each.loop.exact for each in done.parity.values())
        worst = max(each.loop.worst for each in done.parity.values())
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
    plan, found = session.plan, session.differences
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
    if found is not None:
        yield _overlay(found)
    elif done.timeline is not None:
        from penstock.draw.figure import figure

        text = "One of the last steps, the one that took the median time."
        yield Section("What was measured", text).figure(figure(done.timeline, unit="s", memory=False), "the measured timeline")
    yield Section("Do it again", "The command that made this page.").code(_command())


def _model(plan: Plan) -> Section:
    from penstock.planner.stage_costs import runs

    units = plan.units
    rows, first = [], 0
    for stage, layers in enumerate(runs(plan.profile, plan.partition)):
        names = [layer.name or str(first + place) for place, layer in enumerate(layers)]
        times = [units.time(plan.costs.of_stage(name, stage)) for name in ("f", "i", "w")]
        held = sum(layer.parameters + layer.gradients + layer.optimizer for layer in layers)
        ranks = "/".join(str(copy[stage]) for copy in plan.placement.copies)
        rows.append([str(stage), ranks, names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}", *times, units.size(held)])
        first += len(layers)
    header = ("stage", "rank", "layers", "forward", "backward, input", "backward, weights", "kept")
    text = f"Every layer was {plan.profile.source}; the plan cuts them into {count(len(rows), 'stage')}."
    return Section("The model, measured", text).table(header, rows)


def _candidates(plan: Plan) -> Section:
    from penstock.draw.tradeoff import tradeoff

    units, chosen = plan.units, plan.alternatives[plan.chosen]
    timed = sorted((each for each in plan.alternatives if each.objective is not None), key=lambda each: each.objective or 0.0)
    shown = list(dict.fromkeys([chosen, *timed]))[:MOST]
    shown.sort(key=lambda each: (not each.fits, each.objective or 0.0))
    rows = []
    for each in shown:
        fits = "fits" if each.fits else f"{units.size(each.excess or 0.0)} over"
        said = [each.name, each.placement, f"{each.microbatches} x {each.microbatch}", units.time(each.objective or 0.0)]
        rows.append([*said, f"{each.bubble or 0.0:.1%}", units.size(each.peak or 0.0), fits])
    header = ("candidate", "placement", "microbatches", "takes", "bubble", "peak memory", "limit")
    text = (
        f"{len(plan.alternatives)} candidates were considered, {sum(each.fits for each in plan.alternatives)} fit. "
        f"No schedule with this placement and partition can take less than {units.time(plan.bound)}."
    )
    made = Section("What the plan was chosen from", text).figure(tradeoff(plan), "time against memory of the candidates")
    return made.table(header, rows, chosen=shown.index(chosen))


def _proof(session: Session) -> Section:
    proof = session.proof
    assert proof is not None
    what = "Every one of these holds for every action and message of the program that ran."
    return Section("Proved before it ran", what).table(("rule", "what holds"), list(proof.rules.items()))


def _predicted(plan: Plan) -> Section:
    from penstock.draw.figure import figure

    text = "Each row is a rank, each box one microbatch's forward or backward; below, what the ranks hold."
    return Section("The step as predicted", text).figure(figure(plan.predicted, unit="s"), "the predicted timeline")


def _training(done: TrainingResult) -> Section:
    from penstock.draw.curve import curve

    begun = f" It went on from step {done.resumed_at}." if done.resumed_at else ""
    return Section("Training", f"The loss of each step.{begun}").figure(curve(done.losses, first=done.resumed_at + 1), "the loss by step")


def _parity(done: TrainingResult) -> Section:
    rows = []
    for step, each in done.parity.items():
        for found in each.all:
            reference, _, said = found.in_words().partition(": ")
            rows.append([f"step {step}", reference, said])
    text = (
        "The loss, every gradient and their norm, against the unpipelined model with the same weights: over the same microbatches one "
        "after the other, and over the whole batch at once, which rounds in another order."
    )
    return Section("The numbers of the unpipelined model", text).table(("", "reference", "loss and gradients"), rows)


def _overlay(found: Differences) -> Section:
    from penstock.draw.differences import parts
    from penstock.draw.overlay import overlay

    text = "Of each rank the predicted step above, the measured one below, and how late it runs."
    if found.scale != 1.0:
        text += f" The ranks shared this machine's {os.cpu_count()} cores: predicted times are multiplied by {found.scale:.2f}, "
        text += "as the mean action took."
    made = Section("Measured over predicted", text).figure(overlay(found, unit="s"), "the measured timeline over the predicted one")
    return made.parts("all figures, and where they part", list(parts(found, "s")))


def _command() -> str:
    return f"penstock {shlex.join(sys.argv[1:])}" if sys.argv[1:2] == ["train"] else "make demo"


def _machine(done: TrainingResult) -> str:
    from importlib.metadata import version

    from penstock import __version__

    machine = f"{platform.system()} {platform.machine()}, {count(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}"
    return f"Penstock {__version__} on {machine}, torch {version('torch')}, ranks on {done.device}"
