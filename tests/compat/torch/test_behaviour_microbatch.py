"""The behaviour that torch's own tests of splitting and merging require, on both packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from compat.torch.both import BOTH, Package
from compat.torch.models import assert_same, blocks, schedule, stages

both = pytest.mark.parametrize("package", BOTH, ids=repr)


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(128, 512), [torch.randn(128, 1), 7]), {"mask": {"y": torch.randn(128, 256)}, "scale": 2.0, "none": None}


@both
@pytest.mark.parametrize("chunks", [1, 4, 128])
def test_split_and_merge(package: Package, chunks: int) -> None:
    args, kwargs = arguments()
    pieces, named = package.microbatch.split_args_kwargs_into_chunks(args, kwargs, chunks)
    assert len(pieces) == len(named) == chunks
    assert pieces[0][0].shape == (128 // chunks, 512)
    assert all(piece[1][1] == 7 and each["scale"] == 2.0 and each["none"] is None for piece, each in zip(pieces, named, strict=True))
    merged = package.microbatch.merge_chunks([piece[0] for piece in pieces], package.microbatch.TensorChunkSpec(0))
    assert_same(merged, args[0], exact=True)
    assert_same(package.microbatch.merge_chunks([each["mask"] for each in named], None)["y"], kwargs["mask"]["y"])


@both
def test_chunk_spec_dimensions(package: Package) -> None:
    spec, whole = package.microbatch.TensorChunkSpec, package.microbatch._Replicate
    x, y = torch.randn(6, 8), torch.randn(4, 6)
    pieces, named = package.microbatch.split_args_kwargs_into_chunks((x, 5), {"y": y}, 2, (spec(1), whole()), {"y": spec(0)})
    assert [tuple(piece[0].shape) for piece in pieces] == [(6, 4)] * 2
    assert [tuple(each["y"].shape) for each in named] == [(2, 6)] * 2
    assert_same(package.microbatch.merge_chunks([piece[0] for piece in pieces], spec(1)), x)


@both
def test_chunk_specs_from_trees(package: Package) -> None:
    spec = package.microbatch.TensorChunkSpec
    assert [each.split_dim for each in spec.from_tuple((0, 1))] == [0, 1]
    assert {name: each.split_dim for name, each in spec.from_dict({"a": 0, "b": 2}).items()} == {"a": 0, "b": 2}
    assert repr(spec(1)).endswith("TensorChunkSpec(1)")
    assert str(spec(1)) == "TensorChunkSpec(1)"


@both
def test_a_schedule_splits_by_its_chunk_spec(package: Package) -> None:
    """A schedule splits by the chunk specification passed to its constructor."""
    inner = nn.Linear(6, 6)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
            out: Tensor = self.inner(x) + y.T
            return out if scale is None else out * scale

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        spec, whole = package.microbatch.TensorChunkSpec, package.microbatch._Replicate
        made = schedule(
            package,
            "ScheduleGPipe",
            stages(package, [Turned()]),
            4,
            args_chunk_spec=(spec(0), spec(1)),
            kwargs_chunk_spec={"scale": whole()},
        )
        x, y, scale = torch.randn(8, 6), torch.randn(6, 8), torch.randn(6)
        assert_same(made.step(x, y, scale=scale), (inner(x) + y.T) * scale)
    finally:
        torch.distributed.destroy_process_group()


@both
def test_reducers(package: Package) -> None:
    reducer = package.microbatch._CustomReducer(torch.tensor(1.0), lambda a, b: a * b)
    values = [torch.tensor(float(k)) for k in (2, 3, 4)]
    assert package.microbatch.merge_chunks(values, reducer) == 24
    assert package.microbatch.merge_chunks(values, package.microbatch.sum_reducer) == 9
    assert package.microbatch.merge_chunks([(values[0], 5)] * 3, (package.microbatch.sum_reducer, package.microbatch._Replicate())) == (
        6,
        5,
    )


@both
def test_no_arguments(package: Package) -> None:
    assert package.microbatch.split_args_kwargs_into_chunks((), None, 3) == ([()] * 3, [{}] * 3)
    pieces, named = package.microbatch.split_args_kwargs_into_chunks((), {"k": torch.ones(6)}, 3)
    assert pieces == [()] * 3
    assert [tuple(each["k"].shape) for each in named] == [(2,)] * 3


@both
def test_chunks_that_do_not_match_the_spec(package: Package) -> None:
    with pytest.raises(ValueError, match="did not match chunk spec"):
        package.microbatch.merge_chunks([(torch.ones(1), torch.ones(1))], (package.microbatch.TensorChunkSpec(0),))
    with pytest.raises(AssertionError):
        package.microbatch.split_args_kwargs_into_chunks((torch.ones(4),), None, 2, ())


@both
@pytest.mark.parametrize("split", [True, False])
def test_block_masks(package: Package, split: bool) -> None:
    """A mask with a batch dimension is split; one that holds for the whole batch is repeated."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q >= kv

    mask = create_block_mask(mask_mod, B=4 if split else None, H=None, Q_LEN=64, KV_LEN=64, device="cpu", BLOCK_SIZE=32)
    pieces, named = package.microbatch.split_args_kwargs_into_chunks((torch.ones(4, 2), mask), {"mask": mask}, 2)
    assert [each.kv_num_blocks.size(0) for each in (pieces[0][1], named[1]["mask"])] == [2 if split else 1] * 2
    joined = torch.cat([piece[1].to_dense() for piece in pieces]) if split else pieces[1][1].to_dense()
    assert torch.equal(joined, mask.to_dense())


@both
def test_outputs_are_merged_by_the_spec(package: Package) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:

        class Two(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                return x.T * 2, x.sum()

        spec = (package.microbatch.TensorChunkSpec(1), package.microbatch.sum_reducer)
        made = schedule(package, "ScheduleGPipe", stages(package, [Two()]), 4, output_merge_spec=spec)
        x = torch.randn(8, 6)
        assert_same(made.step(x), (x.T * 2, x.sum()))
    finally:
        torch.distributed.destroy_process_group()


@both
def test_gradients_of_a_split_batch(package: Package) -> None:
    module, x = blocks(1)[0], torch.randn(8, 6, requires_grad=True)
    pieces, _ = package.microbatch.split_args_kwargs_into_chunks((x,), None, 4)
    for (piece,) in pieces:
        functional.mse_loss(module(piece), torch.zeros(2, 6), reduction="sum").backward()
    other = x.detach().clone().requires_grad_()
    functional.mse_loss(module(other), torch.zeros(8, 6), reduction="sum").backward()
    assert_same(x.grad, other.grad)
