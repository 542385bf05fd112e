"""The page: one HTML file that ships with the package, with the documents that it shows written into it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

_PLACE = '<script type="application/json" id="penstock-documents">null</script>'
_SCRIPT = re.compile(r"<script(?![^>]*application/json)[^>]*>(.*?)</script>", re.DOTALL)


@cache
def source() -> str:
    """The page as it was built, without documents."""
    return files("penstock.studio").joinpath("page.html").read_text(encoding="utf-8")


def page(documents: Sequence[Any] | None = None, *, server: bool = False) -> str:
    """Write the documents into the page; `server` tells it that it can ask for more."""
    text = source()
    assert text.count(_PLACE) == 1, "the page has one place for documents"
    text_form = json.dumps(list(documents) if documents else None, allow_nan=False, separators=(",", ":"))
    data = text_form.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    mark = " data-server" if server else ""
    return text.replace(_PLACE, f'<script type="application/json" id="penstock-documents"{mark}>{data}</script>')


@cache
def policy() -> str:
    """The content security policy: only the page's own scripts, by their hashes, and this server."""
    digests = [hashlib.sha256(script.encode()).digest() for script in _SCRIPT.findall(source())]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    parts = {
        "default-src": "'none'",
        "script-src": scripts or "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())
