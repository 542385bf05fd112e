"""Processes that wait for their sends: the same numbers, and a wait ends once the receive is posted, whether or not it is used yet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.passes.pass_list import PassList
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.models import Numbers, assert_close, blocks, by_batch


@pytest.mark.parametrize("transport", ["framed", "direct", "edges"])
@pytest.mark.parametrize("limit", ["all", "1"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_numbers_are_those_of_the_model(workers: Workers, name: str, limit: str, transport: str) -> None:
    """Four steps, the third with other sizes: messages of new forms are waited for as well."""
    passes = PassList.parse(f"reduce-grad{{wait=now}},send-receive,wait-send{{outstanding={limit}}},buffers")
    program = passes.apply(ps.schedule(name, ranks=2, microbatches=6))
    model = blocks(program.stages).double()
    batches = [(torch.randn(rows, 6).double(), torch.randn(rows, 6).double()) for rows in (12, 12, 17, 12)]

    def train() -> list[tuple[Tensor | None, dict[str, Tensor]]]:
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss, group=dist.group.WORLD, transport=transport, deadline=60)
        found = []
        for x, y in batches:
            for _, parameter in pipe.local_parameters():
                parameter.grad = None
            loss = pipe.step(x, target=y).loss
            found.append((loss, {name: parameter.grad.clone() for name, parameter in pipe.local_parameters()}))
        pipe.group.close()
        return found

    steps = list(zip(*workers.run(train, ranks=2), strict=True))
    for (x, y), step in zip(batches, steps, strict=True):
        wanted = by_batch(model, x, y)
        grads = {name: grad for _, theirs in step for name, grad in theirs.items()}
        assert_close(Numbers(step[0][0], [], grads), Numbers(wanted.loss, [], wanted.grads), 1e-12)
        assert float(step[1][0]) == float(step[0][0])


def large_and_crossing() -> ps.Program:
    """Rank 1 posts all its receives, then waits for a gradient that rank 0 makes only after it has waited for all its sends."""
    count = range(4)
    first = [f"0F{m} 0SEND_F{m}" for m in count] + [f"0WAIT_SEND_F{m}" for m in count]
    first += [f"3RECV_F{m} 3F{m} 3B{m} 3SEND_B{m}" for m in count]
    first += [f"0RECV_B{m} 0B{m}" for m in count] + [f"3WAIT_SEND_B{m}" for m in count]
    second = ["1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1RECV_F2 1RECV_F3 2RECV_B0 2B0 1B0 1SEND_B0"]
    second += [f"1F{m} 2F{m} 2SEND_F{m} 2RECV_B{m} 2B{m} 1B{m} 1SEND_B{m}" for m in count if m]
    second += [f"2WAIT_SEND_F{m} 1WAIT_SEND_B{m}" for m in count]
    return ps.Program.from_actions([" ".join(row).split() for row in (first, second)], ps.Placement.v(2))


@pytest.mark.parametrize("transport", ["framed", "edges"])
def test_a_wait_ends_when_the_receive_is_posted(workers: Workers, transport: str) -> None:
    """Messages so large that few are received ahead: 4 MiB take up all the room that there is."""
    program = large_and_crossing()
    ps.verify(program)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    rows = 4 * 90_000
    x = torch.randn(rows, 6).double()

    def train() -> list[float]:
        pipe = Pipeline(model, program, loss_fn=functional.mse_loss, group=dist.group.WORLD, transport=transport, deadline=60)
        losses = [float(pipe.step(x, target=x).loss) for _ in range(3)]  # type: ignore[arg-type]
        pipe.group.close()
        return losses

    wanted = float(by_batch(model, x, x).loss)  # type: ignore[arg-type]
    for losses in workers.run(train, ranks=2):
        assert losses == pytest.approx([wanted] * 3, rel=1e-9)
