"""`penstock export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from penstock.cli.options import check_suffix, file_option
from penstock.cli.output import emit, show_steps
from penstock.cli.sources import DocumentOptions, OptionalLowering, Sources
from penstock.errors import UsageError


def export(
    sources: Sources,
    *,
    options: DocumentOptions,
    lowering: OptionalLowering,
    output: Annotated[
        Path | None, file_option("The .html file to write.  [default: stdout, if it is not a terminal]", "-o", "--output")
    ] = None,
) -> None:
    """Write schedules into a copy of the studio's page.

    The page is one file that works offline. It times, explains and compares the schedules in it, also under other costs; only other
    schedules need 'penstock studio'. A file with mistakes is shown with the verifier's findings at their places.

    \b
    Examples:
      penstock export zbv -p 8 -m 32 -o zbv.html
      penstock export zbv 1f1b -p 8 -m 32 --costs "f=1,i=1,w=1,latency=0.1" -o compare.html
      penstock export predicted.json measured.json -o run.html
    """
    from penstock.ir.formats.csv_form import write_whole
    from penstock.studio.page import page

    check_suffix(output, (".html", ".htm"))
    if output is None and sys.stdout.isatty():
        raise UsageError("the page is a long file: name one with -o FILE.html, or send it on with a pipe")
    with show_steps(1) as step:
        step("building the page")
        text = page(options.documents(sources, lowering.read_lowering()))
    if output is None:
        emit([text])
    else:
        write_whole(output, text)
