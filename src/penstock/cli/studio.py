"""`penstock studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.documents import AnySources, MemoryLimit, PerSource
from penstock.cli.options import CostsText, Fsdp, Lower, MergeBackward, Microbatches, Ranks, Receive, whole_number

PORT = 8765


def studio(
    sources: AnySources = None,
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
    port: Annotated[int, typer.Option("--port", metavar="N", parser=whole_number, help="Where to listen; 0 for any that is free.")] = PORT,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen; others than localhost are open to others.")] = (
        "127.0.0.1"
    ),
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Whether to open the browser.")] = True,
) -> None:
    """See, change and compare schedules in the browser.

    Starts a server on this machine and opens its page; Ctrl-C ends it. What is named is opened at once. The page reads only files that
    are named here or opened in it, and asks nobody but this server. Needs the extra 'studio'.

    \b
    Examples:
      penstock studio
      penstock studio zbv 1f1b -p 8 -m 32
      penstock studio measured.json --port 0 --no-open
    """
    from penstock.cli.documents import shown
    from penstock.cli.timed import recipe
    from penstock.studio.serve import Address, serve

    address = Address(host, port)
    address.check()
    how = recipe(lower, fsdp, merge_backward, receive)
    found = shown(sources or [], how, ranks=ranks, microbatches=microbatches, costs=costs, per=per, memory_limit=memory_limit)
    serve(found, address, open_browser=open_browser, tell=lambda text: typer.echo(text, err=True))
