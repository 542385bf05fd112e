"""Random requests: each gets an answer that the page can read or a refusal with a message, never a server error."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import penstock as ps
from penstock.ir.formats.csv_form import csv_text
from penstock.schedules.registry import algorithms
from penstock.simulator.simulate import simulate
from studio.page import Page
from studio.test_plan_requests import BODY

fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

leaves = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 3, 7, 100_000, 10**9, 10**30, -(10**18), 0.5, -0.0, 1e308, 5e-324, "", "x", "40GiB", "zbv"]
    ),
    st.text(max_size=8),
    st.integers(-3, 12),
)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4), max_leaves=10
)


def settled(response: Any) -> Any:
    """The answer, or None if the request was properly refused."""
    assert response.headers["content-type"] == "application/json"
    if response.status_code == 200:
        return response.json()
    assert 400 <= response.status_code < 500
    assert list(response.json()) == ["error"]
    assert isinstance(response.json()["error"], str)
    assert response.json()["error"].strip()
    return None


def readable(page: Page, made: Any) -> None:
    """Check that the page can read and time the document."""
    said = page.ask(made, made["costs"] if made["timed"] else None)
    assert "error" not in said, said


def mutated(value: Any, random: Random, new: Any) -> Any:
    """The same data with one thing in it replaced, removed or doubled."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.85:
        made = dict(value) if isinstance(value, dict) else list(value)
        key = random.choice(list(made)) if isinstance(made, dict) else random.randrange(len(made))
        if random.random() < 0.1:
            del made[key]
        else:
            made[key] = mutated(made[key], random, new)
        return made
    return [value, value] if random.random() < 0.1 else new


randoms = st.randoms(use_true_random=False)


@fuzzed
@given(path=st.sampled_from(["/api/view", "/api/open", "/api/verify", "/api/plan"]), body=anything)
def test_any_json_is_answered_or_refused(client: TestClient, path: str, body: Any) -> None:
    assert settled(client.post(path, json=body)) is None


@fuzzed
@given(path=st.sampled_from(["/api/view", "/api/open", "/api/verify", "/api/plan"]), body=st.binary(max_size=50))
def test_any_bytes_are_answered_or_refused(client: TestClient, path: str, body: bytes) -> None:
    assert settled(client.post(path, content=body, headers={"content-type": "application/json"})) is None


@fuzzed
@given(
    path=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="?#\\"), max_size=20),
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
)
def test_any_address_is_answered_or_refused(client: TestClient, path: str, method: str) -> None:
    response = client.request(method, f"http://127.0.0.1:8765/api/{path}")
    if response.url.path not in ("/", "/api/schedules"):
        assert settled(response) is None


@pytest.mark.slow
@settings(fuzzed, max_examples=200)
@given(name=st.sampled_from(sorted(algorithms())), random=randoms, new=anything, changes=st.integers(1, 2))
def test_mutated_views_are_answered_or_refused(client: TestClient, page: Page, name: str, random: Random, new: Any, changes: int) -> None:
    costs = {"f": 1.0, "b": [[1.0] * 6] * 4, "latency": 0.5, "output": 2.0, "bandwidth": 1.0, "contention": "pair", "optimizer": [1.0] * 4}
    options = {option: 4 for option in algorithms()[name].options if option != "costs"}
    body: Any = {"schedule": name, "ranks": 4, "microbatches": 6, "chunks": None, "options": options, "costs": costs, "lower": True}
    for _ in range(changes):
        body = mutated(body, random, new)
    made = settled(client.post("/api/view", json=body))
    if made is not None:
        readable(page, made)


@cache
def files() -> list[Any]:
    """One file of each kind that can be opened."""
    schedule = ps.schedule("zbv", 2, 3)
    program = ps.lower(ps.schedule("1f1b", 2, 3), fsdp=True)
    timeline = simulate(program, ps.Costs(latency=0.5, contention="rank", output=[1.0, 2.0], bandwidth=2.0))
    plan = ps.plan(ps.Profile.from_json(BODY["profile"]), ranks=2, microbatches=2, seconds=0, schedules=["1f1b", "zbv"])
    return [schedule.to_json(), program.to_json(), timeline.to_json(), timeline.to_json() | {"source": "measured"}, plan.to_json()]


@pytest.mark.slow
@settings(fuzzed, max_examples=300)
@given(number=st.integers(0, 4), random=randoms, new=anything, changes=st.integers(0, 2))
def test_mutated_json_files_are_answered_or_refused(
    client: TestClient, page: Page, number: int, random: Random, new: Any, changes: int
) -> None:
    data = files()[number]
    for _ in range(changes):
        data = mutated(data, random, new)
    made = settled(client.post("/api/open", json={"name": "f.json", "content": json.dumps(data)}))
    assert made is not None or changes
    if made is not None:
        readable(page, made)


@pytest.mark.slow
@settings(fuzzed, max_examples=200)
@given(
    table=st.sampled_from([ps.schedule("zbv", 2, 3), ps.lower(ps.schedule("1f1b", 3, 3), fsdp=True), ps.schedule("dualpipe", 2, 4)]),
    random=randoms,
    inserted=st.text('0123456789FBIWSENDRCV_;(),\r\n" \0', max_size=4),
    changes=st.integers(0, 3),
)
def test_mutated_csv_files_are_answered_or_refused(
    client: TestClient, page: Page, table: Any, random: Random, inserted: str, changes: int
) -> None:
    text = csv_text(table)
    for _ in range(changes):
        at = random.randrange(len(text))
        text = text[:at] + inserted + text[at + random.randrange(4) :]
    made = settled(client.post("/api/open", json={"name": "f.csv", "content": text}))
    assert made is not None or changes
    if made is not None:
        readable(page, made)


@pytest.mark.slow
@settings(fuzzed, max_examples=200)
@given(random=randoms, new=anything, changes=st.integers(1, 3))
def test_mutated_tables_are_proved_or_refused(client: TestClient, random: Random, new: Any, changes: int) -> None:
    body: Any = {"table": files()[0], "costs": {"f": 1.0}, "memory_limit": 3}
    for _ in range(changes):
        body = mutated(body, random, new)
    settled(client.post("/api/verify", json=body))


@pytest.mark.slow
@settings(fuzzed, max_examples=200)
@given(random=randoms, new=anything, changes=st.integers(1, 3), transformer=st.booleans())
def test_mutated_plans_are_answered_or_refused(client: TestClient, random: Random, new: Any, changes: int, transformer: bool) -> None:
    model = {"layers": 6, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100, "flops": 1e9, "microbatch": [1, 2]}
    body: Any = {**BODY, "batch": None, "schedules": ["1f1b"], "recompute": True, "split": False, "seed": 1}
    body |= {"profile": None, "transformer": model} if transformer else {}
    for _ in range(changes):
        body = mutated(body, random, new)
    made = settled(client.post("/api/plan", json=body))
    if made is not None:
        client.delete(f"/api/plan/{made['job']}")
