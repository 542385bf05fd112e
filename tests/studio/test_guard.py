"""Which requests the server accepts: hosts and origins."""

from __future__ import annotations

import socket

import pytest
from starlette.testclient import TestClient

from penstock.studio.security import Hosts

LOCAL = Hosts("127.0.0.1")
OPEN = Hosts("0.0.0.0")
ASKED = [("GET", "/api/schedules"), ("POST", "/api/view"), ("DELETE", "/api/plan/x")]


@pytest.mark.parametrize("host", ["localhost", "localhost:8765", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8765", "[::1]"])
def test_this_machine_s_names_are_accepted(host):
    assert LOCAL.knows(host)
    assert OPEN.knows(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "localhost.evil.example:8765",
        "evil.example@localhost",
        "localhost/evil",
        "localhost:port",
        "[::1",
        "127.0.0.1.nip.io",
        "::",
    ],
)
def test_other_names_are_refused(host):
    assert not LOCAL.knows(host)
    assert not OPEN.knows(host)


def test_a_server_open_to_others_answers_to_addresses_and_its_own_name():
    assert OPEN.knows("192.168.1.7:8765")
    assert not LOCAL.knows("192.168.1.7:8765")
    assert OPEN.knows(f"{socket.gethostname()}:8765")
    assert Hosts("studio.example").knows("studio.example:80")


def test_local_addresses_are_recognised():
    assert [Hosts(host).is_local for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "0.0.0.0", "10.0.0.1", "studio.example")] == [
        *[True] * 4,
        *[False] * 3,
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8765", "origin": "http://evil.example:8765"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8765"},
        {"origin": "http://localhost:8765"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), *ASKED])
def test_other_hosts_and_origins_are_refused_everywhere(client: TestClient, method, path, headers):
    response = client.request(method, path, headers=headers)
    assert response.status_code == 403
    assert "the studio" in response.json()["error"]


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
@pytest.mark.parametrize(("method", "path"), ASKED)
def test_requests_from_other_sites_without_an_origin_are_refused(client: TestClient, method, path, site):
    assert client.request(method, path, headers={"sec-fetch-site": site}).status_code == 403


def test_a_link_on_another_site_may_lead_to_the_page(client: TestClient):
    response = client.get("/", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"})
    assert (response.status_code, response.headers["cross-origin-resource-policy"]) == (200, "same-origin")


def test_the_page_s_own_requests_are_answered(client: TestClient):
    headers = {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "same-origin"}
    body = {"schedule": "1f1b", "ranks": 2, "microbatches": 2}
    assert client.post("/api/view", json=body, headers=headers).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "none"}).status_code == 200
    assert client.get("/", headers={"host": "localhost:8765"}).status_code == 200


def test_two_host_headers_are_refused(client: TestClient):
    response = client.get("/", headers=[("host", "127.0.0.1:8765"), ("host", "evil.example")])
    assert response.status_code == 403
