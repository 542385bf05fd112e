"""`penstock train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import AsJson, check_suffix, whole_number, writable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.training.options import TrainOptions

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


def train(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|MODULE[:FUNCTION]",
            help="A training file with build() and data(), see docs/train.md; FUNCTION replaces build.",
        ),
    ],
    *,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-p", "--ranks", metavar="N", parser=whole_number, help="Processes to start here; under torchrun, the number of its processes."
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option("--schedule", metavar="NAME|FILE", help="A schedule's name, a .csv or .json file, a plan, or auto: profile and plan."),
    ] = "auto",
    microbatches: Annotated[
        int | None,
        typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches per step.  [default: auto chooses]"),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", parser=whole_number, help="Steps in total, including those of earlier runs.")
    ] = 100,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", parser=whole_number, help="Samples per step.  [default: the plan's batch, else 32]"),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="The memory limit per rank, like 40GiB; with --schedule auto or a NAME."),
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Let auto recompute forwards if nothing fits otherwise.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="S", help="How long auto searches after it tried the named schedules.  [default: 5]"),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option("--checkpoints", metavar="FOLDER", help="Save checkpoints there, and resume from the last one.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", metavar="N", parser=whole_number, help="Steps between two checkpoints.  [default: one at the end]"),
    ] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", parser=whole_number, help="The random seed of the model, the order of the data and dropout."),
    ] = 0,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, or auto: cuda if there is one.")] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Compare loss and gradients of the first and the last step with the unpipelined model.")
    ] = False,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", metavar="FILE", callback=writable, help="Save the plan of auto: .json.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            callback=writable,
            help="Save the timeline of a measured step: .json, .trace.json, .svg, .png or .html.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a report of the whole run, with figures: .html.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Train a model as a pipeline, here or under torchrun.

    It starts processes on this machine, or joins the processes that torchrun has started.

    With --schedule auto it measures the model layer by layer and plans the best schedule within the memory limit. The program is proved
    before it runs. Ctrl-C ends all processes. With --checkpoints the same command resumes where the last one ended, on any number of
    ranks. Needs torch.

    \b
    Examples:
      penstock train examples/gpt.py --ranks 4 --schedule auto
      penstock train examples/gpt.py -p 4 --schedule zbv -m 8 --checkpoints run --every 50
      penstock train examples/gpt.py -p 4 --memory-limit 12MiB --check --report report.html
      # under torchrun: on one machine, then on each of two machines that share the folder of the checkpoints
      torchrun --nproc-per-node 4 -m penstock train examples/gpt.py
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m penstock train examples/gpt.py --schedule auto --checkpoints /shared/run --every 50
    """
    from penstock.cli.output import deliver
    from penstock.cli.training.options import TrainOptions
    from penstock.cli.training.session import Session

    options = TrainOptions(
        source, ranks, schedule, microbatches, steps, batch, memory_limit, recompute, seconds, checkpoints, every or 0, seed, device, check
    )
    files = {"save_plan": save_plan, "record": record, "report": report}
    _check_files(options, files)
    session = None
    try:
        session = Session(options, quiet=as_json)
        session.run()
    except KeyboardInterrupt:
        typer.echo("interrupted before anything was started" if session is None else session.interrupted(), err=True)
        return INTERRUPTED
    if session.first:
        session.save(save_plan, record, report)
        deliver(lambda _: session.summary(), session.data, as_json=as_json, output=None)
    return int(not session.equal)


def _check_files(options: TrainOptions, files: dict[str, Path | None]) -> None:
    """Refuse files that cannot be written before training starts."""
    from penstock.draw.save import SUFFIXES

    check_suffix(files["save_plan"], (".json",))
    check_suffix(files["record"], SUFFIXES)
    check_suffix(files["report"], (".html",))
    if files["save_plan"] is not None and not options.is_planned:
        raise UsageError(f"--save-plan needs a plan, and --schedule {options.schedule} is none: use auto, or give a --memory-limit")
    report = files["report"]
    if report is not None and (report.is_dir() or not next(folder for folder in report.absolute().parents if folder.exists()).is_dir()):
        raise UsageError(f"--report: {report} cannot be written: name a file in a folder")
    if report is not None:
        from penstock.draw.figures.canvas import use_style

        with use_style():  # says what to install if figures cannot be drawn
            pass
