"""Steps: the same script on both packages, all stages on one rank."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, Package, forward_cache, parse
from compat.torch.models import Outcome, assert_same, blocks, chunks_of, data, grads, loop, run, schedule, stages

ALL = [*SINGLE, *LOOPED, *ON_A_V]
SPLIT = ["ScheduleInterleavedZeroBubble", *ON_A_V]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("name", ALL)
def test_losses_outputs_and_gradients(name: str, count: int, scale: bool) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data()
    theirs, mine = (run(package, name, modules, x, y, count, scale_grads=scale) for package in BOTH)
    assert_same(mine, theirs, exact=name not in SPLIT)
    assert_same(mine, loop(modules, x, y, count, scale))


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_the_batch(name: str) -> None:
    """If the batch requires a gradient, it is accumulated in the batch."""
    modules, (x, y) = blocks(chunks_of(name)), data()
    found = []
    for package in BOTH:
        batch = x.clone().requires_grad_()
        run(package, name, modules, batch, y, 4)
        found.append(batch.grad)
    assert_same(found[1], found[0])
    assert found[1] is not None


@pytest.mark.parametrize("name", SINGLE)
def test_eval(name: str) -> None:
    modules, (x, y) = blocks(1), data()
    for package in BOTH:
        held, losses = copy.deepcopy(modules), list[Tensor]()
        made = schedule(package, name, stages(package, held), 4, loss_fn=nn.functional.mse_loss)
        out = made.eval(x, target=y, losses=losses)
        wanted = loop(modules, x, y, 4)
        assert_same(out.detach(), wanted.output)
        assert_same([loss.detach() for loss in losses], wanted.losses)
        assert grads(held) == [None] * 4
        assert_same(made.step(x, target=y), wanted.output)
        assert_same(grads(held), wanted.grads)


@pytest.mark.parametrize("name", ALL)
def test_outputs_on_request(name: str) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data()
    for package in BOTH:
        held = stages(package, copy.deepcopy(modules))
        made, losses = schedule(package, name, held, 4, loss_fn=nn.functional.mse_loss), list[Tensor]()
        assert made.step(x, target=y, losses=losses, return_outputs=False) is None
        assert len(losses) == 4
        assert [len(stage.output_chunks) for stage in held] == [0] * len(held)
        assert not any(forward_cache(stage) for stage in held)


def test_without_a_loss_function_only_outputs() -> None:
    modules, (x, _) = blocks(2), data()
    for package in BOTH:
        made = schedule(package, "ScheduleInterleaved1F1B", stages(package, copy.deepcopy(modules)), 4)
        if package is OURS:
            assert_same(made.step(x).detach(), modules[1](modules[0](x)).detach())
        only = schedule(package, "_ScheduleForwardOnly", stages(package, copy.deepcopy(modules[:1])), 4)
        assert_same(only.step(x).detach(), modules[0](x).detach())
        with pytest.raises(RuntimeError, match="Forward-only schedule does not support loss computation"):
            only.step(x, target=x)


# Batches --------------------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    """Takes keyword arguments, some of which are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, twice: bool = False, table: Any = None) -> Tensor:
        out = self.linear(x)
        out = out if shift is None else out + shift
        out = out if table is None else out + table["all"].sum()
        return out * 2 if twice else out


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", *ON_A_V])
def test_keyword_arguments_and_chunk_specs(name: str) -> None:
    modules, (x, y) = [Shifted() for _ in range(chunks_of(name))], data()
    shift, whole = torch.randn(12, 6), torch.randn(5)
    for specified in (False, True):
        found = []
        for package in BOTH:
            spec, keep = package.microbatch.TensorChunkSpec, package.microbatch._Replicate
            options: dict[str, Any] = {}
            if specified:
                options = {
                    "args_chunk_spec": (spec(0),),
                    "kwargs_chunk_spec": {"shift": spec(0), "twice": keep(), "table": {"all": keep()}},
                }
            table = {"all": whole if specified else whole.expand(12, 5)}
            splits = (
                package is OURS or name == "ScheduleDualPipeV" or VERSION >= (2, 13)
            )  # before, torch splits no backward with such values
            of = name if splits or name not in SPLIT else "ScheduleInterleaved1F1B"
            found.append(run(package, of, modules, x, y, 4, step={"shift": shift, "twice": True, "table": table}, **options))
        assert_same(found[1], found[0])


class Sideways(nn.Module):
    """The batch is the second dimension, and there are two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x)
        return out, out.sum(0)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B"])
def test_other_batch_dimensions(name: str) -> None:
    x, y = torch.randn(3, 12, 6), torch.randn(12, 6)

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output[1], target) + output[0].square().mean()

    modules, found = [Sideways()], []
    for package in BOTH:
        spec = package.microbatch.TensorChunkSpec
        found.append(
            run(package, name, modules, x, y, 4, loss_fn=loss_fn, args_chunk_spec=(spec(1),), output_merge_spec=(spec(1), spec(0)))
        )
    assert_same(found[1], found[0], exact=True)
    assert found[1].output[0].shape == (3, 12, 6)


def test_loss_kwargs() -> None:
    def loss_fn(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
        return weight * nn.functional.mse_loss(output, target)

    modules, (x, y) = blocks(2), data()
    for weight in (1.0, 0.25):
        step = {"loss_kwargs": {"weight": weight}}
        theirs, mine = (run(package, "ScheduleInterleaved1F1B", modules, x, y, 4, loss_fn=loss_fn, step=step) for package in BOTH)
        assert_same(mine, theirs, exact=True)


# Custom functions and orders ------------------------------------------------------------------------------------------


def overlapped(package: Package, seen: list[str]) -> Any:
    """Do by hand what torch does for an overlapped action."""

    def function(action: Any, ctx: Any) -> None:
        runner, held = ctx.schedule_ref, {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
        forward, backward = action.sub_actions
        one, two = held[forward.stage_index], held[backward.stage_index]
        at, back = forward.microbatch_index, backward.microbatch_index
        output = one.forward_one_chunk(at, ctx.arg_mbs[at], ctx.kwarg_mbs[at])
        runner._maybe_compute_loss(one, output, ctx.target_mbs, at)
        if one.stage_index + 1 in held:
            held[one.stage_index + 1].set_local_fwd_input(output, at)
        loss = runner._maybe_get_loss(two, back)
        runner.backward_counter[two.stage_index] += 1
        last = runner.backward_counter[two.stage_index] == runner._n_microbatches
        two.backward_one_chunk(back, loss=loss, full_backward=True, last_backward=last)
        if two.stage_index - 1 in held:
            held[two.stage_index - 1].set_local_bwd_input(two.get_local_bwd_output(back), back)
        seen.append(str(action))

    return function


def test_a_custom_function_for_overlaps() -> None:
    modules, (x, y) = blocks(2), data()
    found = []
    for package in BOTH:
        held, losses, seen = copy.deepcopy(modules), list[Tensor](), list[str]()
        made = schedule(package, "ScheduleDualPipeV", stages(package, held), 6, loss_fn=nn.functional.mse_loss)
        made.register_custom_function(package.schedules.OVERLAP_F_B, overlapped(package, seen))
        out = made.step(x, target=y, losses=losses)
        assert seen == [str(a) for a in made.pipeline_order[0] if a.sub_actions is not None]
        found.append(Outcome(out, losses, grads(held)))
    assert_same(found[1], found[0])
    assert_same(found[1], loop(modules, x, y, 6))


@pytest.mark.parametrize("kind", ["FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "UNSHARD", "RESHARD", "REDUCE_GRAD"])
def test_custom_functions_replace_every_kind(kind: str) -> None:
    seen: dict[Any, list[str]] = {}
    for package in BOTH:
        name = "ScheduleInterleavedZeroBubble" if "BACKWARD_" in kind else "ScheduleInterleaved1F1B"
        made = schedule(package, name, stages(package, blocks(2)), 2, loss_fn=nn.functional.mse_loss)
        seen[package] = []

        def note(action: Any, ctx: Any, seen: list[str] = seen[package]) -> None:
            seen.append(str(action))
            assert len(ctx.arg_mbs) == len(ctx.kwarg_mbs) == len(ctx.target_mbs) == 2
            if action.computation_type == "F":  # the rest of the step needs its results
                stage = next(s for s in ctx.schedule_ref._stages if s.stage_index == action.stage_index)
                out = stage.forward_one_chunk(action.microbatch_index, ctx.arg_mbs[action.microbatch_index], {})
                ctx.schedule_ref._maybe_compute_loss(stage, out, ctx.target_mbs, action.microbatch_index)
                for other in ctx.schedule_ref._stages:
                    if other.stage_index == stage.stage_index + 1:
                        other.set_local_fwd_input(out, action.microbatch_index)
            elif action.computation_type in ("B", "I"):
                stage = next(s for s in ctx.schedule_ref._stages if s.stage_index == action.stage_index)
                loss = ctx.schedule_ref._maybe_get_loss(stage, action.microbatch_index)
                stage.backward_one_chunk(action.microbatch_index, loss=loss, full_backward=action.computation_type == "B")
                for other in ctx.schedule_ref._stages:
                    if other.stage_index == stage.stage_index - 1:
                        other.set_local_bwd_input(stage.get_local_bwd_output(action.microbatch_index), action.microbatch_index)

        made.register_custom_function(getattr(package.schedules, kind), note)
        x, y = data(4)
        made.step(x, target=y)
    assert seen[OURS] == seen[TORCH]
    assert seen[OURS]


def test_registering_custom_functions(caplog: pytest.LogCaptureFixture) -> None:
    for package in BOTH:
        made = schedule(package, "ScheduleInterleaved1F1B", stages(package, blocks(2)), 2)
        with pytest.raises(ValueError, match="Invalid computation type"):
            made.register_custom_function(package.schedules.SEND_F, lambda action, ctx: None)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                made.register_custom_function(package.schedules.FORWARD, lambda action, ctx: None)
        assert "already registered" in caplog.text


def test_split_backwards_not_announced() -> None:
    """A custom function splits a full backward of the order: the split is found in the graph."""
    modules, (x, y) = blocks(2), data()
    held, losses = copy.deepcopy(modules), list[Tensor]()
    made = schedule(OURS, "ScheduleInterleaved1F1B", stages(OURS, held), 4, loss_fn=nn.functional.mse_loss)

    def function(action: Any, ctx: Any) -> None:
        by_index = {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
        stage, at = by_index[action.stage_index], action.microbatch_index
        stage.backward_one_chunk(at, loss=ctx.schedule_ref._maybe_get_loss(stage, at), full_backward=False)
        before = grads([stage.submod])
        if stage.stage_index > 0:
            by_index[stage.stage_index - 1].set_local_bwd_input(stage.get_local_bwd_output(at), at)
        stage.backward_weight_one_chunk(at)
        assert at > 0 or before == [None] * 4

    made.register_custom_function(OURS.schedules.FULL_BACKWARD, function)
    out = made.step(x, target=y, losses=losses)
    assert_same(Outcome(out, losses, grads(held)), loop(modules, x, y, 4))


def test_handwritten_orders() -> None:
    modules, (x, y) = blocks(2), data()
    rows = "0F0 1F0 0F1 1F1 1I1 1I0 0I0 1W0 0I1 0W0 1W1 0W1"
    for package in BOTH:
        held, losses = copy.deepcopy(modules), list[Tensor]()
        made = package.schedules._PipelineScheduleRuntime(stages(package, held), 2, loss_fn=nn.functional.mse_loss, scale_grads=False)
        made._prepare_schedule_with_comms(parse(package, rows), format="compute_comms")
        out = made.step(x, target=y, losses=losses)
        assert_same(Outcome(out, losses, grads(held)), loop(modules, x, y, 2, scale=False))


def test_an_order_may_change_between_steps() -> None:
    modules, (x, y) = blocks(2), data()
    held = copy.deepcopy(modules)
    made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, held), 2, loss_fn=nn.functional.mse_loss)
    for row in (
        "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD",
        "0F1 0F0 1F0 1F1 1B1 0B1 1I0 0I0 1W0 0W0 0REDUCE_GRAD 1REDUCE_GRAD",
    ):
        made.pipeline_order_with_comms = parse(OURS, row)
        for module in held:
            module.zero_grad()
        made.step(x, target=y)
        assert_same(grads(held), loop(modules, x, y, 2).grads)


def test_mixing_stages_and_schedules_of_both_packages() -> None:
    modules, (x, y) = blocks(2), data()
    wanted = loop(modules, x, y, 4)
    for of_stages, of_schedules in ((TORCH, OURS), (OURS, TORCH)):
        for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
            held, losses = copy.deepcopy(modules), list[Tensor]()
            made = schedule(of_schedules, name, stages(of_stages, held), 4, loss_fn=nn.functional.mse_loss)
            out = made.step(x, target=y, losses=losses)
            assert_same(Outcome(out, losses, grads(held)), wanted)


# Errors ---------------------------------------------------------------------------------------------------------------


def attempts(package: Package) -> dict[str, Any]:
    """Functions that fail, by what goes wrong."""
    modules, (x, y) = blocks(2), data()
    made = schedule(package, "ScheduleInterleaved1F1B", stages(package, modules), 4, loss_fn=nn.functional.mse_loss)

    def without_gradients() -> None:
        with torch.no_grad():
            made.step(x, target=y)

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("broken")

    known = stages(package, [Broken()], input_args=x[:3], output_args=x[:3])  # so that torch needs no extra forward
    broken = schedule(package, "ScheduleGPipe", known, 4, loss_fn=nn.functional.mse_loss)
    stage = stages(package, blocks(1), [0], 2)[0]
    stage.has_backward = True
    return {
        "no_grad": without_gradients,
        "losses": lambda: made.step(x, target=y, losses=()),
        "short": lambda: made.step(x[:3], target=y[:3]),
        "target": lambda: made.step(x, target=y[:3]),
        "args": lambda: made._step_microbatches((), None),
        "number": lambda: made._step_microbatches([(x,)]),
        "broken": lambda: broken.step(x, target=y),
        "index": lambda: package.top.PipelineStage(modules[0], 2, 2, torch.device("cpu")),
        "weight": lambda: stage.backward_weight_one_chunk(0),
        "chunks": lambda: stage.backward_one_chunk(0),
        "loss": lambda: schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 4, loss_fn=lambda a, b: (a - b) ** 2).step(
            x, target=y
        ),
    }


@pytest.mark.parametrize("what", ["no_grad", "losses", "short", "target", "args", "number", "broken", "index", "weight", "chunks", "loss"])
def test_errors_equal_torch(what: str) -> None:
    caught = []
    for package in BOTH:
        with pytest.raises(Exception, match=r".") as error:
            attempts(package)[what]()
        caught.append(error)
    assert type(caught[1].value) is type(caught[0].value)
    assert type(caught[1].value.__cause__) is type(caught[0].value.__cause__)


def test_an_error_names_the_action(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="failed to run forward") as error:
        attempts(OURS)["broken"]()
    assert "in action 0F0, step 0" in error.value.__notes__[0]


def test_a_removed_option_warns(caplog: pytest.LogCaptureFixture) -> None:
    for package in BOTH:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            package.schedules.PipelineScheduleMulti(stages(package, blocks(2)), 2, use_full_backward=True)
        assert "no longer supported" in caplog.text


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_are_not_split(name: str) -> None:
    for package in BOTH:
        compiled = [torch.compile(module) for module in blocks(2)]
        with pytest.raises(RuntimeError, match=r"torch\.compile"):
            schedule(package, name, stages(package, compiled), 4)


def test_names_in_the_profiler() -> None:
    modules, (x, y) = blocks(2), data()
    for package in BOTH:
        made = schedule(package, "ScheduleDualPipeV", stages(package, copy.deepcopy(modules)), 4, loss_fn=nn.functional.mse_loss)
        made.step(x, target=y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            made.step(x, target=y)
        names = {event.name for event in profile.events()}
        assert {"PP:0F0", "PP:(1F1;0B0)OVERLAP_F_B", "PP:0W3"} <= names


def test_dw_builder() -> None:
    """`dw_builder`, the user's own backward for the weights, is called once per microbatch, in full and split backwards."""
    for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        calls = []
        for package in BOTH:
            count = [0]

            def builder(count: list[int] = count) -> Any:
                def runner() -> None:
                    count[0] += 1

                return runner

            x, y = data()
            made = schedule(package, name, stages(package, blocks(2), dw_builder=builder), 4, loss_fn=nn.functional.mse_loss)
            made.step(x, target=y)
            calls.append(count[0])
        assert calls[1] == calls[0] == 8


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((torch.ones(4, 6),), {"foo": 1})])
def test_wrong_arguments_of_a_module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The error has both of torch's types: that of the first step, raised by its extra forward, and that of later steps."""
    for package in BOTH:
        made = schedule(package, "ScheduleGPipe", stages(package, [nn.Linear(6, 6)]), 2, loss_fn=nn.functional.mse_loss)
        with pytest.raises(TypeError, match="argument") as error:
            made.step(*args, target=torch.ones(4, 6), **kwargs)
        assert isinstance(made, TORCH.schedules._PipelineSchedule)
    assert isinstance(error.value, RuntimeError)
