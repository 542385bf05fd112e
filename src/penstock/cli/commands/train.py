"""`penstock train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import AsJson, check_suffix, file_option, text_option
from penstock.cli.output import INTERRUPTED, deliver
from penstock.cli.training.options import TrainOptions
from penstock.errors import UsageError


def train(
    options: TrainOptions,
    *,
    save_plan: Annotated[Path | None, file_option("Save the plan of auto: .json.", "--save-plan", stdout=False)] = None,
    record: Annotated[
        Path | None,
        file_option("Save the timeline of a measured step: .json, .trace.json, .svg, .pdf, .png or .html.", "--record", stdout=False),
    ] = None,
    report: Annotated[Path | None, text_option("Write a report of the whole run, with figures: .html.", "FILE", "--report")] = None,
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
      penstock train examples/gpt.py -p 4 --memory-limit 80MiB --check --report report.html
      penstock train examples/gpt.py -p 4 --schedule zbv -m 8 --metrics run.csv
      # under torchrun: on one machine, then on each of two machines that share the folder of the checkpoints
      torchrun --nproc-per-node 4 -m penstock train examples/gpt.py
      torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m penstock train examples/gpt.py --schedule auto --checkpoints /shared/run --every 50
    """
    from penstock.cli.training.session import Session

    files = {"save_plan": save_plan, "record": record, "report": report}
    _check_files(options, files)
    session = None
    try:
        session = Session(options, quiet=as_json)
        session.run()
    except KeyboardInterrupt:
        typer.echo("interrupted before anything was started" if session is None else session.describe_interruption(), err=True)
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
        raise UsageError(f"--save-plan needs a plan, and --schedule {options.schedule} is not one: use auto, or give a --memory-limit")
    report = files["report"]
    if report is not None and (report.is_dir() or not next(folder for folder in report.absolute().parents if folder.exists()).is_dir()):
        raise UsageError(f"--report: {report} cannot be written: name a file in a folder")
    if report is not None:
        from penstock.draw.figures.canvas import use_style

        with use_style():  # says what to install if figures cannot be drawn
            pass
