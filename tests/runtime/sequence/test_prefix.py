"""Layers that reach earlier slices through their prefix: the loss and every gradient of whole sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.ir.graph import StageGraph
from penstock.runtime import Pipeline, Prefix, add_loss, launch, prefix_of
from penstock.runtime.sequence.prefix import Prefixes, Slice, StageMemory, current_slice
from runtime.sequences import WIDTH, CausalBlock, assert_within, causal_mask, decoder, mean_loss, sliced_step, words

EXACT = 1e-12


def whole(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any = mean_loss) -> tuple[Tensor, nn.Module]:
    """The loss of the unpipelined model, and a copy with its gradients."""
    model = copy.deepcopy(model)
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss.detach(), model


def check(model: nn.Module, schedule: ps.Schedule, tokens: int = 13, tolerance: float = EXACT, rows: int = 4, **options: Any) -> None:
    x, y = words(rows, tokens), words(rows, tokens)
    loss, wanted = whole(model, x, y)
    results, found = sliced_step(model, schedule, x, y, **options)
    for result in results:
        torch.testing.assert_close(result.loss, loss, rtol=tolerance, atol=0)
    assert_within(found, wanted, tolerance)


# Schedules, numbers and lengths of slices -----------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["seq1f1b", "seq-zb-h1"])
def test_every_number_of_slices_gives_the_whole_sequence(name: str, slices: int) -> None:
    check(decoder(4), ps.schedule(name, ranks=2, microbatches=2, slices=slices))


@pytest.mark.parametrize("name", ["slimpipe", "zbv", "v-half", "interleaved-1f1b", "interleaved-zb", "gpipe", "zb-h2", "1f1b-v"])
def test_every_family_of_schedules_runs_slices(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=4, slices=3)
    check(decoder(max(4, schedule.stages)), schedule)


@pytest.mark.parametrize("lengths", [[1, 5, 7], [9, 3, 1], lambda total: [total - 2, 1, 1]])
def test_slices_of_unequal_lengths(lengths: Any) -> None:
    """Also those whose memory must grow, because the first slice is the shortest."""
    check(decoder(4), ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3), slice_lengths=lengths)


def test_memory_grows_if_later_slices_are_longer() -> None:
    check(decoder(4), ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3), slice_lengths=lambda total: [1, 2, total - 3])


def test_single_precision() -> None:
    check(decoder(6, torch.float32), ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=4), tolerance=1e-5)


@pytest.mark.parametrize("name", ["seq1f1b", "seq-zb-h1"])
def test_recomputed_stages_see_the_same_prefix(name: str) -> None:
    check(decoder(4), ps.schedule(name, ranks=2, microbatches=2, slices=3), recompute=True)


def test_one_rank_is_enough() -> None:
    check(decoder(3), ps.schedule("seq1f1b", ranks=1, microbatches=1, slices=4), rows=1)


def test_microbatches_of_different_lengths() -> None:
    model, schedule = decoder(4), ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3)
    inputs, targets = [words(2, 7), words(2, 12)], [words(2, 7), words(2, 12)]
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    loss = sum(mean_loss(wanted(x), y) for x, y in zip(inputs, targets, strict=True)) / 2
    loss.backward()
    results = launch(lambda: Pipeline(found, schedule, loss_fn=mean_loss).step_list(inputs, targets).losses, 2)
    assert_within(found, wanted, EXACT)
    for losses in results:
        torch.testing.assert_close(sum(losses) / 2, loss.detach(), rtol=EXACT, atol=0)


def test_microbatches_whose_slices_take_turns() -> None:
    """An order of one's own: slice 0 of both microbatches, then slice 1 of both."""
    forwards, backwards = ["0F0.0", "0F1.0", "0F0.1", "0F1.1"], ["0B0.1", "0B1.1", "0B0.0", "0B1.0"]
    schedule = ps.Schedule.from_actions([[*forwards, *backwards]], slices=2)
    model, x, y = decoder(3), words(2, 7), words(2, 7)
    loss, wanted = whole(model, x, y)
    results, found = sliced_step(nn.ModuleList([model]), schedule, x, y)
    torch.testing.assert_close(results[0].loss, loss, rtol=EXACT, atol=0)
    assert_within(found[0], wanted, EXACT)  # type: ignore[index]
    outputs = launch(lambda: Pipeline([model], schedule, loss_fn=mean_loss).step(x, target=y, outputs=True).outputs, 1)[0]
    torch.testing.assert_close(outputs, model(x), rtol=EXACT, atol=EXACT)


def test_edges_that_skip_stages() -> None:
    class Joined(CausalBlock):
        def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
            return super().forward(x if skipped is None else x + skipped)

    stages = nn.ModuleList([Joined() for _ in range(4)]).double()
    graph = StageGraph.chain(4, [(0, 2), (0, 3), (1, 3)])
    schedule = ps.schedule("interleaved-1f1b", ranks=2, microbatches=2, slices=3).with_graph(graph)
    x, y = torch.randn(4, 10, WIDTH).double(), torch.randn(4, 10, WIDTH).double()
    wanted, found = copy.deepcopy(stages), copy.deepcopy(stages)
    first = wanted[0](x)
    second = wanted[1](first)
    third = wanted[2](second, first)
    nn.functional.mse_loss(CausalBlock.forward(wanted[3], third + second + first), y).backward()

    class Last(Joined):
        def forward(self, x: Tensor, *skipped: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + sum(skipped))

    found[3].__class__ = Last
    launch(lambda: Pipeline(list(found), schedule, loss_fn=nn.functional.mse_loss).step(x, target=y), 2)
    assert_within(found, wanted, EXACT)


# Layers of one's own --------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Hands its state on from slice to slice."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        prefix = prefix_of(self)
        out, state = self.cell(x, None if prefix.state is None else prefix.state[0])
        prefix.keep(state)
        return x + out


class Convolution(nn.Module):
    """Sees two tokens before each, which the slice before has left."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        prefix = prefix_of(self)
        before = torch.zeros_like(x[:, :1]).expand(-1, 2, -1) if prefix.state is None else prefix.state[0]
        longer = torch.cat([before, x], 1)
        prefix.keep(longer[:, -2:])
        return x + self.map(longer.transpose(1, 2)).transpose(1, 2)


class Positions(nn.Module):
    """Adds the position of each token."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        start = prefix_of(self).advance(x.shape[1])
        return x + self.table(torch.arange(start, start + x.shape[1]))


class Torch(nn.Module):
    """Torch's own attention, with the keys of earlier slices."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        keys = prefix_of(self).extend(x, dim=1)
        mask = ~causal_mask(x.shape[1], keys.shape[1])
        return x + self.inner(x, keys, keys, attn_mask=mask, need_weights=False)[0]


class Checkpointed(nn.Module):
    """Recomputes a block by torch's own checkpoint."""

    sliceable = True

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = CausalBlock(), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", [Recurrent, Convolution, Positions, Torch, Checkpointed])
def test_layers_of_one_s_own(layer: type[nn.Module], recompute: bool) -> None:
    model = nn.Sequential(nn.Embedding(11, WIDTH), layer(), CausalBlock(), layer(), nn.Linear(WIDTH, 11)).double()
    check(model, ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3), recompute=recompute)


def test_without_slices_a_prefix_is_empty() -> None:
    prefix, tensor = prefix_of("anything"), torch.ones(2, 3)
    assert isinstance(prefix, Prefix)
    assert prefix.extend(tensor) is tensor
    assert prefix.extend(tensor, tensor) == (tensor, tensor)
    prefix.keep(tensor)
    assert prefix.state is None
    assert prefix.advance(5) == 0
    assert current_slice() is None


@pytest.mark.parametrize("frozen", ["0", "1", "2.joint"])
def test_frozen_layers(frozen: str) -> None:
    """The keys of the first block need no gradient once the embedding and the block itself are frozen."""
    model = decoder(5)
    for name in {"0", frozen}:
        model.get_submodule(name).requires_grad_(False)
    check(model, ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3))


def test_side_losses_count_by_tokens() -> None:
    class Sided(nn.Linear):
        sliceable = True

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            add_loss(out.square().mean())
            return out

    model = nn.Sequential(nn.Embedding(11, WIDTH), CausalBlock(), Sided(WIDTH, WIDTH), CausalBlock(), nn.Linear(WIDTH, 11)).double()
    x, y = words(4, 11), words(4, 11)
    wanted = copy.deepcopy(model)
    inner = wanted[:3](x)
    loss = mean_loss(wanted(x), y) + inner.square().mean()
    loss.backward()
    results, found = sliced_step(model, ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3), x, y)
    torch.testing.assert_close(results[0].loss, loss.detach(), rtol=EXACT, atol=0)
    assert_within(found, wanted, EXACT)


# What is kept, and for how long ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_the_prefix_is_stored_once(recompute: bool) -> None:
    """All slices of a microbatch read one memory, also when they are run again; nothing is left after the step."""
    seen: list[tuple[int, int]] = []

    class Watched(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            part = current_slice()
            assert part is not None
            seen.append((id(part.memory), prefix_of("watch").extend(x, dim=1).untyped_storage()._cdata))
            return super().forward(x)

    model, x = nn.Sequential(nn.Embedding(11, WIDTH), Watched(), nn.Linear(WIDTH, 11)), words(1, 12)

    def train() -> int:
        pipe = Pipeline(model, ps.schedule("seq1f1b", ranks=1, microbatches=1, slices=4), loss_fn=mean_loss, recompute=recompute)
        pipe.step(x, target=x)
        prefixes = pipe._executor(1, True).compute.prefixes
        assert prefixes is not None
        return len(prefixes._memory)

    assert launch(train, 1) == [0]
    assert len(seen) == (8 if recompute else 4)
    assert len(set(seen)) == 1


def test_memory_of_the_prefix_grows_with_each_slice() -> None:
    """It holds the tokens that have run and no more, and what was taken of it before stays valid."""
    memory, tokens = StageMemory(), torch.randn(2, 3, 10, 5)
    kept, joined = memory.get_kept("x"), []
    for number, part in enumerate(tokens.split([1, 4, 2, 3], dim=2)):
        joined.append(*kept.extend(Slice(number, 4, memory), "x", [part], 2))
        assert joined[-1].untyped_storage().nbytes() == joined[-1].numel() * 4
        assert list(memory.addresses) == [joined[-1].untyped_storage().data_ptr()]
    for view in joined:
        assert torch.equal(view, tokens[:, :, : view.shape[2]])
        assert view._version == joined[-1]._version  # autograd would refuse a saved tensor with another


def test_sums_of_gradients_are_let_go_with_their_slice() -> None:
    memory = StageMemory()
    kept = memory.get_kept("x")
    for number, part in enumerate(torch.randn(1, 9).split([2, 4, 3], dim=1)):
        kept.extend(Slice(number, 3, memory), "x", [part.requires_grad_()], 1)
    held = []
    for number, tokens in ((2, 9), (1, 6), (0, 2)):
        own = kept.take_gradient(number, 0, torch.ones(1, tokens))
        assert own is not None
        assert own.untyped_storage().nbytes() == own.numel() * 4
        held.append({slice_: part.shape[1] for slice_, part in kept.sums[0].items()})
    assert held == [{0: 2, 1: 4}, {0: 2}, {}]


def test_gradients_of_a_prefix_are_taken_once() -> None:
    """By hand: three slices of one tensor, each multiplied by all tokens so far."""
    prefixes, tokens = Prefixes(3), torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    outputs, roots, parts = [], [], list(tokens.detach().split(2, 1))
    for unit, part in enumerate(parts):
        part.requires_grad_()
        with prefixes.forward(0, unit, share=1.0, training=True):
            own = part * 2
            joined = prefix_of("x").extend(own, dim=1)
            outputs.append((own * joined.sum()).sum())
        roots.append(prefixes.take_roots())
    assert [len(more) for more in roots] == [1, 1, 0]
    for unit in (2, 1, 0):
        starts = [outputs[unit], *roots[unit]]
        prefixes.wrap_backward(
            0, unit, lambda starts=starts: torch.autograd.backward(starts, [torch.ones_like(start) for start in starts])
        )()
    doubled = tokens * 2
    sum((doubled[:, k : k + 2] * doubled[:, : k + 2].sum()).sum() for k in (0, 2, 4)).backward()
    torch.testing.assert_close(torch.cat([part.grad for part in parts], 1), tokens.grad, rtol=EXACT, atol=EXACT)


def test_a_slice_without_gradients_passes_those_of_earlier_ones_on() -> None:
    prefixes, first, factor = Prefixes(2), torch.randn(1, 2, requires_grad=True), torch.randn(1, 1, requires_grad=True)
    with prefixes.forward(0, 0, share=1.0, training=True):
        prefix_of("x").extend(first, dim=1)
    roots = prefixes.take_roots()
    with prefixes.forward(0, 1, share=1.0, training=True):
        output = (factor * prefix_of("x").extend(torch.ones(1, 2), dim=1)).sum()
    prefixes.wrap_backward(0, 1, output.backward)()
    prefixes.wrap_backward(0, 0, lambda: torch.autograd.backward(roots, [torch.ones_like(root) for root in roots]))()
    torch.testing.assert_close(first.grad, factor.detach().expand(1, 2))


def test_short_floats_are_summed_in_32_bits() -> None:
    memory = StageMemory()
    kept, tokens = memory.get_kept("x"), torch.randn(1, 64).bfloat16()
    for number, part in enumerate(tokens.split(1, 1)):
        kept.extend(Slice(number, 64, memory), "x", [part.requires_grad_()], 1)
    grads = [torch.randn(1, k + 1).bfloat16() for k in range(64)]
    for number in range(63, 0, -1):
        kept.take_gradient(number, 0, grads[number])
    first = kept.take_gradient(0, 0, grads[0])
    assert first is not None
    assert first.dtype is torch.bfloat16
    exact = torch.stack([grad[:, 0].double() for grad in grads]).sum(0, keepdim=True)
    torch.testing.assert_close(first, exact.bfloat16(), rtol=1e-2, atol=1e-2)


def test_a_failed_step_leaves_nothing() -> None:
    class Failing(CausalBlock):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            part = current_slice()
            if self.fails and part is not None and part.number == 1:
                raise ValueError("not now")
            return super().forward(x)

    model = nn.Sequential(nn.Embedding(11, WIDTH), Failing(), CausalBlock(), nn.Linear(WIDTH, 11)).double()
    x, y = words(4, 9), words(4, 9)
    Failing.fails = False
    _, wanted = whole(model, x, y)
    found, schedule = copy.deepcopy(model), ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3)

    def train() -> None:
        pipe = Pipeline(found, schedule, loss_fn=mean_loss)
        Failing.fails = True
        with pytest.raises(PipelineError, match="not now"):
            pipe.step(x, target=y)
        pipe.gather("again", None)
        Failing.fails = False
        pipe.step(x, target=y)

    launch(train, 2)
    assert_within(found, wanted, EXACT)


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_moved_to_the_host_but_the_prefix_stays(recompute: bool) -> None:
    model, x, y = decoder(6), words(4, 20), words(4, 20)
    schedule = ps.schedule("gpipe", ranks=2, microbatches=2, slices=4)
    _, wanted = sliced_step(model, schedule, x, y, recompute=recompute)
    found, program = copy.deepcopy(model), ps.lower(schedule, offload=100)
    moved: list[int] = []

    def train() -> None:
        pipe = Pipeline(found, program, loss_fn=mean_loss, recompute=recompute)
        executor = pipe._executor(2, True)
        assert executor.compute.moves is not None
        assert executor.compute.prefixes is not None
        prefixes, memory = executor.compute.prefixes, executor.compute.moves.memory
        take = memory.take
        memory.take = lambda size, pinned: moved.append(size) or take(size, pinned)  # type: ignore[func-returns-value, method-assign]
        pipe.step(x, target=y)
        assert not prefixes._memory

    launch(train, 2)
    assert_within(found, wanted, 0.0)
    keys = 2 * 2 * 20 * 4 * 8  # rows, heads, tokens of all slices, width of a head, bytes
    assert moved
    assert keys not in moved


# Evaluation, compiled stages, streams, recordings ---------------------------------------------------------------------


def test_evaluation_and_inference_run_slices() -> None:
    model, x, y = decoder(4), words(4, 10), words(4, 10)
    with torch.no_grad():
        scores = model(x)

    def run() -> tuple[Any, ...]:
        pipe = Pipeline(model, ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3), loss_fn=mean_loss)
        result = pipe.eval_step(x, target=y)
        prefixes = pipe._executor(2, False).compute.prefixes
        assert prefixes is not None
        return result.loss, result.losses, pipe.infer(x), pipe.step(x, target=y, outputs=True).outputs, len(prefixes._memory)

    for loss, losses, inferred, outputs, left in launch(run, 2):
        torch.testing.assert_close(loss, mean_loss(scores, y), rtol=EXACT, atol=0)
        for k, part in enumerate(losses):
            torch.testing.assert_close(part, mean_loss(scores[2 * k : 2 * k + 2], y[2 * k : 2 * k + 2]), rtol=EXACT, atol=0)
        torch.testing.assert_close(inferred, scores, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(outputs, scores, rtol=EXACT, atol=EXACT)
        assert not left


def test_parity_of_sliced_pipelines() -> None:
    model, x, y = decoder(4), words(4, 10), words(4, 10)
    schedule = ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3)
    for parity in launch(lambda: Pipeline(model, schedule, loss_fn=mean_loss).parity(x, target=y), 2):
        assert parity.loop.worst <= EXACT
        assert parity.batch is not None
        assert parity.batch.worst <= EXACT


def test_parity_tells_that_a_layer_sees_its_slice_only() -> None:
    class Wrong(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.cumsum(1)

    model, x, y = nn.Sequential(nn.Embedding(11, WIDTH), Wrong(), nn.Linear(WIDTH, 11)), words(4, 10), words(4, 10)
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3)
    assert not launch(lambda: Pipeline(model, schedule, loss_fn=mean_loss).parity(x, target=y), 2)[0].loop.close


def test_random_streams_do_not_depend_on_schedule_or_recomputation() -> None:
    model = decoder(5)
    model.insert(2, nn.Dropout(0.5))
    x, y = words(4, 10), words(4, 10)
    ones = [
        sliced_step(model, ps.schedule(name, ranks=2, microbatches=2, slices=3), x, y, seed=5, recompute=again)[1]
        for name, again in (("seq1f1b", False), ("seq-zb-h1", True), ("gpipe", False))
    ]
    assert_within(ones[1], ones[0], EXACT)
    assert_within(ones[2], ones[0], EXACT)


def test_steps_are_recorded() -> None:
    model, x = decoder(4), words(4, 10)
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3)
    results, _ = sliced_step(model, schedule, x, x, record=True)
    timeline = results[0].timeline
    assert timeline.table.slices == 3
    assert timeline.makespan > 0


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(layer: nn.Module, match: str, error: type[Exception] = PipelineError, **options: Any) -> None:
    model, x = nn.Sequential(nn.Embedding(11, WIDTH), layer, nn.Linear(WIDTH, 11)), words(2, 6)
    with pytest.raises(error, match=match):
        sliced_step(model, ps.schedule("seq1f1b", ranks=1, microbatches=1, slices=2), x, x, **options)


def test_a_layer_must_extend_its_prefix_in_every_slice_and_once() -> None:
    class Uneven(CausalBlock):
        first = True

        def forward(self, x: Tensor) -> Tensor:
            part = current_slice()
            assert part is not None
            if (part.number == 0) == self.first:
                prefix_of(self).extend(x, dim=1)
            return x

    class Late(Uneven):
        first = False

    class Twice(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    class States(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            part = current_slice()
            if part is not None and part.number:
                prefix_of(self).keep(x)
            return x

    refusal(Uneven(), "Uneven has called extend of its prefix in earlier slices, but not in slice 1")
    refusal(Late(), "Late extends its prefix in slice 1, but has not in slice 0")
    refusal(Twice(), r"Twice calls extend of its prefix twice in one forward: use one owner for each")
    refusal(States(), "States keeps state in slice 1, but has not in slice 0")


def test_tensors_of_different_lengths_are_refused() -> None:
    class Ragged(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            prefix_of(self).extend(x, x[:, 1:], dim=1)
            return x

    refusal(Ragged(), r"extends its prefix by tensors of \[2, 3, 8\], \[2, 2, 8\]: they differ along dimension 1")


def test_reentrant_checkpoints_are_refused() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed(reentrant=True))
    refusal(layer, "kept tensors without gradients, and computes them again with: .*use_reentrant=False")


def test_recorded_graphs_are_refused() -> None:
    refusal(CausalBlock(), "graphs=True, but slices of a sequence read the memory of earlier ones", ScheduleError, graphs=True)


def test_lengths_need_a_schedule_with_slices() -> None:
    model = decoder(3)
    with pytest.raises(ScheduleError, match=r"slice_lengths=\[2, 2\], but 1f1b has no slices"):
        launch(lambda: Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=mean_loss, slice_lengths=[2, 2]), 2)
