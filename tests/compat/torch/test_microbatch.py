"""Splitting and merging against the installed torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

from compat.torch.both import BOTH, OURS, TORCH, Package
from compat.torch.models import assert_same, blocks, data, loop, run

WHOLE = "whole"


@st.composite
def trees(draw: st.DrawFn, depth: int = 2) -> Any:
    """A tree of (shape, dimension to split) for tensors and (value, None) for other values."""
    if depth and draw(st.booleans()):
        kind = draw(st.sampled_from(["list", "tuple", "dict"]))
        parts = draw(st.lists(trees(depth=depth - 1), min_size=1, max_size=3))
        return {f"k{k}": part for k, part in enumerate(parts)} if kind == "dict" else tuple(parts) if kind == "tuple" else parts
    if draw(st.integers(0, 4)) == 0:
        return Leaf(draw(st.sampled_from([1, 2.5, "text"])), None)
    dim = draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(2, 7), min_size=dim + 1, max_size=3))
    return Leaf(torch.arange(float(torch.Size(shape).numel())).reshape(shape), draw(st.sampled_from([dim, dim, WHOLE])))


class Leaf:
    def __init__(self, value: Any, dim: Any) -> None:
        self.value, self.dim = value, dim

    def __repr__(self) -> str:
        return f"{self.value if not isinstance(self.value, Tensor) else list(self.value.shape)}@{self.dim}"


def mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, dict):
        return {key: mapped(part, function) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(part, function) for part in tree)
    return function(tree)


def spec_of(package: Package) -> Any:
    microbatch = package.microbatch

    def spec(leaf: Leaf) -> Any:
        return microbatch.TensorChunkSpec(leaf.dim) if isinstance(leaf.dim, int) else microbatch._Replicate()

    return spec


def same(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        return isinstance(one, Tensor) and torch.equal(one, other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    return bool(one == other)


@settings(max_examples=120)
@given(st.lists(trees(), max_size=3), st.dictionaries(st.sampled_from("abc"), trees(), max_size=2), st.integers(1, 4), st.booleans())
def test_splitting(args: list[Any], kwargs: dict[str, Any], chunks: int, specified: bool) -> None:
    splits = []
    for package in BOTH:
        options: list[Any] = [tuple(mapped(args, spec_of(package))), mapped(kwargs, spec_of(package))] if specified else [None, None]
        values = tuple(mapped(args, lambda leaf: leaf.value)), mapped(kwargs, lambda leaf: leaf.value)
        splits.append(package.microbatch.split_args_kwargs_into_chunks(*values, chunks, *options))
    assert same(splits[1], splits[0])


def _latest(_: Any, value: Any) -> Any:
    return value


@settings(max_examples=80)
@given(trees(), st.integers(1, 4))
def test_merging_undoes_splitting(tree: Any, chunks: int) -> None:
    value = mapped(tree, lambda leaf: leaf.value)
    merged = []
    for package in BOTH:
        spec = mapped(tree, spec_of(package))
        pieces, _ = package.microbatch.split_args_kwargs_into_chunks((value,), None, chunks, (spec,))

        def keep(leaf: Leaf, package: Package = package) -> Any:
            if isinstance(leaf.value, Tensor) and leaf.dim == WHOLE:  # equal, but tensors do not compare
                return package.microbatch._CustomReducer(None, _latest)
            return spec_of(package)(leaf)

        merged.append(package.microbatch.merge_chunks([piece for (piece,) in pieces], mapped(tree, keep)))
    assert same(merged[1], merged[0])
    assert same(merged[1], value)


def test_merging_by_default_and_by_reducers() -> None:
    pieces = [{"out": torch.ones(2, 3) * k, "loss": torch.tensor(float(k))} for k in range(3)]
    for package in BOTH:
        merged = package.microbatch.merge_chunks(
            pieces, {"out": package.microbatch.TensorChunkSpec(0), "loss": package.microbatch.sum_reducer}
        )
        assert merged["out"].shape == (6, 3)
        assert merged["loss"] == 3
        plain = package.microbatch.merge_chunks([(torch.ones(2), torch.zeros(1)), (torch.ones(1), torch.zeros(1))], None)
        assert [part.tolist() for part in plain] == [[1, 1, 1], [0, 0]]


def test_larger_chunks_come_first() -> None:
    for package in BOTH:
        parts = package.microbatch._split_tensor(torch.arange(10), package.microbatch.TensorChunkSpec(0), 4)
        assert [len(part) for part in parts] == [3, 3, 2, 2]


def test_chunks_of_a_leaf_keep_their_gradients() -> None:
    for package in BOTH:
        batch = torch.ones(4, requires_grad=True)
        parts = package.microbatch._split_tensor(batch, package.microbatch.TensorChunkSpec(0), 2)
        (parts[0].sum() * 3).backward()
        assert parts[0].grad.tolist() == [3, 3]
        assert batch.grad is not None
        assert batch.grad.tolist() == [3, 3, 0, 0]
        inner = package.microbatch._split_tensor(batch * 1, package.microbatch.TensorChunkSpec(0), 2)
        assert not any(part.retains_grad for part in inner)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("sharded", [False, True])
def test_debug_masks(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(3, 7)
    whole = distribute_tensor(value, init_device_mesh("cpu", (1,)), [Replicate()]) if sharded else value
    for dim in (0, 1):
        masked = []
        for package in BOTH:
            monkeypatch.setattr(package.microbatch, "_debug_mask_minibatches", True)
            spec = package.microbatch.TensorChunkSpec(dim)
            parts = list(package.microbatch._split_tensor(whole, spec, 3))
            merged = package.microbatch.merge_chunks(parts, spec)
            assert torch.equal(merged.to_local() if sharded else merged, value)
            masked.append([part.to_local() if sharded else part for part in parts])
            with pytest.raises(AssertionError, match="Expected shape"):
                package.microbatch.merge_chunks([torch.ones(2, 2), torch.ones(3, 2)], spec)
        assert same(masked[1], masked[0])
        assert torch.equal(sum(masked[1]), value)


def test_chunk_specs() -> None:
    for package in BOTH:
        spec = package.microbatch.TensorChunkSpec
        assert [each.split_dim for each in spec.from_tuple((0, 2))] == [0, 2]
        assert {name: each.split_dim for name, each in spec.from_dict({"x": 1}).items()} == {"x": 1}
        assert str(spec(1)) == "TensorChunkSpec(1)"
        assert repr(spec(1)) == f"{TORCH.name}.microbatch.TensorChunkSpec(1)"


def wrong(microbatch: Any) -> dict[str, Any]:
    """Values that cannot be split or merged."""
    x, spec = torch.ones(4, 2), microbatch.TensorChunkSpec(0)
    return {
        "small": lambda: microbatch._split_tensor(x, spec, 5),
        "spec": lambda: microbatch.split_args_kwargs_into_chunks((x,), None, 2, (3,)),
        "number": lambda: microbatch.split_args_kwargs_into_chunks((x, x), None, 2, (spec,)),
        "value": lambda: microbatch.split_args_kwargs_into_chunks(("text",), None, 2, (spec,)),
        "count": lambda: microbatch.merge_chunks([(x, x)], (spec,)),
        "unlike": lambda: microbatch.merge_chunks([1, 2], microbatch._Replicate()),
    }


@pytest.mark.parametrize("case", wrong(OURS.microbatch))
def test_errors(case: str) -> None:
    caught = []
    for package in BOTH:
        with pytest.raises((AssertionError, ValueError)) as error:
            wrong(package.microbatch)[case]()
        caught.append(type(error.value))
    assert caught[1] is caught[0]


# Tensors of other kinds -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_dtensors(placement: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.randn(7, 4)
    described = []
    for package in BOTH:
        tensor = distribute_tensor(whole, mesh, [placement])
        spec = package.microbatch.TensorChunkSpec(0)
        parts = package.microbatch._split_tensor(tensor, spec, 3)
        assert all(isinstance(part, DTensor) and part.placements == (placement,) for part in parts)
        merged = package.microbatch.merge_chunks(list(parts), spec)
        assert torch.equal(merged.full_tensor(), whole)
        described.append(
            [(part.shape, part.stride(), part.to_local()) for part in parts] + [(merged.shape, merged.stride(), merged.to_local())]
        )
        with pytest.raises(AssertionError, match="got a mix"):
            package.microbatch.merge_chunks([parts[0], whole], spec)
        other = distribute_tensor(whole, mesh, [Shard(1) if placement != Shard(1) else Shard(0)])
        with pytest.raises(AssertionError, match="placement mismatch"):
            package.microbatch.merge_chunks([parts[0], other], spec)
    for mine, theirs in zip(described[1], described[0], strict=True):
        assert mine[:2] == theirs[:2]
        assert torch.equal(mine[2], theirs[2])


def causal_in_documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (b % 2 == 0)


@pytest.mark.filterwarnings("ignore")
def test_block_masks() -> None:
    mask = create_block_mask(causal_in_documents, B=5, H=1, Q_LEN=64, KV_LEN=64, device="cpu", BLOCK_SIZE=32)
    masks = []
    for package in BOTH:
        _, kwargs = package.microbatch.split_args_kwargs_into_chunks((torch.ones(5, 2),), {"mask": mask}, 2)
        masks.append([each["mask"] for each in kwargs])
    for mine, theirs in zip(masks[1], masks[0], strict=True):
        assert torch.equal(mine.to_dense(), theirs.to_dense())
        assert mine.shape == theirs.shape
        zero = torch.zeros((), dtype=torch.int64)
        for b in range(2):
            assert mine.mask_mod(zero + b, zero, zero, zero) == theirs.mask_mod(zero + b, zero, zero, zero)
    assert torch.equal(torch.cat([part.to_dense() for part in masks[1]]), mask.to_dense())


@pytest.mark.filterwarnings("ignore")
def test_block_masks_that_hold_for_any_batch() -> None:
    mask = create_block_mask(causal_in_documents, B=None, H=None, Q_LEN=64, KV_LEN=64, device="cpu", BLOCK_SIZE=32)
    for package in BOTH:
        assert package.microbatch._split_block_mask(mask, 3) == [mask] * 3
    few = create_block_mask(causal_in_documents, B=2, H=1, Q_LEN=64, KV_LEN=64, device="cpu", BLOCK_SIZE=32)
    for package in (OURS, TORCH):
        with pytest.raises(AssertionError, match="fewer batch size"):
            package.microbatch._split_block_mask(few, 3)
        with pytest.raises(AssertionError, match="BlockMask only supports split_dim=0"):
            package.microbatch.split_args_kwargs_into_chunks((few,), None, 2, (package.microbatch.TensorChunkSpec(1),))


@pytest.mark.usefixtures("alone")
def test_chunk_specs_work_with_both_packages() -> None:
    modules, (x, y) = blocks(1), data()
    for theirs, package in ((TORCH, OURS), (OURS, TORCH)):
        spec, whole = theirs.microbatch.TensorChunkSpec, theirs.microbatch._Replicate
        split, _ = package.microbatch.split_args_kwargs_into_chunks((x, y), {}, 3, (spec(1), whole()))
        assert [tuple(a.shape) for a, _ in split] == [(12, 2)] * 3
        assert all(b is y for _, b in split)
        assert_same(package.microbatch.merge_chunks([a for a, _ in split], spec(1)), x)
        assert package.microbatch.merge_chunks([torch.tensor(2.0)] * 3, theirs.microbatch.sum_reducer) == 6
    options = {"args_chunk_spec": (TORCH.microbatch.TensorChunkSpec(0),), "output_merge_spec": TORCH.microbatch.TensorChunkSpec(0)}
    assert_same(run(OURS, "ScheduleGPipe", modules, x, y, 4, **options), loop(modules, x, y, 4))
