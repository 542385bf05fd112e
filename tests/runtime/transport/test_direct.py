"""Channels that carry tensors as they are, with gloo in the place of NCCL, which is not run here."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, UnknownNameError
from penstock.runtime import Pipeline, rank
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow


class Turned(nn.Module):
    """Gives a dict with a transposed tensor, a plain value and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        x = x["turned"].mT + x["fixed"] if isinstance(x, dict) else x
        return {"turned": torch.tanh(self.map(x)).mT, "fixed": x.detach() * 0.5, "name": "a plain value"}


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    return functional.mse_loss(output["turned"].mT, target)


def make(name: str, ranks: int, transport: str, **options: Any) -> tuple[Pipeline, Tensor, Tensor]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    schedule = ps.schedule(name, ranks, 6)
    x, y = torch.randn(2, 12, 6).unbind()
    model = [Turned() for _ in range(schedule.stages)]
    pipe = Pipeline(model, schedule, loss_fn=loss, group=dist.group.WORLD, transport=transport, **({"deadline": 60.0} | options))
    return pipe, x, y


@pytest.mark.parametrize(
    ("name", "ranks", "transport"),
    [
        ("1f1b", 2, "direct"),
        ("gpipe", 4, "direct"),
        ("interleaved-zb", 2, "direct"),
        ("zbv", 4, "direct"),
        ("dualpipe-v", 2, "direct"),
        ("chimera", 4, "direct"),
        ("1f1b", 2, "edges"),
        ("interleaved-zb", 2, "edges"),
        ("zbv", 4, "edges"),
        ("dualpipe-v", 2, "edges"),
    ],
)
def test_numbers_equal_the_loop_s(workers: Workers, name: str, ranks: int, transport: str) -> None:
    """Also after the batch and the count have changed, and with evaluation in between."""

    def run() -> list[bool]:
        pipe, x, y = make(name, ranks, transport)
        framed, *_ = make(name, ranks, "framed")
        same = []
        for batch, count in ((12, 6), (12, 6), (10, 6), (9, 4), (12, 6)):
            one, other = (each.parity(x[:batch], target=y[:batch], microbatches=count).loop for each in (pipe, framed))
            same.append((one.exact, one.worst) == (other.exact, other.worst))
            same.append(torch.equal(pipe.infer(x[:batch])["fixed"], framed.infer(x[:batch])["fixed"]))
        pipe.group.close()
        return same

    assert all(all(same) for same in workers.run(run, ranks=ranks))


@pytest.mark.parametrize("transport", ["direct", "edges"])
def test_forms_are_sent_only_when_inputs_change(workers: Workers, transport: str) -> None:
    def run() -> list[bool]:
        pipe, x, y = make("1f1b", 2, transport)
        learned = []
        for batch in (12, 12, 12, 10, 10, 12):
            pipe.step(x[:batch], target=y[:batch])
            learned.append(all(outbox.agreement.learning for outbox in pipe._executor(6, True).links.outboxes.values()))
        pipe.group.close()
        return learned

    assert workers.run(run, ranks=2) == [[True, False, False, True, False, True]] * 2


@pytest.mark.parametrize("transport", ["direct", "edges"])
def test_autocast_may_be_toggled_between_steps(workers: Workers, transport: str) -> None:
    """Messages change their types with it. The last setting is the GPU's, which changes nothing here, but might."""
    settings = [None, None, torch.bfloat16, torch.bfloat16, torch.float16, None, "cuda", "cuda", None]

    def run() -> tuple[list[bool], list[bool]]:
        torch.manual_seed(0)
        model, (x, y) = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(2, 8, 6).unbind()
        options = {"schedule": "1f1b", "microbatches": 4, "loss_fn": functional.mse_loss, "split": [1, 1], "group": dist.group.WORLD}
        pipe, framed = (Pipeline(model, transport=each, deadline=60.0, **options) for each in (transport, "framed"))
        learned, same = [], []
        for setting in settings:
            torch.set_autocast_enabled("cuda", setting == "cuda")
            dtype = setting if isinstance(setting, torch.dtype) else torch.bfloat16
            with torch.autocast("cpu", dtype, enabled=isinstance(setting, torch.dtype)):
                same.append(torch.equal(pipe.step(x, target=y).loss, framed.step(x, target=y).loss))
            learned.append(all(outbox.agreement.learning for outbox in pipe._executor(4, True).links.outboxes.values()))
        torch.set_autocast_enabled("cuda", False)
        pipe.group.close()
        return learned, same

    for learned, same in workers.run(run, ranks=2):
        assert learned == [before != after for before, after in zip(["new", *settings], settings, strict=False)]
        assert all(same)


class Counting(nn.Module):
    """A stage that notes how many tensors with the shape of a message are alive on its rank while it runs."""

    def __init__(self, wide: int, high: int) -> None:
        super().__init__()
        self.map, self.most = nn.Linear(wide, high), 0

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, count_messages())
        return self.map(x)


def count_messages() -> int:
    """How many pieces of memory hold a tensor with the shape of a message."""
    return len({thing.data_ptr() for thing in gc.get_objects() if type(thing) is Tensor and thing.shape == (2, 7)})


@pytest.mark.parametrize("transport", ["direct", "edges"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_sent_tensors_are_let_go(workers: Workers, name: str, transport: str) -> None:
    """What a rank holds does not grow with the number of microbatches, and no message is left after a step or an evaluation."""

    def run() -> tuple[list[int], list[int]]:
        gc.collect()
        gc.freeze()  # `count_messages` looks at objects that are younger than this
        torch.manual_seed(0)
        schedule = ps.schedule(name, 2, 8)
        widths = [5, *[7] * (schedule.stages - 1), 3]
        model = [Counting(*widths[stage : stage + 2]) for stage in range(schedule.stages)]
        mine = schedule.placement.stages_of(rank())
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, group=dist.group.WORLD, transport=transport, deadline=60.0)
        most, left = [], []
        for count in (8, 32):
            x, y = torch.randn(2 * count, 5), torch.randn(2 * count, 3)
            for act in (pipe.step, pipe.step, pipe.eval_step):
                for stage in mine:
                    model[stage].most = 0
                act(x, target=y, microbatches=count)
                most.append(max(model[stage].most for stage in mine))
                left.append(count_messages())
        pipe.group.close()
        return most, left

    for (_, step, _, _, more, _), left in workers.run(run, ranks=2):
        assert more == step
        assert left == [0] * 6


class Fickle(nn.Module):
    """A stage whose output changes its form though its input does not."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.wide = nn.Linear(6, 6), False

    def forward(self, x: Tensor) -> Tensor:
        made = self.map(x)
        return torch.cat([made, made]) if self.wide else made


@pytest.mark.parametrize("transport", ["direct", "edges"])
def test_form_that_changes_by_itself_is_refused(workers: Workers, transport: str) -> None:
    """Nothing is cut off; every rank gets the reason, and the next step works."""

    def run() -> tuple[str, bool]:
        torch.manual_seed(0)
        model, (x, y) = [Fickle(), nn.Linear(6, 6)], torch.randn(2, 8, 6).unbind()
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=lambda a, b: a.mean(), group=dist.group.WORLD, transport=transport)
        first = pipe.step(x, target=y).loss
        model[0].wide = True
        try:
            pipe.step(x, target=y)
            said = ""
        except PipelineError as error:
            said = str(error)
        model[0].wide = False
        again = bool(torch.equal(pipe.step(x, target=y).loss, first))
        pipe.group.close()
        return said.splitlines()[0], again

    said, again = zip(*workers.run(run, ranks=2), strict=True)
    assert again == (True, True)
    assert said[0] == said[1]
    assert said[0].startswith("rank 0 made activations 0 of the form float32[4, 6], but earlier steps had float32[2, 6]: on this device")


def test_programs_are_proved_under_rendezvous(workers: Workers) -> None:
    """A program that hangs with one queue is refused before it runs, and runs if every channel has its own."""

    def run(transport: str) -> str:
        torch.manual_seed(0)
        rows = [["0F0", "0RECV_B0", "0SEND_F0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
        program = ps.Program.from_actions(rows, ps.Placement.linear(2))
        model, x = [nn.Linear(6, 6), nn.Linear(6, 6)], torch.randn(4, 6)
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss, group=dist.group.WORLD, transport=transport, deadline=30.0)
        try:
            return str(pipe.step(x, target=x).loss.shape)
        except ps.VerifyError as error:
            return str(error)
        finally:
            pipe.group.close()

    assert all("deadlock" in said for said in workers.run(run, ("direct",), ranks=2))
    assert workers.run(run, ("edges",), ranks=2) == ["torch.Size([])"] * 2


def test_unknown_transport(workers: Workers) -> None:
    def run() -> str:
        try:
            make("1f1b", 2, "ege")
        except UnknownNameError as error:
            return str(error)
        return f"rank {rank()} took it"

    assert all(said.startswith("unknown transport 'ege'; did you mean 'edges'") for said in workers.run(run, ranks=2))
