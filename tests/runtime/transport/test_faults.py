"""Processes that fail: every rank gets the same report, soon, nothing is half done, and what can go on does."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import LostRankError, PipelineError, ScheduleError
from penstock.runtime import Pipeline, launch, rank
from penstock.runtime.launch import workers as workers_module
from penstock.runtime.launch.workers import Workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.slow

RANKS, SOON, LATE = 3, 30.0, 200.0
"""A failure must be known long before the deadline, which no wait here may come to."""


Run = Callable[..., list[Any]]


@pytest.fixture
def trio(workers: Workers) -> Run:
    """Calls a function on ranks for faults that a process survives."""
    return partial(workers.run, ranks=RANKS)


class Trap(nn.Module):
    """A stage that does something bad on its third forward or backward, when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.forward_trap: Callable[[], None] | None = None
        self.backward_trap: Callable[[], None] | None = None
        self.calls = 0
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.map(x)
        if self.forward_trap is not None:
            self._count(self.forward_trap)
        if self.backward_trap is not None:
            trap = self.backward_trap
            made.register_hook(lambda grad: self._count(trap))
        return torch.tanh(made)

    def _count(self, trap: Callable[[], None]) -> None:
        self.calls += 1
        if self.calls == 3:
            trap()


def make(**options: Any) -> tuple[Pipeline, list[Trap], Tensor, Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = [Trap() for _ in range(RANKS)]
    x, y = torch.randn(2, 12, 6).unbind()
    pipe = Pipeline(model, schedule="1f1b", microbatches=6, loss_fn=functional.mse_loss, **({"deadline": LATE} | options))
    return pipe, model, x, y


def caught(act: Callable[[], Any]) -> tuple[str, str, float]:
    """The report and its cause, and how long it took."""
    began = time.monotonic()
    try:
        act()
    except PipelineError as error:
        return str(error), f"{type(error.__cause__).__name__}: {error.__cause__}", time.monotonic() - began
    return "nothing was raised", "", 0.0


def survive(set_trap: Callable[[Trap], None], victim: int, deadline: float = LATE) -> list[Any]:
    """Step, fail and step again, twice; every step that works must work as the first did, and a failed one leave nothing."""
    pipe, model, x, y = make(deadline=deadline)
    first = pipe.step(x, target=y).loss
    gradients = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    values = [parameter.detach().clone() for parameter in pipe.parameters()]
    found = []
    for _ in range(2):
        model[victim].calls, model[victim].group = 0, pipe.group
        set_trap(model[victim])
        found.append(caught(lambda: pipe.step(x, target=y)))
        model[victim].forward_trap = model[victim].backward_trap = None
        assert all(torch.equal(parameter, value) for parameter, value in zip(pipe.parameters(), values, strict=True))
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(pipe.parameters(), gradients, strict=True))
        for parameter in pipe.parameters():
            parameter.grad = None
        assert torch.equal(pipe.step(x, target=y).loss, first)
        assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(pipe.parameters(), gradients, strict=True))
    return found


def raise_it() -> None:
    raise ValueError("no such token")


def wait_for_the_report(trap: Trap) -> None:
    """Stall until another rank gives up."""
    until = time.monotonic() + LATE
    while trap.group.connection is not None and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_a_stage(trio: Run, where: str, victim: int) -> None:
    def set_trap(trap: Trap) -> None:
        setattr(trap, f"{where}_trap", raise_it)

    action = rf"{victim}{'F' if where == 'forward' else 'B'}2 \(stage {victim}, {where} of microbatch 2\)"
    for times in zip(*trio(survive, (set_trap, victim)), strict=True):
        assert len({report for report, _, _ in times}) == 1
        report = times[0][0]
        assert re.match(rf"{action} failed on rank {victim}: ValueError: no such token\n", report)
        assert [re.match(r"  rank (\d) (runs|waits for|is between steps)", line)[1] for line in report.splitlines()[1:]] == ["0", "1", "2"]
        assert {cause for _, cause, _ in times} == {"ValueError: no such token"}
        assert max(took for _, _, took in times) < SOON


def test_report_says_which_rank_waits_for_which(trio: Run) -> None:
    """The last rank fails in its third forward, so the first must be waiting for a gradient of the middle one."""

    def set_trap(trap: Trap) -> None:
        trap.forward_trap = raise_it

    (report, _, _), _ = trio(survive, (set_trap, 2))[0]
    lines = report.splitlines()
    assert re.match(r"  rank 0 waits for gradients from rank 1, for 0B\d, since [0-9.]+ s; done before: (0\w+, ){2}0RECV_B\d$", lines[1])
    assert re.match(r"  rank 2 runs 2F2 since [0-9.]+ s; done before: ", lines[3])


class OddError(Exception):
    """One that cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_exception_that_cannot_travel(trio: Run) -> None:
    def set_trap(trap: Trap) -> None:
        def odd() -> None:
            raise OddError(1, 2)

        trap.forward_trap = odd

    for (report, cause, _), _ in trio(survive, (set_trap, 1)):
        assert "OddError: 1 and 2" in report
        assert "1 and 2" in cause


def test_wrong_shape(trio: Run) -> None:
    def run() -> list[Any]:
        pipe, _, x, y = make()
        first = pipe.step(x, target=y).loss
        found = []
        for _ in range(2):
            found.append(caught(lambda: pipe.step(torch.zeros(12, 5), target=y)))
            assert torch.equal(pipe.step(x, target=y).loss, first)
        return found

    for times in zip(*trio(run), strict=True):
        assert {re.match(r"0F0 .* failed on rank 0: RuntimeError: .*shapes", report) is not None for report, _, _ in times} == {True}
        assert max(took for _, _, took in times) < SOON


@pytest.mark.parametrize("victim", [1])
def test_stall_past_the_deadline(trio: Run, victim: int) -> None:
    """The headline names the rank that stalls, also if the first to complain waits for a rank in between."""

    def set_trap(trap: Trap) -> None:
        trap.forward_trap = partial(wait_for_the_report, trap)

    for times in zip(*trio(survive, (set_trap, victim, 1.0)), strict=True):
        assert len({report for report, _, _ in times}) == 1
        report = times[0][0]
        headline = rf"rank \d waited \d\.\d s for (gradients|activations) from rank \d; held up by rank {victim}, which runs {victim}F2 "
        assert re.match(headline + r"since \d\.\d s\n", report)
        assert re.search(rf"\n  rank {victim} runs {victim}F2 since ", report)


def test_stall_in_the_words_of_nccl() -> None:
    """NCCL says of a wait that was too long that its work ran for so long `before timing out`."""
    from penstock.runtime.transport.failures import TCPStore
    from penstock.runtime.transport.processes import Processes

    words = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=RECV) ran for 1000 milliseconds before timing out."
    group = Processes(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 1, 10.0)
    try:
        with pytest.raises(PipelineError, match=r"^rank 0 waited \d\.\d s for gradients from rank 1\n"):
            group.raise_lost(1, "gradients from rank 1", RuntimeError(words))
    finally:
        group.close()


def test_ranks_that_disagree_on_the_schedule(trio: Run) -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        model, (x, y) = [Trap() for _ in range(RANKS)], torch.randn(2, 12, 6).unbind()
        found = []
        for name in ("gpipe", "eager-1f1b"):
            chosen = name if rank() == 2 else "1f1b"
            options = {"microbatches": 6, "loss_fn": functional.mse_loss, "deadline": LATE}
            found.append(caught(partial(Pipeline, model, schedule=chosen, **options)))
            pipe = Pipeline(model, schedule="1f1b", **options)
            assert pipe.step(x, target=y).loss is not None
        return found

    for times in zip(*trio(run), strict=True):
        assert len({report for report, _, _ in times}) == 1
        assert re.match(r"the ranks disagree on schedule: '\w+' on rank 0, '\w+' on rank 2; give all the same", times[0][0])


@pytest.mark.parametrize("counts", [(6, 6, 4), (4, 6, 6)])
def test_ranks_that_disagree_on_the_count(trio: Run, counts: tuple[int, ...]) -> None:
    def run() -> list[Any]:
        pipe, _, x, y = make()
        first = pipe.step(x, target=y).loss
        found = []
        for _ in range(2):
            found.append(caught(lambda: pipe.step(x, target=y, microbatches=counts[rank()])))
            assert torch.equal(pipe.step(x, target=y).loss, first)
        return found

    for times in zip(*trio(run), strict=True):
        assert len({report for report, _, _ in times}) == 1
        assert re.match(r"rank \d runs another step than rank \d: give all ranks the same count", times[0][0])
        assert max(took for _, _, took in times) < SOON


def test_steps_continue_after_many_failures(trio: Run) -> None:
    """Every failure starts a new generation of connections; the old ones are released."""

    def run() -> tuple[int, int]:
        pipe, model, x, y = make()
        counts = []
        for k in range(8):
            model[1].calls, model[1].forward_trap = 0, raise_it
            caught(lambda: pipe.step(x, target=y))
            model[1].forward_trap = None
            pipe.step(x, target=y)
            if k in (1, 7):
                counts.append(len(os.listdir("/proc/self/fd")))
        return counts[0], counts[1]

    for before, after in trio(run):
        assert after <= before


# Channels that carry tensors as they are, with gloo in the place of NCCL ------------------------------------------------


@pytest.mark.parametrize("transport", ["direct", "edges"])
def test_reports_of_direct_channels_tell_faults_apart(transport: str, tmp_path: Path) -> None:
    """In one run: an exception, a wrong shape, a stall, each in a steady step and followed by a good one; at last a rank is killed."""

    def run() -> list[Any]:
        pipe, model, x, y = make(deadline=2.0, group=dist.group.WORLD, transport=transport)
        traps: list[Callable[[], None] | None] = [raise_it, None, partial(wait_for_the_report, model[2])]
        model[2].group = pipe.group
        first = pipe.step(x, target=y).loss
        found = []
        for trap in traps:
            assert torch.equal(pipe.step(x, target=y).loss, first)
            if rank() == 2:
                model[2].calls, model[2].forward_trap = 0, trap
            wrong = torch.zeros(12, 5) if trap is None else x
            found.append(caught(partial(pipe.step, wrong, target=y)))
            model[2].forward_trap = None
            assert torch.equal(pipe.step(x, target=y).loss, first)
        if rank() == 2:
            model[2].calls, model[2].forward_trap = 0, lambda: os.kill(os.getpid(), signal.SIGKILL)
        found.append(caught(lambda: pipe.step(x, target=y)))
        (tmp_path / str(rank())).write_bytes(pickle.dumps(found))
        raise PipelineError("rank 2 is gone")

    with pytest.raises(LostRankError, match="the process of rank 2 was killed by SIGKILL"), Workers(RANKS) as workers:
        workers.run(run)
    reports = [pickle.loads((tmp_path / str(place)).read_bytes()) for place in (0, 1)]
    headlines = [
        r"2F2 \(stage 2, forward of microbatch 2\) failed on rank 2: ValueError: no such token\n",
        r"0F0 \(stage 0, forward of microbatch 0\) failed on rank 0: RuntimeError: .*shapes",
        r"rank [01] waited \d\.\d s for gradients from rank [12]; held up by rank 2, which runs 2F2 since \d\.\d s\n",
        r"rank 1 lost the connection to rank 2 while it waited for gradients from rank 2\n",
    ]
    for headline, (one, _, took), (other, _, also) in zip(headlines, *reports, strict=True):
        assert one == other
        assert re.match(headline, one), one
        assert max(took, also) < SOON
    assert "\n  rank 2 does not answer" in reports[0][-1][0]


@pytest.mark.parametrize("transport", ["framed", "direct", "edges"])
def test_failure_reaches_all_ranks_if_their_errors_are_kept(trio: Run, transport: str) -> None:
    """Rank 0 waits for rank 1, which is told of the failure of rank 2 and keeps the error, with everything that its frames refer to."""

    def run() -> float:
        pipe, model, x, y = make(group=dist.group.WORLD, transport=transport)
        pipe.step(x, target=y)
        if rank() == 2:
            model[2].calls, model[2].forward_trap = 0, raise_it
        began, kept = time.monotonic(), []
        try:
            pipe.step(x, target=y)
        except PipelineError as error:
            kept.append(error)
        took = time.monotonic() - began
        model[2].forward_trap = None
        pipe.step(x, target=y)
        pipe.group.close()
        return took if kept else LATE

    assert max(trio(run)) < SOON


# Ranks that are lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [2])
def test_killed_rank(victim: int, tmp_path: Path) -> None:
    """The other ranks notice, name the rank that does not answer, and cannot continue; the launch names the rank and the signal."""

    def run() -> None:
        pipe, model, x, y = make()
        pipe.step(x, target=y)
        if rank() == victim:
            model[victim].forward_trap = lambda: os.kill(os.getpid(), signal.SIGKILL)
        report, _, took = caught(lambda: pipe.step(x, target=y))
        again, _, _ = caught(lambda: pipe.step(x, target=y))
        (tmp_path / str(rank())).write_text(f"{took}\n{again}\n{report}")
        raise PipelineError(again)

    workers = Workers(RANKS)
    with pytest.raises(LostRankError, match=f"the process of rank {victim} was killed by SIGKILL"), workers:
        workers.run(run)
    assert all(process.poll() is not None for process in workers.processes)
    told = {int(path.name): path.read_text().split("\n", 2) for path in tmp_path.iterdir()}
    assert sorted(told) == [other for other in range(RANKS) if other != victim]
    assert len({report for _, _, report in told.values()}) == 1
    for took, again, report in told.values():
        assert float(took) < SOON
        assert f"  rank {victim} does not answer" in report
        assert f"ranks [{victim}] have ended" in again


@pytest.mark.usefixtures("started_ranks")
def test_lost_workers_are_not_used_again() -> None:
    with Workers(2) as workers:
        with pytest.raises(LostRankError, match="rank 1 ended with exit code 7"):
            workers.run(lambda: os._exit(7) if rank() else None)
        with pytest.raises(PipelineError, match="start new workers"):
            workers.run(rank)


@pytest.mark.usefixtures("started_ranks")
def test_rank_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "GRACE", 1.0)

    def run() -> None:
        if rank():
            time.sleep(LATE)
        raise ValueError("the other one is busy")

    workers = Workers(2)
    with pytest.raises(ValueError, match="the other one is busy"), workers:
        workers.run(run)
    assert all(process.poll() is not None for process in workers.processes)


SCRIPT = """
    import os, signal, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    from penstock.runtime import launch, rank

    def work(folder):
        open(os.path.join(folder, str(os.getpid())), "w").close()
        time.sleep(300)

    launch(work, 2, "gloo", (sys.argv[1],))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_process_that_launched(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path / "pids")], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(os.listdir(tmp_path / "pids")) == 2)
        parent.send_signal(how)
        assert parent.wait(60) != 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in os.listdir(tmp_path / "pids")))
    finally:
        parent.kill()


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.usefixtures("started_ranks")
def test_launch_on_processes() -> None:
    """Results by rank, functions of this module, arguments, and the caller's random state on every rank."""
    torch.manual_seed(7)
    state = torch.get_rng_state()

    def work(scale: int) -> tuple[int, Tensor]:
        return scale * rank(), torch.randn(3)

    results = launch(work, 2, "gloo", (10,))
    assert torch.equal(torch.get_rng_state(), state)
    assert [number for number, _ in results] == [0, 10]
    expected = torch.randn(3)
    assert all(torch.equal(drawn, expected) for _, drawn in results)


def test_unknown_backend() -> None:
    with pytest.raises(ScheduleError, match="unknown backend 'glu'; did you mean 'gloo'"):
        launch(rank, 2, "glu")


def test_processes_that_do_not_join_are_named() -> None:
    def run() -> str:
        from penstock.runtime.transport.failures import TCPStore
        from penstock.runtime.transport.processes import Processes

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return caught(lambda: Processes(store, 0, 3, 0.3))[0]

    assert run() == "rank 0 cannot connect to the others: ranks [1, 2] did not come within 0.3 s"
