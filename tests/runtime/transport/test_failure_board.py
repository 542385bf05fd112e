"""The board on which ranks report failures: who is lost, who only lost a connection, and what is said when the store is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime.transport import failures
from penstock.runtime.transport.failures import FailureBoard, FailureReport, Notices
from penstock.runtime.transport.group import RETURNED


class GoneStore:
    """A store whose process is gone."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*arguments: Any) -> None:
            raise dist.DistNetworkError("connection reset by peer")

        return fail


def report(store: Any, answers: dict[int, str], ended: Collection[int] | None, **kind: bool) -> FailureReport:
    """The report of rank 0 of four, to whom these other ranks answer."""
    boards = {rank: FailureBoard(store, rank, range(4), Notices(store)) for rank in range(4)}
    for rank, line in answers.items():
        boards[rank].post_activity(line)
    board = FailureBoard(store, 0, range(4), Notices(store), None if ended is None else lambda: ended)
    return board.post_failure("rank 0 lost the connection to rank 3", None, "waits for a message", **kind)


WAITS = "waits for a message"


@pytest.mark.parametrize(
    ("answers", "ended", "kind", "lost"),
    [
        ({1: WAITS, 2: WAITS}, [3], {"disconnected": True}, (3,)),
        ({1: WAITS, 2: WAITS}, [], {"disconnected": True}, (3,)),
        ({1: WAITS, 2: WAITS}, [3], {"late": True}, (3,)),
        ({1: WAITS}, [2, 3], {"disconnected": True}, (2, 3)),
        ({1: WAITS, 2: WAITS, 3: RETURNED}, [], {"disconnected": True}, (3,)),
        ({1: WAITS, 2: WAITS, 3: WAITS}, [], {"disconnected": True}, ()),  # only the connection: all go on
        ({1: WAITS, 2: WAITS, 3: WAITS}, [], {"late": True}, None),  # a deadline has passed, and all ranks are there
        ({1: WAITS, 2: WAITS}, [3], {}, None),  # an error of this rank
        ({1: WAITS, 2: WAITS}, None, {"disconnected": True}, None),  # ranks do not go on after losses
    ],
)
def test_ranks_that_do_not_answer_are_lost(
    answers: dict[int, str],
    ended: Collection[int] | None,
    kind: dict[str, bool],
    lost: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_ANSWER", 0.1)
    monkeypatch.setattr(failures, "_GIVE_UP", 0.1)
    assert report(dist.HashStore(), answers, ended, **kind).lost == lost


def test_nothing_is_waited_for_if_processes_are_known_to_have_ended() -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: (report(dist.HashStore(), {1: WAITS, 2: WAITS}, [3], disconnected=True), done.set()))
    thread.start()
    assert done.wait(failures._GIVE_UP / 2)
    thread.join()


def test_all_ranks_raise_the_first_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks compose a report at the same time, of different answers: both raise what was written first."""
    monkeypatch.setattr(failures, "_GIVE_UP", 0.05)
    store = dist.HashStore()
    boards = [FailureBoard(store, rank, range(4), Notices(store), list) for rank in range(4)]
    first = boards[0].post_failure("rank 0 lost the connection to rank 3", None, WAITS, disconnected=True)
    assert first.lost == (1, 2, 3)
    for rank in (1, 2, 3):
        assert boards[rank].post_failure("another", None, WAITS, disconnected=True) == first


def test_a_store_that_is_gone_is_named() -> None:
    """No rank may take itself or the others for lost then: they could not meet again."""
    found = report(GoneStore(), {}, [], disconnected=True)
    assert found.fatal
    assert found.lost is None
    assert found.text.startswith("rank 0 lost the connection to rank 3; the others cannot go on without a lost rank, because the store")
    assert "start again from the last checkpoint" in found.text
