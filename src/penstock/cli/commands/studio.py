"""`penstock studio`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import count_option, text_option
from penstock.cli.sources import AnySources, DocumentOptions, OptionalLowering

PORT = 8765


def studio(
    sources: AnySources = None,
    *,
    options: DocumentOptions,
    lowering: OptionalLowering,
    port: Annotated[int, count_option("The port to listen on; 0 for any free port.", "--port")] = PORT,
    host: Annotated[
        str, text_option("The address to listen on; any but localhost lets other machines in.", "ADDRESS", "--host")
    ] = "127.0.0.1",
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
    from penstock.studio.server import Address, serve

    address = Address(host, port)
    address.check()
    documents = options.documents(sources or [], lowering.read_lowering())
    serve(documents, address, open_browser=open_browser, tell=lambda text: typer.echo(text, err=True))
