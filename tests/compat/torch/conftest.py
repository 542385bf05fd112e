"""One thread for torch, so that sums are the same every time, and a process group of one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from compat.torch.both import VERSION
from threads import one_thread  # noqa: F401 - a fixture

FAILS_BEFORE: dict[tuple[int, int], dict[str, str]] = {
    (2, 13): {
        r"test_deferred_receives\[.*-torch\]": "torch has no defer_pp_recv",
        r"test_errors_equal_torch\[(short|target)\]": "torch raises other types of errors",
        r"test_loss_kwargs(\[.*-torch\])?": "torch has no loss_kwargs",
        r"test_missing_gradients_are_sent_as_zeros": "torch refuses them",
        r"test_move_placeholders_to_front\[.*\]": "torch has no such function",
        r"test_non_adjacent_stages_are_refused\[torch\]": "torch accepts them",
        r"test_schedule_ops\[.*-options2\]": "torch has no defer_pp_recv",
    },
    (2, 12): {
        r"test_backward_without_has_backward_does_nothing\[.*-torch\]": "torch checks inputs of a stage that was never set up",
        r"test_chunks_of_a_leaf_keep_their_gradients": "torch loses them",
        r"test_dtensors\[.*\]": "torch does not split DTensors",
        r"test_flattened_arguments\[.*\]": "torch's flatten_args, which ours passes on, has no detach",
        r"test_log_lines": "torch itself fails in the program that logs: gloo refuses its message from a rank to itself",
        r"test_messages_of_several_groups_in_one_batch\[torch\]": "torch sends every batch as one",
        r"test_other_batch_dimensions\[.*\]": "torch refuses inputs that are not contiguous",
        r"test_overridden_preparations\[.*-torch\]": "torch passes no has_backward and no loss function",
        r"test_recv_info\[.*\]": "torch keeps an example of a received tensor in place of its description",
        r"test_runtime_validation": "torch does not compare tensors with their descriptions",
        r"test_sharded_activations\[.*\]": "torch has no DTensors between stages",
        r"test_stage_metadata_after_a_step(\[.*\])?": "torch has no descriptions of tensors",
        r"test_tensor_metadata\[.*\]": "torch has no descriptions of tensors",
        r"test_wrong_static_shapes": "torch has no descriptions of tensors; ours takes the given shapes as examples",
    },
}
"""What torch lacked or did otherwise before a version, by the names of the tests that show it. They must fail there, so that the list
stays true."""


def pytest_configure(config: pytest.Config) -> None:
    if VERSION < (2, 13):  # torch's own stages read the gradients of inputs that are not leaves
        config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events")
        config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    expected = {
        re.compile(name): f"before torch {since[0]}.{since[1]}: {reason}"
        for since, names in FAILS_BEFORE.items()
        for name, reason in names.items()
        if since > VERSION
    }
    for item in items:
        if "compat/torch" in item.path.as_posix():
            for name, reason in expected.items():
                if name.fullmatch(item.name):
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, which holds all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
