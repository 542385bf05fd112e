"""Checks of requests: only those of the studio's own page are allowed, by the Host, Origin and Sec-Fetch-Site headers."""

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
    """The host names that the studio answers to; if it is open to other machines, also every IP address and this machine's name.

    An attacker's page can point its own host name at this machine (DNS rebinding), but not an address, so names are checked.
    """

    host: str

    @property
    def is_local(self) -> bool:
        return self.host in LOCAL or (_is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def knows(self, authority: str) -> bool:
        """Whether a Host header (a name, maybe with a port) is one of ours."""
        try:
            name = urlsplit(f"//{authority}").hostname or ""
            urlsplit(f"//{authority}").port  # noqa: B018 - refuses an invalid port
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


class OriginGuard:
    """Middleware that refuses requests of other origins, and adds security headers to every response."""

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
                message["headers"] = [*message["headers"], *_list_headers()]
            await send(message)

        if reason is None:
            await self.app(scope, receive, send_guarded)
            return
        from starlette.responses import JSONResponse

        await JSONResponse({"error": reason}, status_code=403)(scope, receive, send_guarded)

    def refusal(self, scope: Scope) -> str | None:
        """Why the request is refused, if it is."""
        headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        hosts, origins, sites = ([value.decode("latin-1") for name, value in headers if name == checked] for checked in _CHECKED)
        if len(hosts) != 1 or not self.hosts.knows(hosts[0]):
            return "the studio does not answer to this name: open it as http://localhost with its port"
        foreign = scope["path"] != "/" and any(site not in ("same-origin", "none") for site in sites)  # other sites may link to the page
        if foreign or any(origin != f"http://{hosts[0]}" for origin in origins):
            return "the studio answers only its own page, not pages of other origins"
        return None


_CHECKED = (b"host", b"origin", b"sec-fetch-site")


def _list_headers() -> list[tuple[bytes, bytes]]:
    headers: dict[str, Any] = {
        "content-security-policy": policy(),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]
