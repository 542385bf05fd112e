"""`penstock plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, file_or_stdout, whole_number, writable
from penstock.errors import CostsError, PlanError, UsageError

if TYPE_CHECKING:
    from penstock.draw.terminal import Line
    from penstock.planner.plan import Plan
    from penstock.planner.profile import Profile

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def plan(
    *,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="The model's layers: a .json or .toml file (see 'penstock profile').")
    ] = None,
    transformer: Annotated[
        str | None,
        typer.Option(
            "--transformer",
            metavar="SIZES",
            help='A transformer by its size instead: "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12".',
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("-p", "--ranks", metavar="N", parser=whole_number, help="Ranks of the pipeline.")],
    microbatches: Annotated[
        int | None, typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches of the profile's size.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", parser=whole_number, help="Samples of a whole step; microbatch sizes are then chosen too."),
    ] = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option("--microbatch-sizes", metavar="N,N", help="The sizes to choose from.  [default: those of the profile]"),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The most that a rank may hold, like 40GiB; several with commas, one a rank."),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option("--headroom", metavar="SHARE", help="The share of each limit that stays free.  [default: 0.05 of estimates, else 0]"),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option("--schedules", metavar="NAME,NAME", help="The schedules to try; 'searched' is an order of our own.  [default: all]"),
    ] = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Let stages run their forward again where something fits only so.")
    ] = False,
    barrier: Annotated[
        bool, typer.Option("--barrier/--no-barrier", help="Whether the optimizer waits for all ranks: makespan, or else the longest span.")
    ] = True,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Whether the backward may be split.")] = True,
    latency: Annotated[
        float | None, typer.Option("--latency", metavar="TIME", help="What a message takes at least, in place of the profile's.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="What a link carries a time, like 50GB, in place of the profile's.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long to plan; 0 for the named schedules alone, however long that takes.")
    ] = 7.0,
    rounds: Annotated[
        float | None,
        typer.Option("--rounds", metavar="N", help="Orders that the search times.  [default: as many as usually take less than --seconds]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", parser=whole_number, help="Of the search and of the jitter.")] = 0,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", callback=writable, help="Draw time against memory: .svg or .png.")
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", callback=file_or_stdout, help="Save the plan: .json.")
    ] = None,
) -> int:
    """Find the best schedule for a model and a memory limit.

    Chooses which layers go where, the schedule, its chunks, the microbatch size and what to recompute; prints why, what each rank
    holds, and how far from the best possible it is. Ctrl-C ends the search and keeps the best plan so far, with exit code 130.

    \b
    Examples:
      penstock plan --profile p.json --ranks 8 --memory-limit 40GiB --batch 512 -o plan.json
      penstock plan --transformer "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12" -p 8 -m 32
      penstock plan --profile p.json -p 4 -m 16 --schedules 1f1b,zbv --recompute --figure plan.svg
    """
    from penstock.cli.interrupt import interruptible
    from penstock.cli.live import live
    from penstock.cli.output import deliver
    from penstock.cli.timed import check_output
    from penstock.draw.tradeoff import SUFFIXES
    from penstock.planner import plan as planning
    from penstock.planner.profile.units import Units
    from penstock.planner.request import is_in_bytes

    check_output(figure, SUFFIXES)
    check_output(output, (".json",))
    limit = _limit(memory_limit)
    if (microbatches is None) == (batch is None):
        raise UsageError("give one of the two: --microbatches, or --batch with the samples of a whole step")
    model = _linked(_model(profile, transformer), latency, bandwidth)
    asked: dict[str, Any] = {"microbatches": microbatches, "batch": batch, "memory_limit": limit, "recompute": recompute}
    asked |= {
        "barrier": barrier,
        "split": split,
        "headroom": headroom,
        "seconds": seconds,
        "rounds": rounds,
        "seed": seed,
        "schedules": _names(schedules),
    }
    asked["microbatch_sizes"] = numbers("--microbatch-sizes", microbatch_sizes)
    with interruptible() as stopped, live(Units(model.time_unit, is_in_bytes(model, limit))) as tell:
        try:
            found = planning.plan(model, ranks=ranks, **asked, progress=tell, stop=stopped)
        except PlanError as error:
            if not stopped():
                raise
            return _ended(str(error))
    if output is not None:
        found.save(output)
    if figure is not None:
        found.save(figure)
    deliver(lambda _: _lines(found, output), found.to_json, as_json=as_json, output=None)
    return _ended("this is the best plan so far") if stopped() else 0


def _ended(said: str) -> int:
    typer.echo(f"interrupted: {said}", err=True)
    return INTERRUPTED


def _lines(found: Plan, output: Path | None) -> Iterator[Line]:
    yield from ([(line, None)] for line in found.report().splitlines())
    if output is not None:
        yield []
        yield [(f"saved to {output}", None)]


def _model(profile: Path | None, transformer: str | None) -> Profile:
    """The profile from a file, or from a transformer's sizes."""
    from penstock.planner.profile import Profile

    if (profile is None) == (transformer is None):
        raise UsageError("give one model: --profile FILE or --transformer SIZES" + (", not both" if profile else ""))
    if profile is not None:
        if not profile.is_file():
            raise UsageError(
                f"--profile: {profile} is a folder, not a file" if profile.is_dir() else f"--profile: there is no file {profile}"
            )
        return Profile.load(profile)
    try:
        return Profile.transformer(**_fields(transformer or ""))
    except CostsError as error:
        raise UsageError(f"--transformer: {error}") from None


def _linked(model: Profile, latency: float | None, bandwidth: str | None) -> Profile:
    """The model with other links."""
    speed = size("--bandwidth", bandwidth)
    try:
        model = model if latency is None else replace(model, latency=latency)
        return model if speed is None else replace(model, bandwidth=speed)
    except CostsError as error:
        raise UsageError(f"--latency or --bandwidth: {error}") from None


def _fields(text: str) -> dict[str, Any]:
    """`layers=32 hidden=4096 microbatch=1,2,4` as fields."""
    found: dict[str, Any] = {}
    for part in re.split(r"[\s,]+(?=\w+\s*=)", text.strip()):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise UsageError(f'--transformer: {part!r} is not NAME=VALUE: write "layers=32 hidden=4096 heads=32 ..."')
        if name in found:
            raise UsageError(f"--transformer: {name} is given twice")
        found[name] = tuple(map(_value, value.split(","))) if "," in value else _value(value)
    return found


def _value(text: str) -> Any:
    """A whole number, another number, true or false, or a text such as a size."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _limit(text: str | None) -> Any:
    """One size or several; a plain number is in the profile's unit."""
    if text is None:
        return None
    made = [part.strip() if part.strip().endswith("B") else size("--memory-limit", part) for part in text.split(",")]
    for part in made:
        size("--memory-limit", str(part))
    return made[0] if len(made) == 1 else made


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def size(option: str, text: str | None) -> float | None:
    """A size that an option was given, like 50GB."""
    from penstock.ir.costs import parse_size

    try:
        return None if text is None else parse_size(text)
    except CostsError as error:
        raise UsageError(f"{option}: {error}") from None


def numbers(option: str, text: str | None) -> list[int] | None:
    """Whole numbers that an option was given, like 1,2,4."""
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of whole numbers, like 1,2,4") from None
