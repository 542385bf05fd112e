"""Processes that are not given the same: all of them know, and go on together."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import cloudpickle
import pytest

from penstock.errors import PipelineError
from penstock.runtime import rank
from penstock.runtime.launch.workers import Workers
from runtime import apart
from runtime.transport.test_apart import check_refused, check_sizes

cloudpickle.register_pickle_by_value(apart)


@pytest.mark.parametrize(("victim", "fault"), [(0, "sizes"), (2, "target")])
def test_refused_batch(workers: Workers, victim: int, fault: str) -> None:
    check_refused(workers.run(partial(apart.skipping, victim, fault), ranks=apart.RANKS), victim, fault)


def test_batches_of_other_sizes(workers: Workers) -> None:
    check_sizes(workers.run(apart.other_sizes, ranks=apart.RANKS))


def test_call_that_was_left_out(workers: Workers) -> None:
    for seen in workers.run(apart.left_out, ranks=apart.RANKS):
        for _, text in seen:
            assert text.startswith("rank 0 is at batch ")


def test_record_on_only_one_rank(workers: Workers) -> None:
    for first, second in workers.run(apart.recorded, ranks=apart.RANKS):
        assert first == ("PipelineError", "rank 0 does not record, but rank 1 records: set `record` to the same value on all ranks")
        assert second == pytest.approx(apart.alone(1))


def test_failed_step_restores_buffers(workers: Workers) -> None:
    assert workers.run(apart.buffers, ranks=apart.RANKS) == [[True] * 3] * apart.RANKS


def test_exception_that_cannot_be_written(workers: Workers) -> None:
    said = "1F0 (stage 1, forward of microbatch 0) failed on rank 1: SilentError: its message cannot be read: str() raises RuntimeError"
    assert workers.run(apart.silent, ranks=apart.RANKS) == [("PipelineError", said)] * apart.RANKS


def test_failure_outside_of_a_step_names_rank_and_kind(workers: Workers) -> None:
    def run() -> str:
        pipe = apart.made()
        if rank() == 1:
            raise KeyError("loader")
        with pytest.raises(PipelineError, match=r"^rank 1 failed outside of a step: KeyError: 'loader'\n"):
            pipe.step(apart.number(1), target=apart.number(1))
        return ""

    with pytest.raises(KeyError, match="loader"):
        workers.run(run, ranks=apart.RANKS)


def test_rank_that_returns_early(workers: Workers) -> None:
    """The others know in the step that it does not take part in, and in every one after it."""

    def run() -> list[Any]:
        pipe, x = apart.made(), apart.number(1)
        first = apart.tried(pipe, x, target=x)
        return [first] if rank() == 1 else [first, *(apart.tried(pipe, x, target=x) for _ in range(2))]

    found = workers.run(run, ranks=apart.RANKS)
    assert found[0][1] == found[2][1] == ("PipelineError", "rank 1 has returned: it made fewer calls than the others")
    for place in (0, 2):
        kind, said = found[place][2]
        assert kind == "PipelineError"
        gone = r"\[(1|0, 1|1, 2)\]"  # the other one may have given up by then
        assert re.fullmatch(rf"rank {place} cannot connect to the others: ranks {gone} have returned: they made fewer calls", said), said


def test_ranks_that_return_together_do_not_disturb_the_last_step(workers: Workers) -> None:
    """Whichever rank is through first: the others are in the last exchange still, or have long work to do by themselves."""

    def run() -> list[Any]:
        pipe, x = apart.made(), apart.number(1)
        found = apart.tried(pipe, x, target=x)
        time.sleep(0.6 * rank())
        return [found, pipe.group.healthy]

    for loss, well in workers.run(run, ranks=apart.RANKS):
        assert loss == pytest.approx(apart.alone(1))
        assert well
