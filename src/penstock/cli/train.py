"""`penstock train`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, whole_number, writable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.wish import Wish

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|MODULE[:FUNCTION]",
            help="A training file: build() and data(), see docs/train.md; FUNCTION takes build's place.",
        ),
    ],
    *,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-p", "--ranks", metavar="N", parser=whole_number, help="Processes to start here; under torchrun those that there are."
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option("--schedule", metavar="NAME|FILE", help="A schedule's name, a .csv or .json file, a plan, or auto: profile and plan."),
    ] = "auto",
    microbatches: Annotated[
        int | None,
        typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches of a step.  [default: auto chooses]"),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", parser=whole_number, help="Steps in all, those of earlier runs included.")
    ] = 100,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", parser=whole_number, help="Samples of a step.  [default: those of a plan, else 32]"),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The most that a rank may hold, like 40GiB; with --schedule auto or a NAME."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Let auto run forwards again where something fits only so.")] = False,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="How long auto searches, after the named schedules.  [default: 5]")
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option("--checkpoints", metavar="FOLDER", help="Save checkpoints there, and go on from the last one.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", parser=whole_number, help="Steps between two checkpoints.  [default: one at the end]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", parser=whole_number, help="Of the model, the data's order and dropout.")] = 0,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, or auto: cuda if there is one.")] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Compare loss and gradients of the first and the last step with the unpipelined model.")
    ] = False,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", metavar="FILE", callback=writable, help="Save what auto planned: .json.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="FILE", callback=writable, help="Save a step as it was measured: .json, .trace.json, .svg, .png or .html."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write all of it, with pictures, as one page: .html.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a model as a pipeline, here or under torchrun.

    It starts processes on this machine, or joins those that torchrun has started.

    With --schedule auto the model is measured layer by layer, and the best schedule found within the memory limit is taken. What is
    to run is proved first. Ctrl-C ends all processes. With --checkpoints the same command goes on where the last one ended, with as
    many ranks as there are then. Needs torch.

    \b
    Examples:
      penstock train examples/gpt.py --ranks 4 --schedule auto
      penstock train examples/gpt.py -p 4 --schedule zbv -m 8 --checkpoints run --every 50
      penstock train examples/gpt.py -p 4 --memory-limit 12MiB --check --report report.html
      # under torchrun: on one machine, then on each of two that share the folder of the checkpoints
      torchrun --nproc-per-node 4 -m penstock train examples/gpt.py
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m penstock train examples/gpt.py --schedule auto --checkpoints /shared/run --every 50
    """
    from penstock.cli.output import deliver
    from penstock.cli.training import Session
    from penstock.cli.wish import Wish

    wish = Wish(
        source, ranks, schedule, microbatches, steps, batch, memory_limit, recompute, seconds, checkpoints, every or 0, seed, device, check
    )
    files = {"save_plan": save_plan, "record": record, "report": report}
    _check_files(wish, files)
    session = None
    try:
        session = Session(wish, quiet=as_json)
        session.run()
    except KeyboardInterrupt:
        typer.echo("interrupted before anything was started" if session is None else session.ended(), err=True)
        return INTERRUPTED
    if session.first:
        session.save(save_plan, record, report)
        deliver(lambda _: _lines(session.summary()), session.data, as_json=as_json, output=None)
    return int(not session.equal)


def _lines(said: list[str]) -> Iterator[Any]:
    return ([(line, None)] for line in said)


def _check_files(wish: Wish, files: dict[str, Path | None]) -> None:
    """Refuse what cannot be written before anything is trained."""
    from penstock.cli.timed import check_output
    from penstock.draw.save import SUFFIXES

    check_output(files["save_plan"], (".json",))
    check_output(files["record"], SUFFIXES)
    check_output(files["report"], (".html",))
    if files["save_plan"] is not None and not wish.is_planned:
        raise UsageError(f"--save-plan saves what is planned, and --schedule {wish.schedule} is not: take auto, or give a --memory-limit")
    report = files["report"]
    if report is not None and (report.is_dir() or not next(each for each in report.absolute().parents if each.exists()).is_dir()):
        raise UsageError(f"--report: {report} cannot be written: name a file in a folder")
    if report is not None:
        from penstock.draw.figures.canvas import use_style

        with use_style():  # says what to install where pictures cannot be drawn
            pass
