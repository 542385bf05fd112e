"""Run the studio's server until it is ended."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError, UsageError
from penstock.studio.guard import Hosts

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

LARGEST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    def check(self) -> None:
        """Refuse what cannot be before anything is built."""
        for package in ("starlette", "uvicorn"):
            if find_spec(package) is None:
                raise MissingExtraError("the studio", package, "studio")
        if not 0 <= self.port <= LARGEST_PORT:
            raise UsageError(f"--port {self.port}: a port is from 0 (any that is free) to {LARGEST_PORT}")

    def bound(self) -> socket.socket:
        """A socket that listens there."""
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise UsageError(f"--host {self.host}: {error.strerror or error}") from None
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen()
        except OSError as error:
            made.close()
            raise UsageError(self._said(error)) from None
        return made

    def _said(self, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return f"port {self.port} is in use, maybe by another studio: choose one with --port, or --port 0 for any that is free"
        if error.errno == errno.EACCES:
            return f"port {self.port} is not allowed: choose one from 1024 on with --port"
        return f"cannot listen on {self.host} port {self.port}: {error.strerror or error}"


def serve(documents: Sequence[Any], address: Address, *, open_browser: bool, tell: Callable[[str], None]) -> None:
    """Serve the page with these documents until Ctrl-C; `tell` is told where it is."""
    from penstock.studio.server import application

    app = application(documents, host=address.host)
    with address.bound() as listening:
        port = listening.getsockname()[1]
        hosts = Hosts(address.host)
        url = f"http://{'localhost' if hosts.is_local else socket.gethostname()}:{port}/"
        tell(f"the studio is at {url} (Ctrl-C ends it)")
        if not hosts.is_local:
            tell(f"it listens on {address.host}: everyone who can reach this machine can use it")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        _server(app).run(sockets=[listening])


def _server(app: Starlette) -> uvicorn.Server:
    """A server that ends plans and requests before it waits for whoever follows them."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await asyncio.to_thread(app.state.studio.close)
            await super().shutdown(sockets)

    return Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=30))
