"""The server's answers and refusals."""

from __future__ import annotations

import asyncio
import json
from threading import Event

import pytest
from starlette.testclient import TestClient

import penstock as ps
from penstock.ir.formats.csv_form import csv_text
from penstock.schedules.registry import algorithms
from penstock.simulator.simulate import simulate
from penstock.studio import server
from penstock.studio.document import document
from penstock.studio.limits import MOST_ACTIONS
from penstock.studio.worker import Question, Worker
from studio.page import Page

VIEW = {"schedule": "zbv", "ranks": 4, "microbatches": 8}


def refusal(response) -> str:
    """The message of a request that was refused."""
    assert 400 <= response.status_code < 500
    assert list(response.json()) == ["error"]
    return response.json()["error"]


def opened(client: TestClient, name: str, content: str):
    return client.post("/api/open", json={"name": name, "content": content})


def as_sent(made: dict) -> dict:
    return json.loads(json.dumps(made))


# The page and the schedules -------------------------------------------------------------------------------------------


def test_the_page_is_marked_as_served(client):
    response = client.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert '<script type="application/json" id="penstock-documents" data-server>null</script>' in response.text


def test_every_schedule_is_listed_with_its_options(client):
    found = {each["name"]: each for each in client.get("/api/schedules").json()}
    assert set(found) == set(algorithms())
    group_size, slices = ({"name": "group_size", "type": "int", "default": None}, {"name": "slices", "type": "int", "default": 1})
    assert found["interleaved-1f1b"]["options"] == [group_size, slices]
    assert found["seq1f1b"]["options"] == [{**slices, "default": 4}]
    assert found["1f1b"]["options"] == []
    assert found["hanayo"]["chunks"] == {"default": 2, "fixed": False, "step": 2}
    assert [name for name, each in found.items() if each["depends_on_costs"]] == ["zb-auto"]
    assert [each["name"] for each in found["zb-auto"]["options"]] == ["memory_limit"]


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_every_schedule_can_be_viewed_and_timed(client, page: Page, name):
    ranks = 1 if name == "data-parallel" else 4
    response = client.post("/api/view", json={"schedule": name, "ranks": ranks, "microbatches": 6})
    assert response.status_code == 200
    said = page.ask(response.json(), {})
    assert said["numbers"]["makespan"] == simulate(ps.schedule(name, ranks, 6)).makespan


# Schedules by name ----------------------------------------------------------------------------------------------------


def test_a_view_equals_the_document_of_the_schedule(client):
    costs = {"f": 2.0, "latency": 0.5, "activation": [1.0] * 8}
    got = client.post("/api/view", json={**VIEW, "costs": costs, "memory_limit": 9}).json()
    source = {
        "kind": "schedule",
        "name": "zbv",
        "ranks": 4,
        "microbatches": 8,
        "chunks": 2,
        "options": {},
        "lower": False,
        "fsdp": False,
        "offload": "",
    }
    assert got == as_sent(document(ps.schedule("zbv", 4, 8), ps.Costs(**costs), source=source, memory_limit=9.0))


def test_lowered_views_have_sends_and_receives(client):
    got = client.post("/api/view", json={**VIEW, "fsdp": True}).json()
    assert (got["lowered"], got["table"]["type"]) == (True, "program")
    assert got["entries"] == as_sent(document(ps.lower(ps.schedule("zbv", 4, 8), fsdp=True), source={}))["entries"]


def test_costs_and_memory_limit_reach_schedules_that_depend_on_them(client):
    body = {"schedule": "zb-auto", "ranks": 4, "microbatches": 8, "costs": {"f": 2.0, "i": 2.0}, "memory_limit": 6}
    got = client.post("/api/view", json=body).json()
    wanted = ps.schedule("zb-auto", 4, 8, costs=ps.Costs(f=2, i=2), memory_limit=6)
    assert got["depends_on_costs"]
    assert got["entries"] == as_sent(document(wanted, source={}))["entries"]
    other = client.post("/api/view", json={**body, "memory_limit": 2}).json()
    assert other["entries"] != got["entries"]


def test_options_reach_the_schedule(client):
    body = {"schedule": "interleaved-1f1b", "ranks": 4, "microbatches": 16, "chunks": 3, "options": {"group_size": 8}}
    wanted = document(ps.schedule("interleaved-1f1b", 4, 16, chunks=3, group_size=8), source={})
    assert client.post("/api/view", json=body).json()["entries"] == as_sent(wanted)["entries"]
    named = {"schedule": "Interleaved1F1B{chunks=3,group_size=8}", "ranks": 4, "microbatches": 16}
    assert client.post("/api/view", json=named).json()["entries"] == as_sent(wanted)["entries"]
    assert "chunks is given twice" in refusal(client.post("/api/view", json={**named, "chunks": 2}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "zbw"}, "did you mean 'zbv'"),
        ({"ranks": 0}, "ranks must be from 1"),
        ({"ranks": "4"}, "'ranks' must be a whole number, got text"),
        ({"ranks": True}, "'ranks' must be a whole number"),
        ({"microbatches": 10**30}, "microbatches must be from 1"),
        ({"microbatches": 1 << 20}, f"more than the studio takes, {MOST_ACTIONS:,}"),
        ({"chunks": 3}, "places 2 stages on each rank"),
        ({"options": {"group_size": 2}}, "has no option 'group_size'"),
        ({"options": {"graph": 1}}, "has no option 'graph'"),
        ({"costs": {"f": -1}}, "f must be a finite number of at least 0"),
        ({"costs": {"f": [1, 2]}}, "f has 2 values for 8 stages"),
        ({"costs": {"f": 1e300}}, "f is 1e+300: the studio draws costs from 1e-24 to 1e+24"),
        ({"costs": {"i": [1] * 7 + [5e-324]}}, "i is 4.94066e-324"),
        ({"costs": {"bandwidth": 1e-300}}, "bandwidth is 1e-300"),
        ({"costs": {"g": 1}}, "there is no field 'g'"),
        ({"memory_limit": [1, 2]}, "memory_limit has 2 values for 4 ranks"),
        ({"memory_limit": "40 apples"}, "is not a size"),
        ({"rank": 4}, "there is no field 'rank'"),
    ],
)
def test_a_bad_view_is_refused_with_a_message(client, change, said):
    assert said in refusal(client.post("/api/view", json={**VIEW, **change}))


def test_missing_fields_are_named(client):
    assert "'ranks' is missing" in refusal(client.post("/api/view", json={"schedule": "zbv", "microbatches": 2}))


# Changed schedules ----------------------------------------------------------------------------------------------------


def test_a_changed_schedule_is_proved_with_its_program(client):
    schedule = ps.schedule("zbv", 4, 8)
    got = client.post("/api/verify", json={"table": schedule.to_json(), "memory_limit": 9}).json()
    assert got["proof"] == str(ps.verify(schedule, memory_limit=[9.0] * 4))
    assert got["program"] == str(ps.verify(ps.lower(schedule)))
    assert (got["findings"], got["num_findings"]) == ([], 0)


def test_a_changed_schedule_that_hangs_has_its_cycle(client):
    stuck = ps.Schedule.from_actions([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], ps.Placement.linear(2))
    [finding] = client.post("/api/verify", json={"table": stuck.to_json()}).json()["findings"]
    assert finding["cycle"] == [[0, 1, 1, 2], [1, 1, 0, 2]]


def test_a_memory_limit_is_part_of_the_proof(client):
    got = client.post("/api/verify", json={"table": ps.schedule("gpipe", 2, 8).to_json(), "memory_limit": 4}).json()
    assert {finding["rule"] for finding in got["findings"]} == {"memory"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "'table' is missing"),
        ({"table": {}}, "not a Penstock schedule or program"),
        ({"table": ps.lower(ps.schedule("1f1b", 2, 2)).to_json()}, "this is a program"),
        ({"table": {**ps.schedule("1f1b", 2, 2).to_json(), "rows": [["<b>"], []]}}, "<b>"),
        ({"table": ps.schedule("1f1b", 2, 2).to_json(), "memory_limit": [1]}, "memory_limit has 1 value"),
        ({"table": ps.schedule("1f1b", 2, 2).to_json(), "costs": {"f": [1]}}, "f has 1 value"),
    ],
)
def test_what_cannot_be_proved_is_refused_with_a_message(client, body, said):
    assert said in refusal(client.post("/api/verify", json=body))


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_csv_file_is_opened(client):
    schedule = ps.schedule("1f1b", 4, 8)
    got = opened(client, "mine.csv", csv_text(schedule)).json()
    assert (got["timed"], got["findings"], got["title"]) == (True, [], "mine, 4 ranks, 8 microbatches")
    assert got["entries"] == as_sent(document(schedule, source={}))["entries"]
    assert opened(client, "mine.csv", "\ufeff" + csv_text(schedule)).json() == got


def test_a_lowered_csv_file_is_a_program(client):
    got = opened(client, "program.csv", csv_text(ps.lower(ps.schedule("zbv", 4, 8)))).json()
    assert (got["timed"], got["lowered"]) == (True, True)


def test_a_program_with_copies_to_the_host_is_opened(client, page: Page):
    program = ps.lower(ps.schedule("1f1b", 4, 8), offload=100)
    for name, content in (("p.csv", csv_text(program)), ("p.json", json.dumps(program.to_json()))):
        got = opened(client, name, content).json()
        assert (got["timed"], got["findings"]) == (True, [])
        said = page.ask(got, {"host_bandwidth": 0.5})
        assert said["timing"]["end"] == simulate(program, ps.Costs(host_bandwidth=0.5)).end.tolist()


def test_a_schedule_is_lowered_with_copies_to_the_host(client):
    got = client.post("/api/view", json={**VIEW, "offload": "100+0+0+50", "costs": {"host_bandwidth": 2.0}}).json()
    assert got["source"]["offload"] == "100+0+0+50"
    assert got["costs"] == {"host_bandwidth": 2.0}
    program = ps.lower(ps.schedule("zbv", 4, 8), offload=(100, 0, 0, 50))
    assert got["entries"] == as_sent(document(program, source={}))["entries"]
    assert "percent" in refusal(client.post("/api/view", json={**VIEW, "offload": "lots"}))
    assert "2 percentages for 4 ranks" in refusal(client.post("/api/view", json={**VIEW, "offload": "100+0"}))


def test_a_bad_file_has_its_findings_at_their_places(client, page: Page):
    rows = [line.split(",") for line in csv_text(ps.lower(ps.schedule("1f1b", 2, 2))).splitlines()]
    rows[1].remove("1RECV_F0")
    got = opened(client, "bad.csv", "\n".join(map(",".join, rows))).json()
    assert not got["timed"]
    assert {finding["rank"] for finding in got["findings"]} == {1}
    assert got["num_findings"] == len(got["findings"])
    said = page.ask(got, None)
    assert said["actions"] == [cell for row in rows for cell in row]
    for finding in got["findings"]:
        assert finding["action"] == "1RECV_F0"
        assert said["actions"][len(rows[0]) + finding["step"]] == "1F0"  # where it was


def test_timelines_schedules_and_programs_are_opened(client, page: Page):
    timeline = simulate(ps.schedule("zbv", 2, 4), ps.Costs(latency=0.25))
    got = opened(client, "t.json", json.dumps(timeline.to_json())).json()
    assert (got["source"]["kind"], got["measured"], got["costs"]) == ("file", None, {"latency": 0.25})
    for table in (ps.schedule("zbv", 2, 4), ps.lower(ps.schedule("zbv", 2, 4))):
        said = page.ask(opened(client, "t.json", json.dumps(table.to_json())).json(), {})
        assert said["json"] == as_sent(table.to_json())


def test_a_measured_timeline_keeps_its_times(client, page: Page):
    data = simulate(ps.lower(ps.schedule("1f1b", 2, 2))).to_json() | {"source": "measured"}
    got = opened(client, "run.json", json.dumps(data)).json()
    assert (got["source"], got["units"]) == ({"kind": "measured", "name": "run.json"}, {"time": "s", "size": ""})
    assert page.ask(got, None)["timing"]["end"] == data["end"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ("0F0,zap\n", "'zap' is not an action"),
        ("{}", "not a Penstock schedule, program, timeline or plan"),
        ("[1, 2", "not a JSON file"),
        ('{"type": "view"}', "not a Penstock schedule, program, timeline or plan"),
        ('{"type": "schedule"}', "not a Penstock schedule"),
        ('{"type": "plan", "x": NaN}', "NaN is not a number"),
        ("[" * 100_000, "not a JSON file"),
        ("65000F0\n", "cannot belong to a file of only 1 compute actions"),
    ],
)
def test_files_of_other_programs_are_refused(client, content, said):
    assert said in refusal(opened(client, "x", content))


def test_counts_in_files_are_limited_before_anything_is_built(client):
    made = ps.schedule("gpipe", 2, 2).to_json()
    huge = {**made, "placement": {"kind": "linear", "ranks": 10**12, "copies": [[0, 1]]}}
    assert "1,000,000,000,000 ranks are more than the studio takes" in refusal(opened(client, "x.json", json.dumps(huge)))
    wide = {**made, "microbatches": (1 << 24), "placement": {"kind": "custom", "ranks": 2, "copies": [[0, 1] * 200]}, "edges": []}
    assert "400 stages of 16,777,216 microbatches" in refusal(opened(client, "x.json", json.dumps(wide)))


# Requests -------------------------------------------------------------------------------------------------------------


def test_unknown_addresses_and_methods_are_refused(client):
    assert "nothing at this address" in refusal(client.get("/etc/passwd"))
    assert "nothing at this address" in refusal(client.get("/api/plan/x/candidates/-1"))
    assert "does not take such a request" in refusal(client.get("/api/view"))
    assert client.get("/api/view").headers["allow"] == "POST"


def test_bodies_that_are_not_json_are_refused(client):
    headers = {"content-type": "application/json"}
    assert "not a JSON file" in refusal(client.post("/api/view", content=b"{", headers=headers))
    assert "not UTF-8" in refusal(client.post("/api/view", content=b"\xff", headers=headers))
    assert "must be an object, got a list" in refusal(client.post("/api/view", json=[]))
    other = client.post("/api/view", content=b"{}", headers={"content-type": "text/plain"})
    assert (other.status_code, "application/json" in refusal(other)) == (415, True)


def test_a_body_is_not_read_beyond_its_limit(client, monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 1 << 20)

    response = client.post("/api/view", json={**VIEW, "schedule": "x" * (2 << 20)})
    assert (response.status_code, refusal(response)) == (413, "the request is larger than 1 MiB")


class Waiting(Worker):
    """A worker that answers only after the client has left."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = Event()

    def answer(self, question: Question) -> bytes:
        assert self.dropped.wait(300.0)
        return super().answer(question)

    def drop(self, question: Question) -> None:
        super().drop(question)
        self.dropped.set()


def test_a_question_is_dropped_when_its_client_leaves():
    worker = Waiting()
    messages = [{"type": "http.request", "body": json.dumps(VIEW).encode()}, {"type": "http.disconnect"}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/view", "query_string": b"", "headers": headers}
    asyncio.run(server.application(worker=worker)(scope, receive, send))
    assert sent[0]["status"] == 409
    assert worker._process is None  # nothing was begun


def test_answers_forbid_framing_caching_and_content_sniffing(client):
    for response in (
        client.get("/"),
        client.get("/api/schedules"),
        client.get("/nowhere"),
        client.get("/", headers={"host": "evil.example"}),
    ):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in response.headers
