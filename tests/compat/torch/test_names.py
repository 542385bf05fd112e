"""Every name that programs import exists, with torch's parameters."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import penstock.compat.torch as ours
from compat.torch.both import BOTH, LOOPED, MODULES, ON_A_V, OURS, SINGLE, TORCH, VERSION, mock_stages
from compat.torch.test_signatures import compare
from penstock.ir.placement import Placement

FUNCTIONS = {
    "schedules": [
        "_add_reduce_grad",
        "_add_send_recv",
        "_add_unshard_reshard",
        "_batch_p2p",
        "_check_torch_compile_compatibility",
        "_defer_recv_ops",
        "_dump_chrometrace",
        "_format_pipeline_order",
        "_get_1f1b_rank_ops",
        "_get_profiler_function_name",
        "_get_warmup_ops",
        "_merge_bw",
        "_requires_reduce_grad",
        "_simulate_comms_compute",
        "_sorted_batch_p2p",
        "_validate_schedule",
        "_wait_batch_p2p",
        "get_schedule_class",
    ],
    "microbatch": ["_split_tensor", "merge_chunks", "split_args_kwargs_into_chunks"],
    "stage": ["build_stage"],
    "_IR": ["pipeline", "pipe_split"],
    "_backward": [
        "construct_reverse_graph",
        "get_param_groups",
        "reverse_closure",
        "stage_backward",
        "stage_backward_input",
        "stage_backward_weight",
    ],
    "_utils": ["generate_rank_to_stage_mapping", "generate_stage_to_rank_mapping"],
    "_schedule_visualizer": ["get_schedule_ops", "visualize_schedule"],
}
METHODS = {
    "schedules": {
        "_PipelineSchedule": [
            "__init__",
            "_check_inputs",
            "_compute_loss",
            "_maybe_compute_loss",
            "_maybe_get_loss",
            "_split_inputs",
            "eval",
        ],
        "PipelineScheduleSingle": ["__init__", "step", "_initialize_stage", "_step_microbatches", "_get_pipeline_order"],
        "PipelineScheduleMulti": ["__init__", "step", "_load_csv", "_dump_csv", "_validate_and_set_stage_mapping", "_initialize_stages"],
        "_PipelineScheduleRuntime": ["_load_csv", "_dump_csv", "_prepare_schedule_with_comms", "register_custom_function", "_simulate"],
        "_PipelineContext": ["__init__"],
        "_ScheduleForwardOnly": ["__init__"],
        "ScheduleInterleavedZeroBubble": ["_add_bubbles_to_actions", "_calculate_single_rank_operations"],
        **{name: ["__init__", "step", "eval", "_step_microbatches"] for name in [*LOOPED, *ON_A_V, *SINGLE]},
    },
    "stage": {
        "PipelineStage": [
            "__init__",
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
            "get_fwd_recv_ops",
            "get_fwd_send_ops",
            "get_bwd_recv_ops",
            "get_bwd_send_ops",
            "_prepare_forward_infra",
            "_prepare_backward_infra",
            "set_local_fwd_input",
            "set_local_bwd_input",
            "scale_grads",
            "perform_reduce_grad",
        ],
        "_RecvInfo": ["__init__"],
        "_PipelineStageBase": ["_prepare_forward_infra", "_prepare_backward_infra"],
    },
}


def attribute(package: Any, module: str, name: str) -> Any:
    return getattr(getattr(package, module), name)


@pytest.mark.parametrize("module", ["", *MODULES])
def test_public_names(module: str) -> None:
    theirs, mine = (importlib.import_module(f"{package.name}.{module}".rstrip(".")) for package in BOTH)
    assert set(getattr(theirs, "__all__", ())) <= set(dir(mine))


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in FUNCTIONS.items() for name in names])
def test_function_parameters(module: str, name: str) -> None:
    if not hasattr(getattr(TORCH, module), name):
        pytest.skip(f"torch {VERSION} has no {name}")
    compare(name, attribute(OURS, module, name), attribute(TORCH, module, name))


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [(module, name, method) for module, classes in METHODS.items() for name, methods in classes.items() for method in methods],
)
def test_method_parameters(module: str, name: str, method: str) -> None:
    theirs, mine = (getattr(attribute(package, module, name), method) for package in (TORCH, OURS))
    compare(f"{name}.{method}", mine, theirs)


def test_values_of_computation_types() -> None:
    theirs, mine = (package.schedules._ComputationType for package in BOTH)
    newer = {} if VERSION >= (2, 15) else {name: name for name in ("WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD")}
    assert {each.name: each.value for each in mine} == {**{each.name: each.value for each in theirs}, **newer}
    for letter in "FBIW":
        assert attribute(OURS, "schedules", letter) == attribute(TORCH, "schedules", letter)


def test_all_names_of_torch_exist() -> None:
    """Functions, classes and constants, also private ones, that torch's modules define."""
    for module in ("schedules", "microbatch", "_backward", "_utils", "_IR", "_schedule_visualizer", "stage"):
        theirs, mine = getattr(TORCH, module), getattr(OURS, module)
        own = {name for name, value in vars(theirs).items() if getattr(value, "__module__", None) == theirs.__name__}
        assert {name for name in own if not hasattr(mine, name)} == set(), module
        for name in own:
            if isinstance(getattr(theirs, name), type):
                methods = {each for each, value in vars(getattr(theirs, name)).items() if callable(value) or isinstance(value, property)}
                assert {each for each in methods if not hasattr(getattr(mine, name), each)} == set(), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = OURS._IR.no_such_name
    assert importlib.import_module("penstock.compat.torch._unflatten")._outline_submodules


def test_classes_by_name() -> None:
    for name in ("1F1B", "1f1b", "Interleaved1F1B", "GPIPE", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        theirs, mine = (package.schedules.get_schedule_class(name) for package in BOTH)
        assert mine is getattr(OURS.schedules, theirs.__name__)
    for name in ("PipelineScheduleSingle", "pipelineschedulemulti"):
        assert issubclass(OURS.schedules.get_schedule_class(name), OURS.schedules._PipelineSchedule)
    with pytest.raises(ValueError, match="ScheduleThatDoesNotExist"):
        OURS.schedules.get_schedule_class("ScheduleThatDoesNotExist")
    with pytest.raises(ValueError, match="did you mean 'GPipe'"):
        OURS.schedules.get_schedule_class("GPip")


def test_additional_names() -> None:
    newer = {"PipelineActivationLiveness", "PipelineStageInfo", "analyze_pipeline_activation_liveness"}
    assert set(ours.__all__) - set(TORCH.top.__all__) == {"_ScheduleForwardOnly", "as_torch"} | (newer if VERSION < (2, 15) else set())


def test_constructors_accept_mock_stages() -> None:
    """Mock stages set only a few attributes."""
    for name in [*LOOPED, *ON_A_V, *SINGLE, "_ScheduleForwardOnly", "_PipelineScheduleRuntime"]:
        stages = mock_stages(2, 1 if name in SINGLE or name == "_ScheduleForwardOnly" else 2)
        made = getattr(OURS.schedules, name)(stages[0] if len(stages) == 1 else stages, 4)
        assert made._n_microbatches == 4


@pytest.mark.parametrize("style", ["loop", "v"])
def test_stage_to_rank_mappings_are_our_placements(style: str) -> None:
    for ranks in range(1, 6):
        for chunks in (1, 2, 4):
            placement = Placement.wave(ranks, chunks // 2) if style == "v" and chunks > 1 else Placement.looped(ranks, chunks)
            ours = dict(enumerate(placement.copies[0]))
            assert OURS._utils.generate_stage_to_rank_mapping(ranks, ranks * chunks, style) == ours
            stages = {rank: [stage for stage, owner in ours.items() if owner == rank] for rank in range(ranks)}
            assert OURS._utils.generate_rank_to_stage_mapping(ranks, ranks * chunks, style) == stages
