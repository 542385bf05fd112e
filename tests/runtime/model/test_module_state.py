"""The state of a module outside its parameters: captured, compared and restored."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from penstock.runtime.model.module_state import ModuleState, ModuleVersions


class Inner(nn.Module):
    """State of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("missing", None)
        self.plain = torch.tensor([1.0, float("nan")])
        self.runs, self.rate, self.name = 0, float("nan"), "first"
        self.losses: list[Any] = [1, torch.ones(2)]
        self.table: dict[str, Any] = {"a": 1, "b": torch.zeros(2)}
        self.seen = {1, 2}
        self.recent = deque([1, 2], maxlen=3)
        self.pair = (torch.zeros(2), 3)
        self.owner = object()


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"part": Inner()}))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "total": lambda part: part.total.add_(1),
    "norm.running_mean": lambda part: part.norm.running_mean.data.add_(1),
    "plain": lambda part: part.plain.mul_(2),
    "runs": lambda part: setattr(part, "runs", 1),
    "rate": lambda part: setattr(part, "rate", 0.5),
    "name": lambda part: setattr(part, "name", "second"),
    "losses": lambda part: part.losses.append(2),
    "table": lambda part: part.table.update(c=3),
    "seen": lambda part: part.seen.add(3),
    "recent": lambda part: part.recent.append(3),
    "pair": lambda part: part.pair[0].add_(1),
    "owner": lambda part: setattr(part, "owner", object()),
    "training": lambda part: setattr(part, "training", False),
}
OTHERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a buffer is replaced": ("total", lambda part: setattr(part, "total", torch.ones(3))),
    "a buffer gets another shape": ("total", lambda part: setattr(part, "total", torch.ones(4))),
    "a buffer is set": ("missing", lambda part: setattr(part, "missing", torch.ones(3))),
    "a buffer is resized": ("total", lambda part: setattr(part.total, "data", torch.ones(5))),
    "a buffer is added": ("extra", lambda part: part.register_buffer("extra", torch.ones(3))),
    "a buffer is deleted": ("total", lambda part: delattr(part, "total")),
    "an attribute is added": ("extra", lambda part: setattr(part, "extra", 1)),
    "an attribute is deleted": ("runs", lambda part: delattr(part, "runs")),
    "a list is replaced": ("losses", lambda part: setattr(part, "losses", [])),
    "a tensor in a list is changed": ("losses", lambda part: part.losses[1].add_(1)),
    "a tensor in a dict is changed": ("table", lambda part: part.table["b"].add_(1)),
    "an entry of a dict is replaced": ("table", lambda part: part.table.update(a=2)),
    "a type changes": ("runs", lambda part: setattr(part, "runs", False)),
}


@pytest.mark.parametrize("name", [*CHANGES, *OTHERS])
def test_a_change_is_named_and_restored(name: str) -> None:
    changed, change = OTHERS.get(name) or (name, CHANGES[name])
    module: Any = nested()
    part = module[1]["part"]
    before, objects = copy.deepcopy(part.__dict__), {**vars(part), **part._buffers}
    state = ModuleState.capture(module)
    assert state.list_changed() == []
    change(part)
    assert state.list_changed() == [f"1.part.{changed}"]
    state.restore()
    assert state.list_changed() == []
    now = {**vars(part), **part._buffers}
    assert now.keys() == objects.keys()
    assert all(now[key] is value for key, value in objects.items())
    for key, value in before["_buffers"].items():
        assert value is None or torch.equal(part._buffers[key], value)
    assert torch.equal(part.norm.running_mean, torch.zeros(3))
    assert torch.equal(part.losses[1], torch.ones(2))
    assert torch.equal(part.table["b"], torch.zeros(2))
    assert torch.equal(part.pair[0], torch.zeros(2))
    assert (part.losses[:1], part.table["a"], list(part.table), part.seen, list(part.recent)) == ([1], 1, ["a", "b"], {1, 2}, [1, 2])
    assert (part.runs, part.name, part.training) == (0, "first", True)


def test_a_state_can_be_restored_more_than_once() -> None:
    module: Any = nested()[1]["part"]
    state = ModuleState.capture(module)
    for _ in range(2):
        for change in CHANGES.values():
            change(module)
        assert set(state.list_changed()) == set(CHANGES)
        state.restore()
        assert state.list_changed() == []


def test_parameters_are_not_part_of_the_state() -> None:
    module: Any = nested()[1]["part"]
    state = ModuleState.capture(module)
    with torch.no_grad():
        module.map.weight.add_(1)
    module.map.bias = nn.Parameter(torch.ones(3))
    kept = module.map.weight.detach().clone()
    assert state.list_changed() == []
    state.restore()
    assert torch.equal(module.map.weight, kept)
    assert torch.equal(module.map.bias, torch.ones(3))


def test_a_forward_run_twice_leaves_the_state_of_one() -> None:
    """Restores batch norm, spectral norm and a counter, and the first forward's graph can still run its backward."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.norm = parametrizations.spectral_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)
            self.runs, self.history = 0, OrderedDict[int, Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            made: Tensor = self.norm(self.map(x))
            self.history[self.runs] = made
            return made

    once, twice, x = Counted(), Counted(), torch.randn(4, 3)
    twice.load_state_dict(once.state_dict())
    state = ModuleState.capture(twice)
    first = twice(x)
    assert {"runs", "history", "norm.running_mean", "norm.num_batches_tracked"} <= set(state.list_changed())
    state.restore()
    first.sum().backward()
    assert torch.equal(twice(x), once(x))
    assert (twice.runs, list(twice.history)) == (1, [1])
    for name, buffer in once.named_buffers():
        assert torch.equal(buffer, twice.get_buffer(name)), name


def test_a_module_on_the_meta_device_has_a_state() -> None:
    with torch.device("meta"):
        module: Any = nested()
    state = ModuleState.capture(module)
    module[1]["part"].runs = 3
    assert state.list_changed() == ["1.part.runs"]
    state.restore()
    assert state.list_changed() == []


def test_a_tensor_with_a_history_is_restored_by_reference() -> None:
    """A tensor with a graph is kept, so that its backward still works."""
    module = nn.Module()
    weight = torch.ones(3, requires_grad=True)
    module.last = (weight * 2).exp()
    state = ModuleState.capture(module)
    kept, module.last = module.last, torch.zeros(3)
    state.restore()
    assert module.last is kept
    kept.sum().backward()
    assert weight.grad is not None


def test_copies_replace_the_state_temporarily() -> None:
    """Code inside starts from the captured state and may change it; the current objects do not change."""
    module = nested()
    captured = ModuleState.capture(module)
    part: Any = module[1].part
    for change in CHANGES.values():
        change(part)
    part.late = 5
    assert "1.part.late" in captured.keep_changed()
    now = ModuleState.capture(module)
    with captured.stand_in():
        assert (part.runs, part.losses[0], len(part.losses), float(part.total.sum())) == (0, 1, 2, 0.0)
        assert not hasattr(part, "late")
        kept = part.total
        for change in CHANGES.values():
            change(part)
    assert not now.list_changed()
    assert float(kept.sum()) == 3
    with captured.stand_in():
        assert float(part.total.sum()) == 0


def test_only_some_names_can_be_captured() -> None:
    module = nested()
    captured = ModuleState.capture_only(module, ["1.part.total", "1.part.later"])
    part: Any = module[1].part
    part.total.add_(1)
    part.runs, part.later = 7, 1
    assert sorted(captured.list_changed()) == ["1.part.later", "1.part.total"]
    captured.restore()
    assert float(part.total.sum()) == 0
    assert part.runs == 7
    assert not hasattr(part, "later")


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"norm.running_mean", "pair"}))
def test_versions_notice_changes(name: str) -> None:
    """All changes are noticed except those through `data` and of tensors inside a tuple, which leave no trace."""
    module = nested()
    versions, others = ModuleVersions.capture(module), ModuleVersions.capture(module, skip=[f"1.part.{name}"])
    CHANGES[name](module[1].part)
    replaced, in_place = versions.changes()
    assert [*replaced.names(), *in_place] == [f"1.part.{name}"]
    replaced, in_place = others.changes()
    assert [*replaced.names(), *in_place] == []


def test_versions_do_not_take_skipped_state_for_added() -> None:
    module = nested()
    versions = ModuleVersions.capture(module, skip=["1.part.total", "1.part.runs"])
    part: Any = module[1].part
    part.late = 1
    replaced, in_place = versions.changes()
    assert [*replaced.names(), *in_place] == ["1.part.late"]
