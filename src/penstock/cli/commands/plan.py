"""`penstock plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, check_suffix, file_or_stdout, read_size, whole_number, whole_numbers, writable
from penstock.errors import CostsError, PlanError, UsageError

if TYPE_CHECKING:
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
            help='A transformer by its sizes instead: "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12".',
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("-p", "--ranks", metavar="N", parser=whole_number, help="Ranks of the pipeline.")],
    microbatches: Annotated[
        int | None,
        typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches per step, of the profile's size."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", parser=whole_number, help="Samples per step; the microbatch size is then chosen too."),
    ] = None,
    microbatch_sizes: Annotated[
        str | None,
        typer.Option("--microbatch-sizes", metavar="N,N", help="The sizes to choose from.  [default: the sizes in the profile]"),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The memory limit per rank, like 40GiB; or one per rank, with commas."),
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(
            "--headroom", metavar="SHARE", help="The share of each limit to keep free.  [default: 0.05 for estimated profiles, else 0]"
        ),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            "--schedules", metavar="NAME,NAME", help="The schedules to try; 'searched' is an order found by search.  [default: all]"
        ),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Let stages recompute their forward if nothing fits otherwise.")] = False,
    barrier: Annotated[
        bool,
        typer.Option(
            "--barrier/--no-barrier",
            help="Whether the optimizer waits for all ranks: minimize the makespan, or else the longest span of a rank.",
        ),
    ] = True,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Whether the backward may be split.")] = True,
    latency: Annotated[
        float | None, typer.Option("--latency", metavar="TIME", help="Latency of a message, instead of the profile's.")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option("--bandwidth", metavar="SIZE", help="Bandwidth of a link per unit of time, like 50GB, instead of the profile's."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long to plan; 0 tries only the named schedules, however long that takes.")
    ] = 7.0,
    rounds: Annotated[
        float | None,
        typer.Option("--rounds", metavar="N", help="Orders that the search times.  [default: as many as usually fit into --seconds]"),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", parser=whole_number, help="The random seed of the search and of the jitter.")
    ] = 0,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", callback=writable, help="Draw time against memory: .svg or .png.")
    ] = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", callback=file_or_stdout, help="Save the plan: .json.")
    ] = None,
) -> int:
    """Find the best schedule for a model and a memory limit.

    Chooses the partition, the schedule, its chunks, the microbatch size and what to recompute; prints why, the memory of each rank,
    and the gap to the lower bound. Ctrl-C ends the search and keeps the best plan so far, with exit code 130.

    \b
    Examples:
      penstock plan --profile p.json --ranks 8 --memory-limit 40GiB --batch 512 -o plan.json
      penstock plan --transformer "layers=32 hidden=4096 heads=32 sequence=4096 vocabulary=32000 flops=400e12" -p 8 -m 32
      penstock plan --profile p.json -p 4 -m 16 --schedules 1f1b,zbv --recompute --figure plan.svg
    """
    from penstock.cli.output import deliver
    from penstock.cli.progress import catch_interrupt, show_planning
    from penstock.draw.figures.tradeoff import SUFFIXES
    from penstock.planner import plan as planning
    from penstock.planner.request import is_in_bytes
    from penstock.text.units import Units

    check_suffix(figure, SUFFIXES)
    check_suffix(output, (".json",))
    limit = _limit(memory_limit)
    if (microbatches is None) == (batch is None):
        raise UsageError("give one of the two: --microbatches, or --batch with the samples per step")
    model = _replace_links(_load_model(profile, transformer), latency, bandwidth)
    options: dict[str, Any] = {"microbatches": microbatches, "batch": batch, "memory_limit": limit, "recompute": recompute}
    options |= {"barrier": barrier, "split": split, "headroom": headroom, "seconds": seconds, "rounds": rounds, "seed": seed}
    options |= {"schedules": _names(schedules), "microbatch_sizes": whole_numbers("--microbatch-sizes", microbatch_sizes)}
    with catch_interrupt() as stopped, show_planning(Units(model.time_unit, is_in_bytes(model, limit))) as tell:
        try:
            best = planning.plan(model, ranks=ranks, **options, progress=tell, stop=stopped)
        except PlanError as error:
            if not stopped():
                raise
            return _report_interrupt(str(error))
    if output is not None:
        best.save(output)
    if figure is not None:
        best.save(figure)
    deliver(lambda _: _lines(best, output), best.to_json, as_json=as_json, output=None)
    return _report_interrupt("this is the best plan so far") if stopped() else 0


def _report_interrupt(result: str) -> int:
    typer.echo(f"interrupted: {result}", err=True)
    return INTERRUPTED


def _lines(best: Plan, output: Path | None) -> Iterator[str]:
    yield from best.report().splitlines()
    if output is not None:
        yield ""
        yield f"saved to {output}"


def _load_model(profile: Path | None, transformer: str | None) -> Profile:
    """Load the profile, or estimate it from a transformer's sizes."""
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
        return Profile.transformer(**_parse_fields(transformer or ""))
    except CostsError as error:
        raise UsageError(f"--transformer: {error}") from None


def _replace_links(model: Profile, latency: float | None, bandwidth: str | None) -> Profile:
    """Replace the latency and the bandwidth of the profile, if they are given."""
    speed = read_size("--bandwidth", bandwidth)
    try:
        model = model if latency is None else replace(model, latency=latency)
        return model if speed is None else replace(model, bandwidth=speed)
    except CostsError as error:
        raise UsageError(f"--latency or --bandwidth: {error}") from None


def _parse_fields(text: str) -> dict[str, Any]:
    """Read `layers=32 hidden=4096 microbatch=1,2,4`."""
    sizes: dict[str, Any] = {}
    for part in re.split(r"[\s,]+(?=\w+\s*=)", text.strip()):
        name, equals, value = map(str.strip, part.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise UsageError(f'--transformer: {part!r} is not NAME=VALUE: write "layers=32 hidden=4096 heads=32 ..."')
        if name in sizes:
            raise UsageError(f"--transformer: {name} is given twice")
        sizes[name] = tuple(map(_parse_value, value.split(","))) if "," in value else _parse_value(value)
    return sizes


def _parse_value(text: str) -> Any:
    """Read a number, true or false, or text such as a size."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _limit(text: str | None) -> Any:
    """Read one size or several; a plain number is in the profile's unit."""
    from penstock.text.units import has_byte_unit

    if text is None:
        return None
    sizes = [(part.strip(), read_size("--memory-limit", part)) for part in text.split(",")]
    limits = [part if has_byte_unit(part) else size for part, size in sizes]
    return limits[0] if len(limits) == 1 else limits


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
