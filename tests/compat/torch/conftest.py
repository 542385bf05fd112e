"""One thread for torch, so that sums are the same every time, and a process group of one."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from compat.torch.both import VERSION
from threads import one_thread  # noqa: F401 - a fixture

DESCRIBES_2_13 = {
    "test_errors_equal_torch": "torch raises other types of errors",
    "test_stage_metadata_after_a_step": "stages have no metadata",
    "test_log_lines": "torch itself fails in the program that logs",
    "test_chunks_of_a_leaf_keep_their_gradients": "torch loses them",
    "test_dtensors": "torch does not split DTensors",
}
"""Comparisons with torch that only hold from 2.13 on, each with the reason."""
DESCRIBES_2_12 = {
    "test_recv_info": "torch keeps an example of a received tensor in place of its description",
    "test_tensor_metadata": "torch has no descriptions of tensors",
    "test_runtime_validation": "torch does not compare tensors with their descriptions",
}
"""The same from 2.12 on."""


def pytest_configure(config: pytest.Config) -> None:
    if VERSION < (2, 13):  # torch's own stages read the gradients of inputs that are not leaves
        config.addinivalue_line("filterwarnings", "ignore:Warning. Profiler clears events")
        config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of either package's behaviour on ours alone before torch 2.13, which they describe."""
    for item in items:
        if VERSION < (2, 13) and "compat" in str(item.path) and item.name.endswith("torch]"):
            item.add_marker(pytest.mark.skip(reason="describes torch 2.13 and later"))
        name = item.name.partition("[")[0]
        for since, reasons in (((2, 13), DESCRIBES_2_13), ((2, 12), DESCRIBES_2_12)):
            if since > VERSION and "compat" in str(item.path) and name in reasons:
                item.add_marker(pytest.mark.skip(reason=reasons[name]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a comparison with torch before 2.13 if torch itself fails or lacks what is compared, and ours has no part in the failure."""
    try:
        yield
    except Exception as error:
        if VERSION < (2, 13) and _fails_in_torch(error):
            pytest.skip(f"torch {VERSION[0]}.{VERSION[1]} itself fails: {error}")
        raise


_LACKING = re.compile(
    r"module 'torch\.distributed\.pipelining\.\w+' has no attribute|"
    r"unexpected keyword argument '(get_mesh|input_grads|output_grads|detach|defer_pp_recv)'"
)
"""Names and parameters that torch 2.11 lacks; those among them that ours adds are compared in `test_signatures`."""


def _fails_in_torch(error: Exception) -> bool:
    if isinstance(error, AttributeError | TypeError) and _LACKING.search(str(error)):
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files += re.findall(r'File "([^"]+)"', "".join(traceback.format_exception_only(error)))  # of a worker, in a note
    return any("torch/distributed/pipelining" in file for file in files) and not any("penstock/compat" in file for file in files)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, which holds all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
