"""Who may ask: this machine's own pages, and nobody who was sent here by a name or a page of somebody else's."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.studio.page import policy

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Hosts:
    """The names under which the studio answers. Where it is open to others, also every address and the machine's own name.

    A page of somebody else's can point a name of theirs at this machine, but not an address: names are what is checked.
    """

    host: str

    @property
    def is_local(self) -> bool:
        return self.host in LOCAL or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def knows(self, authority: str) -> bool:
        """Whether a Host header, a name and maybe a port, is one of ours."""
        try:
            name = urlsplit(f"//{authority}").hostname or ""
            urlsplit(f"//{authority}").port  # noqa: B018 - refuses what is no port
        except ValueError:
            return False
        if "@" in authority or "/" in authority:
            return False
        if name in (*LOCAL, self.host.lower()):
            return True
        return not self.is_local and (_is_address(name) or name == socket.gethostname().lower())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Refuses requests of other origins, and says with every answer what a browser may do with it."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        reason = self.refusal(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_headers()]
            await send(message)

        if reason is None:
            await self.app(scope, receive, send_guarded)
            return
        from starlette.responses import JSONResponse

        await JSONResponse({"error": reason}, status_code=403)(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> str | None:
        """Why the request is refused, if it is."""
        given: list[tuple[bytes, bytes]] = list(scope["headers"])
        hosts, origins, sites = ([value.decode("latin-1") for name, value in given if name == wanted] for wanted in _CHECKED)
        if len(hosts) != 1 or not self.hosts.knows(hosts[0]):
            return "the studio does not answer under this name: open it as http://localhost with its port"
        away = scope["path"] != "/" and any(site not in ("same-origin", "none") for site in sites)  # a link may lead to the page
        if away or any(origin != f"http://{hosts[0]}" for origin in origins):
            return "the studio answers its own page only, not pages of other origins"
        return None


_CHECKED = (b"host", b"origin", b"sec-fetch-site")


def _headers() -> list[tuple[bytes, bytes]]:
    said: dict[str, Any] = {
        "content-security-policy": policy(),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in said.items()]
