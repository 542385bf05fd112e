"""`penstock export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import CostsText, Fsdp, Lower, MergeBackward, Microbatches, Ranks, Receive, check_suffix, file_or_stdout
from penstock.cli.studio_documents import MemoryLimit, PerSource, Sources


def export(
    sources: Sources,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsText = None,
    per: PerSource = None,
    memory_limit: MemoryLimit = None,
    lower: Lower = False,
    fsdp: Fsdp = False,
    merge_backward: MergeBackward = False,
    receive: Receive = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", callback=file_or_stdout, help="The .html file to write.  [default: stdout]"),
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
    from penstock.cli.lowering import optional_lowering
    from penstock.cli.output import emit, write
    from penstock.cli.studio_documents import make_documents
    from penstock.studio.page import page

    check_suffix(output, (".html", ".htm"))
    lowering = optional_lowering(lower, fsdp, merge_backward, receive)
    shape = {"ranks": ranks, "microbatches": microbatches}
    text = page(make_documents(sources, lowering, **shape, costs=costs, per=per, memory_limit=memory_limit))
    if output is None:
        emit([text])
    else:
        write(output, text)
