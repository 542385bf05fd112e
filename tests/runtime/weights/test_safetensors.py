"""Weights in safetensors files, read into the stages that have them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from penstock.errors import FileFormatError, WeightsError
from penstock.runtime import Initial, Layers, Pipeline, Safetensors, launch
from penstock.runtime.launch.workers import Workers
from penstock.runtime.weights.safetensors import INDEX, SafetensorsFile
from penstock.runtime.weights.source import OwnedTensors
from runtime.models import GPT, token_loss

SPLIT = Layers("blocks", head=["embed"], tail=["norm", "head"])
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


def write(path: Path, tensors: Mapping[str, Tensor], pad: int = 0) -> None:
    """Write a file by the format's description: the header's length, the header, all values in a row."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        values = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    said = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(said).to_bytes(8, "little") + said + data)


def shards(folder: Path, tensors: Mapping[str, Tensor], count: int = 3) -> None:
    """Write several files, and an index of which file holds which tensor."""
    names = list(tensors)
    files = {f"model-{k}.safetensors": names[k::count] for k in range(count)}
    for file, mine in files.items():
        write(folder / file, {name: tensors[name] for name in mine})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {name: file for file, mine in files.items() for name in mine}}))


def on_meta(**options: Any) -> GPT:
    with torch.device("meta"):
        return GPT(4, **options)


@given(
    st.sampled_from(list(NAMES)),
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    st.integers(0, 20),
)
def test_every_type_and_shape(dtype: torch.dtype, shapes: list[list[int]], pad: int) -> None:
    tensors = {f"a.{k}": (torch.randn(shape) * 9).to(dtype) for k, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "one.safetensors", tensors, pad)
        file = SafetensorsFile(Path(folder) / "one.safetensors")
        assert list(file.header) == list(tensors)
        for name, tensor in tensors.items():
            found = file.read(name)
            assert found.dtype == dtype
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("whole", ["index", "files", "file"])
def test_each_rank_reads_its_own_stages(whole: str, tmp_path: Path) -> None:
    """Every rank reads the values of its own stages only."""
    plain = GPT(4)
    path = tmp_path
    if whole == "file":
        path = tmp_path / "model.safetensors"
        write(path, plain.state_dict())
    else:
        shards(tmp_path, plain.state_dict(), len(plain.state_dict()))
        if whole == "files":
            (tmp_path / INDEX).unlink()

    def run() -> dict[str, Tensor]:
        model = on_meta()
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=token_loss, split=SPLIT, weights=Safetensors(path))
        assert {name for name, each in model.named_parameters() if not each.is_meta} == {name for name, _ in pipe.local_parameters()}
        return dict(pipe.local_parameters())

    found = launch(run, 3)
    assert {name for theirs in found for name in theirs} == set(dict(plain.named_parameters()))
    for theirs in found:
        assert all(torch.equal(each, plain.get_parameter(name)) for name, each in theirs.items())


def test_opens_only_the_files_it_needs(tmp_path: Path) -> None:
    plain, model = GPT(4), on_meta()
    shards(tmp_path, plain.state_dict(), len(plain.state_dict()))
    for name, file in json.loads((tmp_path / INDEX).read_text())["weight_map"].items():
        if not name.startswith("embed."):
            (tmp_path / file).unlink()
    Safetensors(tmp_path)(OwnedTensors({"": model}, frozenset(map(id, model.embed.parameters()))))
    assert torch.equal(model.embed.tokens.weight, plain.embed.tokens.weight)
    assert model.head.weight.is_meta


def test_tied_names_types_and_renaming(tmp_path: Path) -> None:
    """A file without the tied head, with other names and higher precision."""
    plain = GPT(4, tied=True)
    saved = {f"transformer/{name}": value.double() for name, value in plain.state_dict().items() if name != "head.weight"}
    shards(tmp_path, saved)
    weights = Safetensors(tmp_path, rename=lambda name: f"transformer/{name}")

    def run() -> dict[str, Tensor]:
        pipe = Pipeline(on_meta(tied=True), schedule="1f1b", microbatches=4, loss_fn=token_loss, split=SPLIT, weights=weights)
        return dict(pipe.local_parameters())

    for theirs in launch(run, 3):
        for name, each in theirs.items():
            assert each.dtype == torch.float32
            assert torch.equal(each, plain.get_parameter(name))


def test_names_missing_from_the_file(tmp_path: Path) -> None:
    """Missing tensors are refused, or with `strict=False` left to the next source."""
    plain = GPT(4)
    write(tmp_path / "one.safetensors", {name: value for name, value in plain.state_dict().items() if not name.startswith("head")})
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "loss_fn": token_loss, "split": SPLIT}
    with pytest.raises(WeightsError, match=r"has no head\.weight"):
        Pipeline(on_meta(), weights=Safetensors(tmp_path), **options)
    with pytest.raises(WeightsError, match=r"head\.weight of this rank's stages is on the meta device"):
        Pipeline(on_meta(), weights=Safetensors(tmp_path, strict=False), **options)
    model = on_meta()
    Pipeline(model, weights=(Safetensors(tmp_path, strict=False), Initial(seed=4)), **options)
    assert torch.equal(model.blocks[2].mlp[0].weight, plain.blocks[2].mlp[0].weight)
    fresh = GPT(4)
    Initial(seed=4)(fresh)
    assert torch.equal(model.head.weight, fresh.head.weight)


def test_plain_model(tmp_path: Path) -> None:
    one, other = GPT(4), GPT(4)
    write(tmp_path / "one.safetensors", one.state_dict())
    Safetensors(tmp_path)(other)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        other.head.weight.zero_()  # the file is not changed by it
    assert torch.equal(SafetensorsFile(tmp_path / "one.safetensors").read("head.weight"), one.head.weight)


def test_invalid_files(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    write(path, {"a": torch.ones(3)})
    good = path.read_bytes()

    def refused(data: bytes, match: str) -> None:
        path.write_bytes(data)
        with pytest.raises(FileFormatError, match=rf"^{path}: {match}"):
            Safetensors(path, strict=False)(nn.Linear(2, 2))

    refused(good[:4], "too short to be a safetensors file")
    refused(b"\xff" * 8 + good[8:], r"a header of \d+ bytes in a file of \d+")
    refused(good[:-1], r"a of shape \[3\] and type F32 has bytes 0 to 12 of 11")
    refused(good.replace(b'"F32"', b'"F64"'), r"a of shape \[3\] and type F64 has bytes 0 to 12 of 12")
    refused(good.replace(b'"F32"', b'"Q32"'), "a has the unknown type 'Q32'")
    refused(good.replace(b"{", b"[", 1), "not a JSON header: Expecting")
    refused(good.replace(b'"shape"', b'"shade"'), "of a, 'shape' is missing")
    refused(good.replace(b"[3]", b'"3"'), "of a, 'shape' must be a list, got text")
    refused(good.replace(b"[0, 12]", b"[0,  1]"), r"a of shape \[3\] and type F32 has bytes 0 to 1 of 12")
    refused(good.replace(b"[0, 12]", b"[-0.5 ]"), r"a has the shape \[3\] and the place \[-0.5\], which are not whole numbers")
    path.write_bytes(good)
    with pytest.raises(WeightsError, match=r"has a with shape \[3\], but the model's has \[2, 2\]"):
        Safetensors(path, rename={"weight": "a", "bias": "b"}.__getitem__)(nn.Linear(2, 2))
    with pytest.raises(WeightsError, match="is neither a safetensors file nor a folder of them"):
        Safetensors(tmp_path / "two.safetensors")(nn.Linear(2, 2))
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(FileFormatError, match=r"index\.json: 'weight_map' is missing"):
        Safetensors(tmp_path)(nn.Linear(2, 2))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="is neither a safetensors file"):
        Safetensors(tmp_path / "empty")(nn.Linear(2, 2))


@pytest.mark.slow
def test_sharded_parameters(workers: Workers, tmp_path: Path) -> None:
    """Every rank of a sharded module keeps its shard; a sharded parameter on the meta device is refused."""
    plain = nn.Linear(5, 3)
    write(tmp_path / "one.safetensors", plain.state_dict())

    def load() -> dict[str, Tensor]:
        with torch.device("meta"):
            made = nn.Linear(5, 3)
        fully_shard(made, mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(WeightsError, match=r"call to_empty\(\)"):
            Safetensors(tmp_path)(made)
        made.to_empty(device="cpu")
        Safetensors(tmp_path)(made)
        functional.mse_loss(made(torch.ones(2, 5)), torch.ones(2, 3)).backward()
        return {name: value.full_tensor() for name, value in made.state_dict().items()}

    for found in workers.run(load, ranks=2):
        assert all(torch.equal(value, plain.get_parameter(name)) for name, value in found.items())
