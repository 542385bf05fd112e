"""`penstock studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import CostsText, Fsdp, Lower, MergeBackward, Microbatches, Ranks, Receive, whole_number
from penstock.cli.studio_documents import AnySources, MemoryLimit, PerSource

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
    port: Annotated[
        int, typer.Option("--port", metavar="N", parser=whole_number, help="The port to listen on; 0 for any free port.")
    ] = PORT,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on; any but localhost lets other machines in.")
    ] = ("127.0.0.1"),
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Whether to open the browser.")] = True,
) -> None:
    """See, change and compare schedules in the browser.

    Starts a server on this machine and opens its page with the schedules and files that are named; Ctrl-C ends it. The page reads
    only files that are named here or opened in it, and talks to no other server. Needs the extra 'studio'.

    \b
    Examples:
      penstock studio
      penstock studio zbv 1f1b -p 8 -m 32
      penstock studio measured.json --port 0 --no-open
    """
    from penstock.cli.lowering import optional_lowering
    from penstock.cli.studio_documents import make_documents
    from penstock.studio.server import Address, serve

    address = Address(host, port)
    address.check()
    lowering = optional_lowering(lower, fsdp, merge_backward, receive)
    shape = {"ranks": ranks, "microbatches": microbatches}
    documents = make_documents(sources or [], lowering, **shape, costs=costs, per=per, memory_limit=memory_limit)
    serve(documents, address, open_browser=open_browser, tell=lambda text: typer.echo(text, err=True))
