"""Plans made by the server: candidates as they appear, one plan at a time, cancelled on request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

import penstock as ps
from penstock.errors import BusyError
from penstock.planner.candidate import Candidate
from penstock.planner.plan_file import decode
from penstock.simulator.timeline import Timeline
from penstock.studio.plan_jobs import GRACE, PlanJobs, describe_candidate, run_plan
from penstock.studio.plan_request import check_plan, read_plan_request
from penstock.studio.server import application
from planner.job.small_jobs import small_job
from studio.page import Page

LAYER = {"f": 5, "i": 7, "w": 3, "activation": 1, "weight_stash": 0.5, "parameters": 2}
BODY = {"profile": {"layers": [{**LAYER, "count": 8}], "latency": 0.5}, "ranks": 2, "microbatches": 4, "memory_limit": 40, "seconds": 0}
ENDLESS = {**BODY, "profile": {"layers": [{**LAYER, "count": 64}]}, "ranks": 16, "microbatches": 1024, "seconds": 600}
LONG = 300.0
"""Timeout in seconds: only a hang takes this long."""


def started(client: TestClient, body: dict) -> str:
    response = client.post("/api/plan", json=body)
    assert response.status_code == 200, response.text
    return response.json()["job"]


def events(client: TestClient, job: str) -> list[tuple[str, dict]]:
    """Every event until the last."""
    response = client.get(f"/api/plan/{job}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.splitlines() for block in response.text.split("\n\n") if block and not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def of(name: str, told: list[tuple[str, dict]]) -> list[dict]:
    return [data for each, data in told if each == name]


@pytest.fixture(scope="module")
def own() -> Iterator[TestClient]:
    """A server of its own, because a server keeps only its last plan."""
    with TestClient(application(), base_url="http://127.0.0.1:8765") as found:
        found.app.state.studio.worker.seconds = LONG  # type: ignore[attr-defined]
        yield found


@pytest.fixture(scope="module")
def finished(own: TestClient) -> tuple[str, list[tuple[str, dict]]]:
    job = started(own, BODY)
    return job, events(own, job)


@pytest.fixture(scope="module")
def wanted() -> ps.Plan:
    return ps.plan(ps.Profile.from_json(BODY["profile"]), ranks=2, microbatches=4, memory_limit=40, seconds=0)


def test_candidate_events_equal_the_plan_s_candidates(finished, wanted: ps.Plan):
    told = of("candidate", finished[1])
    assert [each["index"] for each in told] == list(range(len(told)))
    latest = {each["place"]: each for each in told}
    tried = [each for each in wanted.alternatives if each.placement]
    assert sorted(latest) == list(range(len(tried)))
    assert [(each["name"], each["makespan"], each["memory"], each["fits"]) for _, each in sorted(latest.items())] == [
        (each.name, each.objective, each.peak, each.fits) for each in tried
    ]


def test_the_last_event_names_the_best_candidate(finished, wanted: ps.Plan):
    name, last = finished[1][-1]
    assert (name, last["name"], last["makespan"], last["report"]) == ("done", wanted.name, wanted.objective, wanted.report())
    chosen = of("candidate", finished[1])[last["best"]]
    assert (chosen["makespan"], chosen["place"]) == (wanted.objective, wanted.chosen)


def test_the_last_event_has_both_gaps_and_the_memory(finished, wanted: ps.Plan):
    _, last = finished[1][-1]
    assert (last["gap"], last["overall_gap"]) == (wanted.gap, wanted.overall_gap)
    assert last["memory"] == max(wanted.predicted.peak_memory)


class Wire:
    """Keeps what the process of a plan sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict, bytes | None]] = []

    def send(self, event: tuple[str, dict, bytes | None]) -> None:
        self.sent.append(event)


def test_the_planner_s_choice_is_the_latest_version_in_its_place(monkeypatch: pytest.MonkeyPatch, wanted: ps.Plan):
    """A version on shifted cuts takes over the place of the one before, also in a plan of the same name and time."""
    other = ps.plan(ps.Profile.from_json(BODY["profile"]), ranks=2, microbatches=4, memory_limit=40, seconds=0, schedules=["gpipe"])

    def plan(*args: Any, found: Any, **options: Any) -> ps.Plan:
        found(replace(Candidate.of_timeline(wanted.name, other.problem, wanted.schedule, other.predicted), place=wanted.chosen))
        found(replace(Candidate.of_timeline(wanted.name, wanted.problem, wanted.schedule, wanted.predicted), place=wanted.chosen))
        return wanted

    monkeypatch.setattr("penstock.planner.plan.plan", plan)
    monkeypatch.setattr("penstock.studio.plan_jobs.prepare", lambda: None)  # it is for a process of its own
    wire = Wire()
    run_plan(wire, BODY)  # type: ignore[arg-type] - it only sends
    names = [name for name, _, _ in wire.sent]
    assert names == ["candidate", "candidate", "done"]
    last = wire.sent[-1][1]
    chosen = wire.sent[last["best"]][1]
    assert (last["best"], chosen["makespan"], chosen["fits"]) == (1, wanted.objective, True)


def test_the_limit_that_is_used_is_the_one_that_is_told(client: TestClient):
    """Without a headroom in the request, the planner keeps 5 % free of what it has estimated, and nothing of what was measured."""
    shape = {"layers": 4, "hidden": 64, "heads": 2, "sequence": 32, "vocabulary": 100, "microbatch": 1, "flops": 1e12}
    estimated = {"transformer": shape, "ranks": 2, "microbatches": 4, "memory_limit": "1GiB", "seconds": 0}
    for body, share in ((BODY, 1.0), (estimated, 0.95), ({**estimated, "headroom": 0.25}, 0.75), ({**BODY, "headroom": 0.25}, 0.75)):
        answer = client.post("/api/plan", json=body).json()
        whole = 40.0 if body["memory_limit"] == 40 else float(1 << 30)
        assert answer["limits"] == pytest.approx([share * whole] * 2)
        told = of("candidate", events(client, answer["job"]))
        document = client.get(f"/api/plan/{answer['job']}/candidates/{next(each['index'] for each in told if each['document'])}").json()
        assert document["memory_limit"] == pytest.approx(share * whole)
    unlimited = {name: value for name, value in BODY.items() if name != "memory_limit"}
    answer = client.post("/api/plan", json=unlimited).json()
    assert answer["limits"] is None
    client.delete(f"/api/plan/{answer['job']}")


def test_no_candidate_fits_that_was_tried_with_a_higher_limit(wanted: ps.Plan):
    peak = max(wanted.predicted.peak_memory)
    candidate = Candidate.of_timeline("any", wanted.problem, wanted.schedule, wanted.predicted)
    assert describe_candidate(candidate, 0)["fits"]
    assert describe_candidate(candidate, 0, (peak, peak))["fits"]
    assert not describe_candidate(candidate, 0, (peak * 0.99, peak * 0.99))["fits"]


def test_the_plan_can_be_saved(own: TestClient, finished, wanted: ps.Plan):
    assert decode(own.get(f"/api/plan/{finished[0]}").json()) == wanted


def test_every_timed_candidate_opens_with_its_makespan(own: TestClient, page: Page, finished):
    for each in of("candidate", finished[1]):
        response = own.get(f"/api/plan/{finished[0]}/candidates/{each['index']}")
        assert response.status_code == (200 if each["document"] else 404)
        if each["document"]:
            made = response.json()
            numbers = page.ask(made, made["costs"])["numbers"]
            assert (numbers["makespan"], numbers["peaks"][each["memory_rank"]]) == (each["makespan"], each["memory"])
            assert made["memory_limit"] == 40


def test_unknown_jobs_and_candidates_are_not_found(own: TestClient, finished):
    for path in ("/api/plan/other", "/api/plan/other/events", "/api/plan/other/candidates/0", f"/api/plan/{finished[0]}/candidates/999999"):
        response = own.get(path)
        assert response.status_code == 404
        assert "there is no" in response.json()["error"]


def test_every_argument_of_plan_can_be_requested():
    more = {"headroom": 0.25, "rounds": 10, "jitter": 0.1, "near": 0.01, "seed": 3, "microbatch_sizes": [1, 2], "batch": 4}
    body = {**{name: value for name, value in BODY.items() if name != "microbatches"}, **more}
    profile, arguments = read_plan_request(body)
    plan = ps.plan(profile, **arguments)
    assert plan.memory_limit == (30.0, 30.0)  # 40 without its headroom
    assert plan.jitter == 0.1
    assert {candidate.microbatch for candidate in plan.alternatives if candidate.placement} == {1, 2}


def test_a_limit_that_nothing_fits_fails_with_an_explanation(client: TestClient):
    job = started(client, {**BODY, "memory_limit": 1})
    name, last = events(client, job)[-1]
    assert name == "failed"
    assert "1" in last["error"]
    assert not any(each["fits"] for each in of("candidate", events(client, job)))
    assert client.get(f"/api/plan/{job}").status_code == 404


def test_one_plan_at_a_time_which_can_be_cancelled(client: TestClient):
    job = started(client, ENDLESS)
    again = client.post("/api/plan", json=BODY)
    assert (again.status_code, "cancel it first" in again.json()["error"]) == (409, True)
    jobs = client.app.state.studio.jobs  # type: ignore[attr-defined]
    running = jobs.get(job)
    told, _ = running.wait_for_events(0, LONG)
    assert told
    assert client.delete(f"/api/plan/{job}").json() == {"cancelled": True}
    assert client.delete(f"/api/plan/{job}").json() == {"cancelled": False}
    name, last = events(client, job)[-1]
    assert (name, last["cancelled"]) == ("done", True)
    jobs._listener.join(LONG)  # which has seen the process end
    assert running.process.exitcode is not None
    client.delete(f"/api/plan/{started(client, BODY)}")  # there is room for the next


def test_a_plan_that_takes_too_long_is_ended():
    jobs = PlanJobs()
    job = jobs.get(jobs.start(ENDLESS, seconds=-GRACE))
    while not job.ended:
        job.wait_for_events(len(job.events), LONG)
    assert "took too long" in job.events[-1].data["error"]
    jobs.close()
    assert not job.process.is_alive()


def test_a_plan_ends_with_the_last_page_that_follows_it():
    jobs = PlanJobs()
    job = jobs.get(jobs.start(ENDLESS, seconds=LONG))
    with job.follow():
        with job.follow():
            pass
        assert not job.ended
    assert (job.ended, job.events[-1].data["cancelled"]) == (True, True)
    jobs.start(ENDLESS, seconds=LONG)
    jobs.close()


def test_closing_ends_running_work():
    jobs = PlanJobs()
    job = jobs.get(jobs.start(ENDLESS, seconds=LONG))
    with pytest.raises(BusyError):
        jobs.start(ENDLESS, seconds=LONG)
    jobs.close()
    assert (job.ended, job.process.is_alive()) == (True, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": None}, "give one model"),
        ({"transformer": {}}, "give one model"),
        ({"profile": {"layers": [{**LAYER, "count": 10**12}]}}, "1,000,000,000,000 layers are more than the studio takes"),
        ({"profile": {"layers": [{"f": 1}]}}, "'i', 'w' are missing"),
        ({"profile": {"layers": [LAYER], "variants": 5}}, "'variants' must be a list, got a whole number"),
        ({"profile": None, "transformer": {"layers": 10**9}}, "1,000,000,000 layers are more than the studio takes"),
        ({"profile": None, "transformer": {"layers": 2}}, "hidden"),
        ({"ranks": 64}, "8 layers are too few for 64 ranks"),
        ({"ranks": 10**20}, "ranks must be a whole number"),
        ({"microbatches": 10**6}, "more than the studio takes, 200,000"),
        ({"microbatches": None}, "give either microbatches= or batch="),
        ({"memory_limit": -1}, "memory_limit"),
        ({"memory_limit": [1, 2, 3]}, "3 values for 2 ranks"),
        ({"seconds": 1e9}, "the studio searches for at most 600"),
        ({"headroom": 1.5}, "headroom must be a number of at least 0 and below 1"),
        ({"rounds": -1}, "rounds must be a number of at least 0"),
        ({"microbatches": None, "batch": 8, "microbatch_sizes": [3]}, "a batch of 8 is not a multiple of a microbatch size of 3"),
        ({"schedules": ["nope"]}, "there is no schedule 'nope'"),
        ({"schedules": [1]}, "takes names of schedules, got 1"),
    ],
)
def test_a_bad_plan_is_refused_before_it_is_started(client: TestClient, change, said):
    response = client.post("/api/plan", json={**BODY, **change})
    assert response.status_code == 400
    assert said in response.json()["error"]


def test_a_plan_file_opens_with_its_prediction(client: TestClient, page: Page, wanted: ps.Plan):
    made = client.post("/api/open", json={"name": "plan.json", "content": json.dumps(wanted.to_json())}).json()
    predicted: Timeline = wanted.predicted
    assert made["source"] == {"kind": "plan", "name": wanted.name, "file": "plan.json"}
    assert page.ask(made, made["costs"])["timing"]["end"] == predicted.end.tolist()


def test_the_plan_of_a_job_opens_with_the_prediction_of_one_replica(client: TestClient, page: Page):
    plan = ps.plan_job(small_job(), pipeline=2, tensor=1, sharding=1, vocabulary="ends", schedules="1f1b")
    made = client.post("/api/open", json={"name": "job.json", "content": json.dumps(plan.to_json())}).json()
    assert made["source"] == {"kind": "plan", "name": "1f1b", "file": "job.json"}
    assert page.ask(made, made["costs"])["timing"]["end"] == plan.predicted.end.tolist()


# Clusters -------------------------------------------------------------------------------------------------------------

CLUSTER = """
latency = 1.0
node_latency = 0.1
card = "node"

[[devices]]
name = "slow"
speed = 0.5
node = "b"
memory = 30
count = 2

[[devices]]
name = "fast"
node = "a"
memory = 60
"""
ON_CLUSTER = {
    **{name: value for name, value in BODY.items() if name not in ("ranks", "memory_limit")},
    "cluster": CLUSTER,
    "schedules": ["1f1b", "zbv"],
}


def test_a_plan_for_a_cluster_is_that_of_the_library(client: TestClient, page: Page, tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster = ps.Cluster.load(tmp_path / "cluster.toml")
    profile = ps.Profile.from_json(BODY["profile"])
    wanted = ps.plan(profile, cluster=cluster, microbatches=4, seconds=0, schedules=["1f1b", "zbv"])
    answer = client.post("/api/plan", json=ON_CLUSTER).json()
    assert answer["limits"] == [30, 30, 60]  # of the devices in the order of the file
    told = events(client, answer["job"])
    saved = decode(client.get(f"/api/plan/{answer['job']}").json())
    assert (saved, saved.cluster, saved.devices) == (wanted, cluster, wanted.devices)
    fitting = {(each["name"], each["makespan"]) for each in of("candidate", told) if each["fits"]}
    assert (wanted.name, wanted.objective) in fitting
    best = client.get(f"/api/plan/{answer['job']}/candidates/{told[-1][1]['best']}").json()
    names = [cluster.devices[device].name for device in wanted.devices]
    assert [device["name"] for device in best["devices"]] == names
    assert best["memory_limit"] == [{"slow": 30, "fast": 60}[name] for name in names]
    assert page.ask(best, best["costs"])["numbers"]["makespan"] == wanted.objective
    file = client.post("/api/open", json={"name": "plan.json", "content": json.dumps(saved.to_json())}).json()
    assert file["devices"] == best["devices"]
    assert read_plan_request({**ON_CLUSTER, "cluster": file["cluster"]})[1]["cluster"] == cluster  # what the page carries over


def test_a_limit_of_the_request_overrides_the_memory_of_the_devices():
    assert check_plan(ON_CLUSTER)["limits"] == (30, 30, 60)
    assert check_plan({**ON_CLUSTER, "memory_limit": 50})["limits"] == (50, 50, 50)
    assert check_plan({**ON_CLUSTER, "memory_limit": [1, 2, 3]})["limits"] == (1, 2, 3)
    assert check_plan({**ON_CLUSTER, "cluster": {"devices": [{"count": 3}]}, "ranks": 3})["limits"] is None


def test_candidates_are_judged_by_the_limit_of_the_device_of_each_rank():
    devices = [ps.Device("slow", speed=0.5, memory=30), ps.Device("fast", memory=60)]
    plan = ps.plan(
        ps.Profile.from_json(BODY["profile"]), cluster=ps.Cluster(devices), microbatches=4, seconds=0, rounds=0, schedules=["1f1b"]
    )
    peaks = plan.predicted.peak_memory
    assert (plan.devices, peaks[0] > peaks[1]) == ((1, 0), True)  # else the order of the limits would not matter
    candidate = Candidate.of_timeline("any", plan.problem, plan.schedule, plan.predicted)
    exact = [peaks[plan.devices.index(device)] for device in range(2)]
    assert describe_candidate(candidate, 0, exact)["fits"]
    assert not describe_candidate(candidate, 0, [limit * 0.99 for limit in exact])["fits"]
    assert not describe_candidate(candidate, 0, exact[::-1])["fits"]


def test_a_cluster_is_described(client: TestClient):
    told = client.post("/api/cluster", json={"name": "cluster.toml", "content": "\ufeff" + CLUSTER.replace("\n", "\r\n")}).json()
    assert told == {"ranks": 3, "summary": "3 devices (2 slow, 1 fast) in 2 nodes", "has_memory": True}
    told = client.post("/api/cluster", json={"content": ' {"devices": [{}, {"speed": 2}]}'}).json()
    assert told == {"ranks": 2, "summary": "2 devices (1 of speed 1, 1 of speed 2)", "has_memory": False}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "c.toml: it is empty"),
        ("[[devices", "c.toml: not a TOML file"),
        ('{"devices"', "c.toml: not a JSON file"),
        ("latency = 1", "c.toml: a cluster: 'devices' is missing"),
        ("[[devices]]\nspeed = 0", "c.toml: device 0: speed must be more than 0"),
        ("[[devices]]\nsped = 1", "there is no field 'sped'"),
        ("[[devices]]\ncount = 1000000000000", "1,000,000,000,000 devices are more than the studio takes, 512"),
        ("[[devices]]\n" * 600, "600 devices are more than the studio takes, 512"),
        ("[[devices]]\nmemory = 1\n[[devices]]", "device 1 has no memory"),
        ("#" * (9 << 20), "c.toml has 9,437,184 characters, more than the studio takes"),
        ("a = " + "[" * 5000, "c.toml: not a TOML file"),
    ],
)
def test_a_bad_cluster_is_refused_with_the_library_s_error(client: TestClient, content, said):
    response = client.post("/api/cluster", json={"name": "c.toml", "content": content})
    assert (response.status_code, said in response.json()["error"]) == (400, True), response.json()
    response = client.post("/api/plan", json={**ON_CLUSTER, "cluster": content})
    assert (response.status_code, said.replace("c.toml", "the cluster") in response.json()["error"]) == (400, True), response.json()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": 4}, "4 ranks on a cluster of 3 devices"),
        ({"cluster": None}, "'ranks' is missing: give the number of ranks, or a 'cluster'"),
        ({"cluster": {"devices": [{"count": 9}]}}, "8 layers are too few for 9 ranks"),
        ({"cluster": {"devices": [{}], "time_unit": "ms"}, "profile": {**BODY["profile"], "time_unit": "s"}}, "give both in one unit"),
        ({"cluster": {"devices": [{"speed": [1, 2]}]}}, "layers"),
        ({"memory_limit": [1, 2]}, "2 values for 3 ranks"),
    ],
)
def test_a_cluster_that_does_not_go_with_the_request_is_refused(client: TestClient, change, said):
    response = client.post("/api/plan", json={**ON_CLUSTER, **change})
    assert response.status_code == 400
    assert said in response.json()["error"]
