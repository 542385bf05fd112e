"""`penstock profile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import penstock as ps

GPT = Path(__file__).parents[3] / "examples" / "gpt.py"
SMALL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Shape:
    wide: int = 8

def build():
    wide = Shape().wide
    return [nn.Linear(wide, wide), nn.Sequential(nn.Linear(wide, 2 * wide), nn.Tanh(), nn.Linear(2 * wide, wide))], torch.randn(4, wide)

def with_loss():
    layers, sample = build()
    return nn.Sequential(*layers), sample, nn.functional.mse_loss, torch.zeros(4, 8)

def nothing():
    return 3

def empty():
    return [], torch.randn(2, 8)
"""


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because threads that wait for each other are very slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


@pytest.mark.parametrize("function", ["build", "with_loss"])
@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_profile_is_saved_and_printed(run, file, tmp_path, function, suffix):
    target = tmp_path / f"p.{suffix}"
    result = run("profile", f"{file}:{function}", "-o", target, "--warmup", 0, "--repeats", 1, "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    profile = ps.Profile.load(target)
    assert [layer.parameters for layer in profile.layers] == [4 * (8 * 8 + 8), 4 * (8 * 16 + 16 + 16 * 8 + 8)]
    assert [layer.optimizer // layer.parameters for layer in profile.layers] == [2, 2]
    assert profile.microbatch == 4
    assert profile.sizes == (4, 2, 1)
    assert "microbatches of 4" in result.out
    assert f"saved to {target}" in result.out


def test_sizes_links_and_the_optimizer(run, file):
    args = ["--microbatch-sizes", "2,6", "--bandwidth", "1KB", "--latency", 0.5, "--optimizer", "none", "--repeats", 1, "--json"]
    profile = ps.Profile.from_json(json.loads(run("profile", f"{file}:build", *args).out))
    assert profile.sizes == (2, 6)
    assert profile.at(6).layers[0].output == 3 * profile.at(2).layers[0].output == 6 * 8 * 4
    assert (profile.latency, profile.bandwidth) == (0.5, 1000)
    assert [layer.optimizer for layer in profile.layers] == [0, 0]


@pytest.mark.slow
def test_the_example_can_be_profiled_and_planned(run, tmp_path):
    result = run("profile", f"{GPT}:build", "-o", tmp_path / "p.json", "--microbatch-sizes", 2, "--warmup", 1, "--repeats", 2)
    assert result.code == 0, result.err
    assert len(ps.Profile.load(tmp_path / "p.json")) == 18
    planned = run("plan", "--profile", tmp_path / "p.json", "-p", 4, "--batch", 32, "--seconds", 0, "-o", tmp_path / "plan.json")
    assert planned.code == 0, planned.err
    assert sum(ps.Plan.load(tmp_path / "plan.json").partition) == 18


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("gpt.py",), "'gpt.py' is not FILE.py:FUNCTION"),
        (("nowhere.py:build",), "there is no file nowhere.py"),
        (("{file}:biuld",), "has no function 'biuld': did you mean 'build'"),
        (("{file}:nothing",), "returned a int: return (layers, sample)"),
        (("{file}:empty",), "a list of at least one layer"),
        (("{file}:build", "--optimizer", "adamv"), "there is no optimizer 'adamv': did you mean 'adam"),
        (("{file}:build", "--bandwidth", "quick"), "--bandwidth: 'quick' is not a bandwidth"),
        (("{file}:build", "--microbatch-sizes", "2;3"), "is not a list of whole numbers"),
        (("{file}:build", "--repeats", 0), "repeats must be a whole number of at least 1, got 0"),
        (("{file}:build", "--ranks", 2, "--cluster", "a.json", "-o", "./a.json"), "--output and --cluster both name a.json, and one would"),
        (("{file}:build", "--device", "abacus"), "device 'abacus' cannot be used here"),
        (("{file}:build", "-o", "p.csv"), "the suffix is not one of .json, .toml"),
    ],
)
def test_wrong_usage_exits_with_2(refused, file, args, said):
    assert said in refused(2, "profile", *(str(arg).format(file=file) for arg in args))


def test_a_file_that_cannot_run_is_refused(refused, tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found")
    assert "broken.py could not be run: ModuleNotFoundError" in refused(2, "profile", f"{tmp_path / 'broken.py'}:build")


SEQUENCES = """
import torch
from torch import nn

def build():
    return [nn.Embedding(8, 4), nn.Linear(4, 4)], torch.zeros(2, 16, dtype=torch.long)

def convolved():
    return [nn.Embedding(8, 4), nn.Conv1d(16, 16, 1)], torch.zeros(2, 16, dtype=torch.long)
"""


def test_slices_are_measured(run, tmp_path):
    (tmp_path / "model.py").write_text(SEQUENCES)
    args = ["--slices", 4, "--warmup", 0, "--repeats", 1, "--device", "cpu", "--microbatch-sizes", "2"]
    result = run("profile", f"{tmp_path / 'model.py'}:build", *args, "-o", tmp_path / "p.json")
    assert result.code == 0
    assert "slices are known too; their times are fitted with an error of" in result.out
    assert ps.Profile.load(tmp_path / "p.json").tokens == 16
    result = run("profile", f"{tmp_path / 'model.py'}:convolved", *args)
    assert "slices are not known: it does not say what a slice takes on 1 Conv1d" in result.out


@pytest.mark.slow
def test_a_cluster_is_measured_on_processes(run, file, tmp_path):
    """Two processes of this machine: the profile and the cluster are saved, printed, and read by the planner."""
    args = ["--ranks", 2, "--cluster", tmp_path / "c.toml", "-o", tmp_path / "p.json", "--warmup", 0, "--repeats", 1, "--device", "cpu"]
    result = run("profile", f"{file}:with_loss", *args)
    assert (result.code, result.err) == (0, "")
    cluster, profile = ps.Cluster.load(tmp_path / "c.toml"), ps.Profile.load(tmp_path / "p.json")
    assert (len(cluster), len(profile)) == (2, 2)
    assert cluster.devices[0].speeds.f == 1.0
    assert (cluster.time_unit, cluster.size_unit) == ("s", "B")
    assert all(size > 2**28 for size in cluster.memory_limit)
    assert "cluster: 2 devices (2 cpu)" in result.out
    assert f"saved to {tmp_path / 'c.toml'}" in result.out
    asked = ["--profile", tmp_path / "p.json", "--cluster", tmp_path / "c.toml", "-m", 4, "--seconds", 0, "--schedules", "1f1b"]
    planned = run("plan", *asked)
    assert planned.code == 0
    assert "devices: 2 devices (2 cpu)" in planned.out


def test_a_cluster_needs_ranks(run, file, tmp_path):
    result = run("profile", f"{file}:build", "--cluster", tmp_path / "c.toml")
    assert result.code > 0
    assert "the number of ranks is not known: give --ranks N, or start the ranks with torchrun" in result.err
