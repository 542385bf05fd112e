"""The private names of torch that the package uses: each has one home and exists in the installed torch; its absence is reported."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import autograd, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule

from penstock.errors import PenstockError, TorchVersionError
from penstock.runtime.torch_internals.lookup import check_private, find_private
from runtime.torch_internals.private_torch_names import SOURCE, find_attributes, find_definitions, find_dotted, read_texts, scan

DOTTED, ATTRIBUTES = scan()
DROP_IN = "compat/torch/"
"""The drop-in for `torch.distributed.pipelining` has that package's own names in it, which `tests/compat/torch` compares."""
PIPELINING = "torch.distributed.pipelining."

CODE = """
import torch
import torch.distributed as dist
from torch import _C as core
from torch.utils._pytree import tree_map
def use(x, self):
    core._first(dist._second.third, torch.ops._fourth, torch.add)
    x._fifth, self._own, getattr(x, "_sixth", None), x._replace()
    find_private("torch._C._seventh")(attrgetter("_eighth")(x), check_private(x, "_ninth", *("_tenth", "_own")))
    check_names("torch._C._eleventh", "torch.add", *(f"torch._C.{name}" for name in x))
"""


def test_the_scan_follows_aliases() -> None:
    names = {"torch._C", "torch._C._first", "torch.distributed._second.third", "torch.ops._fourth", "torch.utils._pytree.tree_map"}
    assert set(find_dotted(ast.parse(CODE))) == names | {"torch._C._seventh", "torch._C._eleventh"}
    found = set(find_attributes(ast.parse(CODE), own={"_own", "_replace"}))
    assert found == {"_fifth", "_sixth", "_eighth", "_ninth", "_tenth"}


def test_the_scan_finds_names_that_are_surely_used() -> None:
    assert "torch.utils._pytree.tree_map" in DOTTED
    assert "torch._C._set_grad_enabled" in DOTTED
    assert {"_is_view", "_version", "_all_gather_result"} <= set(ATTRIBUTES)


OTHER_VERSIONS = (
    set()
    if hasattr(pipelining._utils, "InferenceMode")
    else {name for name, files in DOTTED.items() if files == ["compat/torch/installed.py"] and name.startswith(f"{PIPELINING}_utils.")}
)
"""Names that the drop-in looks up from torch 2.12 on."""


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


@pytest.mark.parametrize("name", [name for name in DOTTED if name not in OTHER_VERSIONS])
def test_the_name_exists(name: str) -> None:
    assert resolve(name) is not None


# Attributes of objects ------------------------------------------------------------------------------------------------

SHARDED = {
    "FSDPModule": ("_get_fsdp_state",),
    "state": ("_state_ctx", "_is_root", "_root_post_backward_final_callback", "_comm_ctx", "_training_state"),
    "context": ("is_last_backward",),
    "group": ("_training_state", "_all_gather_result", "_wait_for_post_backward", "post_backward", "fsdp_params", "mesh_info", "device"),
    "mesh_info": ("mesh", "shard_mesh_size", "shard_process_group"),
    "param": ("sharded_param", "unsharded_accumulated_grad", "_unsharded_param", "mp_policy", "reduce_dtype"),
}
"""Attributes of `fully_shard`'s objects, which exist only in a process group. Not all internals of torch have an underscore."""
SHARDED_SINCE = {
    "state": {"_reset_iter_state": (2, 13)},
    "context": {"manual_backward_finalization_active": (2, 15)},
    "mesh_info": {"reduce_scatter_process_group": (2, 13)},
}
"""Those that not every version has, with the version that introduced them; the library has a fallback for each."""
SHARDED_BEFORE = {"iter_forward_root", "post_backward_final_callback_queued"}
"""Attributes of a context that are set only before `_reset_iter_state` existed."""
ON_A_REPLICATED_MESH = {"replicate_process_group"}
OF_OBJECTS: dict[str, Any] = {
    **dict.fromkeys(("_is_view", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"), torch.zeros(1)),
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
OF_OTHER_PIPELINING = {"_ForwardChunkState", "_RootArgPlaceholder", "_get_init_p2p_neighbors_ops", "_stage_meta", "_user_meta"} | {
    *("_compute_outputs", "_post_metadata_inference_cleanup", "_validate_inferred_metadata", "_validate_stage_tensors")
}
"""Attributes that only some versions of torch's pipelining package define; `compat/torch/installed.py` tells them apart."""


def find_pipelining_names() -> set[str]:
    """Return the private names that torch's pipelining package itself defines."""
    sources = Path(pipelining.__file__).parent.glob("*.py")
    return {name for path in sources for name in find_definitions(ast.parse(path.read_text(encoding="utf-8")))}


@pytest.mark.parametrize(
    "name", [name for name, files in ATTRIBUTES.items() if any(not file.startswith("integrations/") for file in files)]
)
def test_the_attribute_exists_or_is_checked_elsewhere(name: str) -> None:
    """Adapters are left out: private names of other packages are checked beside them, in `tests/integrations`."""
    if name in OF_OBJECTS:
        assert hasattr(OF_OBJECTS[name], name)
    elif all(file.startswith(DROP_IN) for file in ATTRIBUTES[name]):
        assert name in find_pipelining_names() | OF_OTHER_PIPELINING
    else:
        sharded = {each for names in (*SHARDED.values(), *SHARDED_SINCE.values()) for each in names}
        assert name in sharded | EITHER | NOT_ON_A_CPU | NOT_OF_TORCH


def test_internals_without_an_underscore_are_checked_too() -> None:
    """Of `fully_shard`'s objects: everything that `fsdp.py` reads from one of them or checks is in the tables above."""
    tree = ast.parse((SOURCE / "runtime/parallel/fsdp.py").read_text(encoding="utf-8"))
    known = {name for names in (*SHARDED.values(), *SHARDED_SINCE.values()) for name in names} | EITHER | SHARDED_BEFORE
    known |= ON_A_REPLICATED_MESH
    assert set(read_texts(tree, "check_private")) <= known
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {"group", "param", "state", "context"}
    assert {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in owners} <= known
    inner = {"mesh_info", "_state_ctx"}
    assert {node.attr for node in attributes if isinstance(node.value, ast.Attribute) and node.value.attr in inner} <= known


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
held = dict(FSDPModule=model, state=state, context=state._state_ctx, group=group)
held.update(mesh_info=group.mesh_info, param=group.fsdp_params[0])
for kind, names in {SHARDED!r}.items():
    for name in names:
        assert hasattr(held[kind], name), (kind, name)
version = tuple(map(int, torch.__version__.split(".")[:2]))
for kind, names in {SHARDED_SINCE!r}.items():
    for name, since in names.items():
        assert hasattr(held[kind], name) == (version >= since), (kind, name)
if not hasattr(state, "_reset_iter_state"):
    assert all(hasattr(state._state_ctx, name) for name in {SHARDED_BEFORE!r})
dist.destroy_process_group()
print("all")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "all", done.stderr


# Homes and absence ----------------------------------------------------------------------------------------------------


def test_each_name_has_one_home() -> None:
    """Names of torch's pipelining package may be all over the drop-in, which stands in for it, and nowhere else."""
    own = find_pipelining_names() | OF_OTHER_PIPELINING
    for name, files in DOTTED.items():
        if name.startswith(PIPELINING):
            assert all(file.startswith(DROP_IN) for file in files), name
        else:
            assert len(files) == 1, (name, files)
    for name, files in ATTRIBUTES.items():
        assert len(files) == 1 or (name in own and all(file.startswith(DROP_IN) for file in files)), (name, files)


def test_names_of_the_pipelining_package_are_checked_before_they_are_imported() -> None:
    checked = {name for path in (SOURCE / DROP_IN).glob("*.py") for name in read_texts(ast.parse(path.read_text("utf-8")), "check_names")}
    for name in DOTTED:
        if name.startswith(PIPELINING):
            assert any(other == name or other.startswith(f"{name}.") for other in checked), name


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


@pytest.mark.slow
def test_importing_names_what_is_missing() -> None:
    """In copies of one process that has imported torch, each of which deletes a name first."""
    cases = [
        ("penstock.runtime", "torch._C._current_graph_task_id"),
        ("penstock.runtime", "torch.utils._pytree.tree_map_only"),
        ("penstock.runtime", "torch.autograd._profiler_enabled"),
        ("penstock.runtime", "torch.nn.modules.batchnorm._NormBase"),
        ("penstock.compat.torch", "torch._dynamo.OptimizedModule"),
        ("penstock.compat.torch", "torch.nn.parallel.distributed._find_tensors"),
        ("penstock.compat.torch", f"{PIPELINING}stage._normalize_model_output_as_tuple"),
        ("penstock.compat.torch", f"{PIPELINING}stage._PipelineStageBase._check_chunk_id"),
        ("penstock.compat.torch", f"{PIPELINING}_IR._modify_graph_op_device"),
    ]
    script = f"""
import importlib, os, pkgutil
import torch, torch._dynamo, torch.distributed.pipelining
for package, name in {cases!r}:
    if os.fork() == 0:
        path, last = name.rsplit(".", 1)
        delattr(pkgutil.resolve_name(path), last)
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stdout + done.stderr
    for line, (_, name) in zip(lines, cases, strict=True):
        assert line.startswith(f"TorchVersionError penstock needs {name}, which torch {torch.__version__} does not have")
