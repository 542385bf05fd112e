"""The private names of torch that the package uses: each has one home and exists in the installed torch; its absence is reported."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import autograd, nn
from torch.distributed.fsdp import FSDPModule

from penstock.errors import PenstockError, TorchVersionError
from penstock.runtime.torch_internals.lookup import check_private, find_private
from private_torch_names import find_attributes, find_dotted, scan

DOTTED, ATTRIBUTES = scan()
DROP_IN = "compat/torch/"
"""The drop-in for PyTorch's pipelining has torch's own names in it, and tests of its own."""

CODE = """
import torch
import torch.distributed as dist
from torch import _C as core
from torch.utils._pytree import tree_map
def use(x, self):
    core._first(dist._second.third, torch.ops._fourth, torch.add)
    x._fifth, self._own, getattr(x, "_sixth", None), x._replace()
    find_private("torch._C._seventh")(attrgetter("_eighth")(x), check_private(x, "_ninth", *("_tenth", "_own")))
"""


def test_the_scan_follows_aliases() -> None:
    names = {"torch._C", "torch._C._first", "torch.distributed._second.third", "torch.ops._fourth", "torch.utils._pytree.tree_map"}
    assert set(find_dotted(ast.parse(CODE))) == names | {"torch._C._seventh"}
    found = set(find_attributes(ast.parse(CODE), own={"_own", "_replace"}))
    assert found == {"_fifth", "_sixth", "_eighth", "_ninth", "_tenth"}


def test_the_scan_finds_names_that_are_surely_used() -> None:
    assert "torch.utils._pytree.tree_map" in DOTTED
    assert "torch._C._set_grad_enabled" in DOTTED
    assert {"_is_view", "_version", "_all_gather_result"} <= set(ATTRIBUTES)


def resolve(name: str) -> Any:
    """Import the longest module in a dotted name and read the rest from it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def outside_the_drop_in(files: list[str]) -> list[str]:
    return [file for file in files if not file.startswith(DROP_IN)]


@pytest.mark.parametrize("name", [name for name, files in DOTTED.items() if outside_the_drop_in(files)])
def test_the_name_exists(name: str) -> None:
    assert resolve(name) is not None


# Attributes of objects ------------------------------------------------------------------------------------------------

SHARDED = {
    "FSDPModule": ("_get_fsdp_state",),
    "state": ("_state_ctx", "_is_root", "_root_post_backward_final_callback"),
    "group": ("_all_gather_result", "_wait_for_post_backward"),
    "parameter": ("_unsharded_param",),
}
"""Attributes of `fully_shard`'s objects, which exist only in a process group."""
OF_OBJECTS: dict[str, Any] = {
    **dict.fromkeys(("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"), torch.zeros(1)),
    **dict.fromkeys(("_values", "_nnz"), torch.eye(2).to_sparse()),
    "_cdata": torch.zeros(1).untyped_storage(),
    "_register_hook_dict": torch.zeros(1, requires_grad=True).exp().grad_fn,
    **dict.fromkeys(("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"), nn.Linear(1, 1)),
    **dict.fromkeys(("_non_persistent_buffers_set", "_compiled_call_impl"), nn.Linear(1, 1)),
    "_orig_mod": torch.compile(nn.Linear(1, 1), backend="eager"),
    "_reset_parameters": nn.MultiheadAttention(2, 1),
    **dict.fromkeys(("_lazy_init_scale_growth_tracker", "_unscale_grads_"), torch.amp.GradScaler("cpu")),
    **dict.fromkeys(("_embedding_bag_backward", "_trilinear", "_fused_rms_norm", "_fused_rms_norm_backward"), torch.ops.aten),
    "_engine_run_backward": autograd,
    "_get_fsdp_state": FSDPModule,
}
NOT_ON_A_CPU = {"_timeout"}
"""Attributes of NCCL's options; `tests/gpu` runs them, and the library checks for them."""
NOT_OF_TORCH = {"_can_record_outputs", "_is_stateful", "_attn_implementation"}
"""Attributes of transformers' models and their configurations."""
EITHER = {"_fsdp_param_group", "_fsdp_param_groups"}
"""One of these exists, according to the version."""
WITH_FALLBACK = {"_reset_iter_state"}
"""Attributes that not every version has, and that the library asks for."""


def of_torch(files: list[str]) -> list[str]:
    """Leaves out the adapters: private names of other packages are checked beside them, in `tests/integrations`."""
    return [file for file in outside_the_drop_in(files) if not file.startswith("integrations/")]


@pytest.mark.parametrize("name", [name for name, files in ATTRIBUTES.items() if of_torch(files)])
def test_the_attribute_exists_or_is_checked_elsewhere(name: str) -> None:
    if name in OF_OBJECTS:
        assert hasattr(OF_OBJECTS[name], name)
    else:
        assert name in {each for names in SHARDED.values() for each in names} | EITHER | WITH_FALLBACK | NOT_ON_A_CPU | NOT_OF_TORCH


def test_attributes_of_sharded_modules_exist() -> None:
    """In a process of its own, because it makes a process group."""
    code = f"""
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
model(torch.zeros(1, 2))
state = model._get_fsdp_state()
groups = [name for name in {sorted(EITHER)!r} if hasattr(state, name)]
assert groups, "no parameter groups"
found = getattr(state, groups[-1])
group = found[0] if groups[-1].endswith("s") else found
held = dict(FSDPModule=model, state=state, group=group, parameter=group.fsdp_params[0])
for kind, names in {SHARDED!r}.items():
    for name in names:
        assert hasattr(held[kind], name), (kind, name)
dist.destroy_process_group()
print("all")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all", done.stderr


# Homes and absence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [DOTTED, ATTRIBUTES], ids=["names", "attributes"])
def test_each_name_has_one_home(names: dict[str, list[str]]) -> None:
    homes = {name: outside_the_drop_in(files) for name, files in names.items()}
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_a_missing_name_is_reported_with_the_version() -> None:
    for name in ("torch._C._no_such_name", "torch.no_such_module.name", "torch.utils._pytree.no_such_function"):
        with pytest.raises(
            TorchVersionError, match=rf"penstock needs {name}, which torch {torch.__version__.replace('+', '.')} "
        ) as caught:
            find_private(name)
        assert isinstance(caught.value, PenstockError)
    assert find_private("torch.utils._pytree.tree_map") is resolve("torch.utils._pytree.tree_map")


def test_a_missing_attribute_is_reported_with_the_version() -> None:
    check_private(torch.zeros(1), "_version")
    with pytest.raises(TorchVersionError, match=rf"torch\.Tensor\._no_such, which torch {torch.__version__.replace('+', '.')} "):
        check_private(torch.zeros(1), "_version", "_no_such")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("del torch._C._current_graph_task_id", "torch._C._current_graph_task_id"),
        ("del torch.utils._pytree.tree_map_only", "torch.utils._pytree.tree_map_only"),
        ("del torch.autograd._profiler_enabled", "torch.autograd._profiler_enabled"),
        ("del torch.nn.modules.batchnorm._NormBase", "torch.nn.modules.batchnorm._NormBase"),
    ],
)
def test_the_runtime_names_what_is_missing_when_it_is_imported(code: str, name: str) -> None:
    script = (
        f"import torch\n{code}\ntry:\n    import penstock.runtime\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"TorchVersionError penstock needs {name}, which torch {torch.__version__} does not have"), done.stdout
