"""Plans in the making: one at a time, each in its own process, which can be ended.

`PlanJobs` starts a process that runs `run_plan`. It sends events back: each candidate as it is tried, progress, and at the end `done` or
`failed`. A `PlanJob` keeps them for every page that follows the plan.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from threading import Condition, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

from penstock.errors import BusyError, PenstockError, UnknownNameError
from penstock.ir.formats import json_form
from penstock.studio.plan_request import used_limits
from penstock.studio.worker import prepare

if TYPE_CHECKING:
    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan
    from penstock.planner.request import Progress

GRACE = 120.0
"""Seconds that a plan may take beyond its search: the named schedules are timed before."""


@dataclass(frozen=True)
class PlanEvent:
    """Something that happened to a plan, as the page gets it."""

    name: str
    data: dict[str, Any]


@dataclass
class PlanJob:
    """One plan and all its events so far."""

    key: str
    process: Any
    connection: Connection
    deadline: float
    events: list[PlanEvent] = field(default_factory=list)
    candidates: list[bytes | None] = field(default_factory=list)
    plan: bytes | None = None
    ended: bool = False
    followers: int = 0
    changed: Condition = field(default_factory=Condition)

    def wait_for_events(self, place: int, seconds: float) -> tuple[list[PlanEvent], bool]:
        """Give the events from this place on, after waiting at most so long for one, and whether the job has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or len(self.events) > place, seconds)
            return self.events[place:], self.ended

    def listen(self) -> None:
        """Receive events until the process ends or its time is over."""
        try:
            while not self.ended:
                if not self.connection.poll(max(self.deadline - monotonic(), 0.0)):
                    self.end(PlanEvent("failed", {"error": "the plan took too long and was ended: ask for less, or give it more time"}))
                else:
                    self._take(*self.connection.recv())
        except (EOFError, OSError):
            self.end(
                PlanEvent("failed", {"error": "the process of the plan ended early, probably out of memory: ask for something smaller"})
            )
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _take(self, name: str, data: dict[str, Any], payload: bytes | None) -> None:
        if name in ("done", "failed"):
            self.plan = payload
            self.end(PlanEvent(name, data))
            return
        with self.changed:
            if name == "candidate":
                self.candidates.append(payload)
            if not self.ended:
                self.events.append(PlanEvent(name, data))
            self.changed.notify_all()

    def cancel(self) -> bool:
        """End the job and keep its candidates; False if it had ended before."""
        with self.changed:
            latest = {event.data["place"]: event.data for event in self.events if event.name == "candidate"}
        fitting = [candidate for candidate in latest.values() if candidate["fits"]]
        index = min(fitting, key=lambda candidate: candidate["makespan"])["index"] if fitting else None
        return self.end(PlanEvent("done", {"best": index, "cancelled": True}))

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Count a page that follows the job. The job ends with its last page: no other client knows its key, and only one plan can run."""
        self.followers += 1
        try:
            yield
        finally:
            self.followers -= 1
            if not self.followers:
                self.cancel()

    def end(self, event: PlanEvent) -> bool:
        """Add the last event, once, and kill the process."""
        with self.changed:
            if self.ended:
                return False
            self.events.append(event)
            self.ended = True
            self.changed.notify_all()
        self.process.kill()
        return True


class PlanJobs:
    """The current plan, or the last one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._job: PlanJob | None = None
        self._listener: Thread | None = None

    def start(self, body: Any, seconds: float) -> str:
        """Start a plan and give its key."""
        with self._lock:
            return self._start(body, seconds)

    def _start(self, body: Any, seconds: float) -> str:
        if self._job is not None and not self._job.ended:
            raise BusyError("another plan is being made: wait for it, or cancel it first")
        self._join()
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_plan, args=(sender, body), daemon=True)
        process.start()
        sender.close()
        self._job = PlanJob(secrets.token_urlsafe(9), process, receiver, monotonic() + seconds + GRACE)
        self._listener = Thread(target=self._job.listen, daemon=True)
        self._listener.start()
        return self._job.key

    def get(self, key: str) -> PlanJob:
        if self._job is None or not secrets.compare_digest(key.encode(), self._job.key.encode()):
            raise UnknownNameError("there is no such plan: only the last one is kept")
        return self._job

    def cancel(self, key: str) -> bool:
        """End a plan and keep its candidates; False if it had ended before."""
        return self.get(key).cancel()

    def close(self) -> None:
        """End the running plan."""
        if self._job is not None:
            self._job.end(PlanEvent("failed", {"error": "the studio was closed"}))
        self._join()

    def _join(self) -> None:
        if self._listener is not None:
            self._listener.join()


# In the process of a plan ---------------------------------------------------------------------------------------------


def run_plan(connection: Connection, body: Any) -> None:
    """Make a plan and send its events: a name, data for the page, and bytes to keep for later."""
    prepare()
    try:
        _Planner(connection).plan(body)
    except PenstockError as error:
        connection.send(("failed", {"error": str(error)}, None))
    except MemoryError:
        connection.send(("failed", {"error": "this plan needs more memory than the studio may use: ask for something smaller"}, None))
    except Exception as error:
        connection.send(("failed", {"error": f"this cannot be planned: {type(error).__name__}: {error}"}, None))


class _Planner:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.count = 0
        self.in_bytes = False
        self.limits: tuple[float, ...] | None = None
        """The memory limit of each rank in the request, without the share that stays free; of each device, if there is a cluster."""
        self.latest: dict[int, int] = {}
        """By their place among the plan's alternatives, the index of the latest version of each candidate."""

    def plan(self, body: Any) -> None:
        from penstock.planner.plan import plan
        from penstock.planner.request import is_in_bytes
        from penstock.studio.plan_request import read_plan_request

        profile, options = read_plan_request(body)
        cluster = options.get("cluster")
        self.in_bytes = is_in_bytes(profile, options.get("memory_limit")) or (cluster is not None and cluster.size_unit == "B")
        self.limits = used_limits(profile, options)
        best = plan(profile, **options, progress=self.progress, found=self.send_candidate)
        self.connection.send(("done", self._describe_result(best), json.dumps(best.to_json()).encode()))

    def progress(self, progress: Progress) -> None:
        self.connection.send(("progress", asdict(progress), None))

    def send_candidate(self, candidate: Candidate) -> None:
        index = self.latest[candidate.place] = self.count
        self.count += 1
        self.connection.send(
            ("candidate", describe_candidate(candidate, index, self.limits), pack_candidate(candidate, index, self.in_bytes))
        )

    def _describe_result(self, plan: Plan) -> dict[str, Any]:
        return {
            "best": self.latest[plan.chosen],
            "cancelled": False,
            "name": plan.name,
            "makespan": plan.objective,
            "memory": max(plan.predicted.peak_memory),
            "bound": plan.bound,
            "gap": plan.gap,
            "overall_bound": plan.overall_bound,
            "overall_gap": plan.overall_gap,
            "report": plan.report(),
            "units": {"time": plan.profile.time_unit, "size": "B" if plan.in_bytes else ""},
        }


def describe_candidate(candidate: Candidate, index: int, limits: Sequence[float] | None = None) -> dict[str, Any]:
    """Describe one candidate for the page's plot; `limits` are those of the request, whatever the candidate was tried with.

    A candidate with the `place` of an earlier one is a better version of it, and replaces it.
    """
    return {
        "index": index,
        "place": candidate.place,
        "name": candidate.name,
        "placement": candidate.placement,
        "chunks": candidate.chunks,
        "microbatch": candidate.microbatch,
        "microbatches": candidate.microbatches,
        "slices": candidate.slices,
        "recompute": candidate.recompute,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "fits": candidate.fits and _is_within(candidate, limits),
        "makespan": candidate.objective,
        "bubble": candidate.bubble,
        "memory": candidate.peak,
        "memory_rank": candidate.peak_rank,
        "document": candidate.timed is not None,
    }


def _is_within(candidate: Candidate, limits: Sequence[float] | None) -> bool:
    """Whether no rank holds more than the request allows; on a cluster, than it allows for the rank's device."""
    from penstock.planner.problem import SLACK

    if limits is None or candidate.timed is None:
        return True
    peaks, devices = candidate.timeline.peak_memory, candidate.devices
    if devices and len(devices) <= len(limits):
        limits = [limits[device] for device in devices]
    return len(peaks) == len(limits) and all(peak <= limit * (1 + SLACK) for peak, limit in zip(peaks, limits, strict=True))


def pack_candidate(candidate: Candidate, index: int, in_bytes: bool) -> bytes | None:
    """Pack what the document of a candidate needs, small enough to keep it for all of them; None if it was not timed."""
    if candidate.timed is None:
        return None
    problem, _, timeline = candidate.timed
    data = {
        "name": candidate.name,
        "index": index,
        "table": json_form.encode(timeline.table),
        "costs": problem.costs.to_json(),
        "limits": problem.memory_limit,
        "devices": [] if problem.cluster is None else [device.to_json() for device in problem.cluster.devices],
        "units": ("" if problem.profile is None else problem.profile.time_unit, "B" if in_bytes else ""),
    }
    return zlib.compress(json.dumps(data).encode(), level=1)


def unpack_candidate(data: bytes) -> Any:
    """Reverse `pack_candidate`."""
    return json.loads(zlib.decompress(data))
