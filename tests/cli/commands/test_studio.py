"""`penstock studio`, as a user starts and ends it."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection

import pytest

from penstock.studio import server
from penstock.studio.server import Address

LONG = 300
"""Timeout in seconds: only a hang takes this long."""


@contextmanager
def studio(*args: str) -> Iterator[tuple[subprocess.Popen, HTTPConnection]]:
    """A studio on a free port, and a client for it."""
    command = [sys.executable, "-m", "penstock", "studio", "--no-open", "--port", "0", *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        port = int(re.fullmatch(r"the studio is at http://localhost:(\d+)/ \(Ctrl-C ends it\)\n", line)[1])
        with closing(HTTPConnection("127.0.0.1", port, timeout=LONG)) as connection:
            yield process, connection
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def ask(connection: HTTPConnection, path: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


@pytest.mark.slow
def test_the_page_contains_the_named_sources_and_ctrl_c_ends_the_server():
    with studio("zbv", "1f1b", "-p", "2", "-m", "3") as (process, connection):
        status, page = ask(connection, "/")
        (held,) = re.findall(rb'id="penstock-documents" data-server>(.*?)</script>', page, re.DOTALL)
        assert (status, [each["source"]["name"] for each in json.loads(held)]) == (200, ["zbv", "1f1b"])
        status, made = ask(connection, "/api/view", {"schedule": "gpipe", "ranks": 2, "microbatches": 2})
        assert (status, json.loads(made)["ranks"]) == (200, 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 130
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_ctrl_c_ends_a_plan_that_is_being_made_and_followed():
    model = {"layers": 64, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100, "flops": 1e9}
    with studio() as (process, connection):
        status, said = ask(connection, "/api/plan", {"transformer": model, "ranks": 16, "microbatches": 256, "seconds": 600})
        assert status == 200, said
        connection.request("GET", f"/api/plan/{json.loads(said)['job']}/events")
        response = connection.getresponse()
        assert response.readline().startswith((b"event: ", b": alive"))
        process.send_signal(signal.SIGINT)
        assert b"the studio was closed" in response.read()
        assert (process.wait(LONG), process.stderr.read()) == (130, "")


def test_a_port_in_use_is_reported(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} is in use" in refused(2, "studio", "--no-open", "--port", port)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--port", "99999"], "a port is from 0"),
        (["--port", "x"], "'x' is not a whole number"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["-p", "4"], "name a schedule or a file"),
        (["zbw"], "did you mean 'zbv'"),
    ],
)
def test_impossible_arguments_are_refused(refused, args, said):
    assert said in refused(2, "studio", "--no-open", *args)


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_the_error_says_what_to_install(refused, monkeypatch, missing):
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == missing else importlib.util.find_spec(name))
    assert (
        f"the studio needs {missing}, which is not installed: install the extra 'studio', pip install '.[studio]' in a clone of Penstock"
        in refused(2, "studio", "--no-open")
    )


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "localhost"), ("0.0.0.0", socket.gethostname())])
def test_opens_the_browser_and_warns_if_open_to_others(monkeypatch, host, url):
    opened, told, ran = [], [], []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: ran.append(sockets[0].getsockname()[1]))
    monkeypatch.setattr("threading.Thread.start", lambda self: self.run())
    server.serve([], Address(host, 0), open_browser=True, tell=told.append)
    assert opened == [f"http://{url}:{ran[0]}/"]
    assert told[0] == f"the studio is at {opened[0]} (Ctrl-C ends it)"
    assert [("anyone who can reach this machine" in text) for text in told[1:]] == ([] if host == "127.0.0.1" else [True])
