"""What runs in the process of one plan."""

from __future__ import annotations

import json
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.studio.worker import prepare

if TYPE_CHECKING:
    from penstock.planner.candidate import Candidate
    from penstock.planner.plan import Plan
    from penstock.planner.request import Progress


def run(connection: Connection, body: Any) -> None:
    """Make a plan and tell everything: pairs of an event, its data, and a payload that is kept for later."""
    prepare()
    try:
        _Telling(connection).plan(body)
    except PenstockError as error:
        connection.send(("failed", {"error": str(error)}, None))
    except MemoryError:
        connection.send(("failed", {"error": "this plan needs more memory than the studio takes: ask for something smaller"}, None))
    except Exception as error:
        connection.send(("failed", {"error": f"this cannot be planned: {type(error).__name__}: {error}"}, None))


class _Telling:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.candidates: list[Candidate] = []
        self.in_bytes = False

    def plan(self, body: Any) -> None:
        from penstock.planner.plan import plan
        from penstock.studio.planning import asked, sizes_are_bytes

        profile, given = asked(body)
        self.in_bytes = sizes_are_bytes(profile, given)
        made = plan(profile, **given, progress=self.progress, found=self.found)
        self.connection.send(("done", self._result(made), json.dumps(made.to_json()).encode()))

    def progress(self, progress: Progress) -> None:
        self.connection.send(("progress", asdict(progress), None))

    def found(self, candidate: Candidate) -> None:
        from penstock.studio.planning import packed, told

        index = len(self.candidates)
        self.candidates.append(candidate)
        self.connection.send(("candidate", told(candidate, index), packed(candidate, index, self.in_bytes)))

    def _result(self, made: Plan) -> dict[str, Any]:
        best = next(k for k, each in enumerate(self.candidates) if each.timed is not None and each.schedule is made.schedule)
        return {
            "best": best,
            "cancelled": False,
            "name": made.name,
            "makespan": made.objective,
            "bound": made.bound,
            "gap": made.gap,
            "report": made.report(),
            "units": {"time": made.profile.time_unit, "size": "B" if made.in_bytes else ""},
        }
