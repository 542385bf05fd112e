"""The ends of a model whose vocabulary is spread: which layers are taken, and which are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from penstock.errors import PlacementError
from penstock.runtime.model.partition import partition
from penstock.runtime.model.spread_ends import take_ends


def build(words: nn.Module | None = None, head: nn.Module | None = None, blocks: int = 3) -> nn.Sequential:
    middle = [nn.Linear(4, 4) for _ in range(blocks)]
    return nn.Sequential(words or nn.Embedding(8, 4), *middle, head or nn.Linear(4, 8, bias=False))


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return 2 * super().forward(input)


def tie(first: int, second: int) -> nn.Sequential:
    model = build(nn.Embedding(4, 4), nn.Linear(4, 4))
    model[second].weight = model[first].weight
    return model


def hook() -> nn.Sequential:
    model = build()
    model[-1].register_forward_hook(lambda *_: None)
    return model


def normalise() -> nn.Sequential:
    return build(head=nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build(words=nn.Linear(4, 4)), "the first layer must be an nn.Embedding: '0' is a Linear"),
        (lambda: build(words=Scaled(8, 4)), "the first layer must be an nn.Embedding: '0' is a Scaled"),
        (lambda: build(words=nn.Embedding(8, 4, max_norm=1.0)), "embedding '0' has max_norm"),
        (lambda: build(head=nn.Tanh()), "the last layer must be an nn.Linear: '4' is a Tanh"),
        (
            lambda: build(head=type("Linear", (nn.Linear,), {"forward": hook})(4, 8)),
            r"the last layer must be an nn.Linear: '4' is a \S+\.Linear;",
        ),
        (lambda: build(blocks=1), "3 layers, of which 1 lie between the spread ends: each of 2 stages needs one"),
        (lambda: dict(enumerate(build())), "give an nn.Sequential, a list of layers"),
        (lambda: tie(0, 2), "'0' shares its weight with '2', which is in a stage"),
        (lambda: tie(1, 4), "'4' shares its weight with '1', which is in a stage"),
        (hook, "'4' has hooks or parametrizations"),
        (normalise, "hooks or parametrizations"),
    ],
)
def test_other_ends_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        take_ends(make(), None, None, 2, embedding=True, head=True)


@pytest.mark.parametrize("embedding", [True, False])
def test_tied_ends_are_spread_together(embedding: bool) -> None:
    assert take_ends(tie(0, 4), None, None, 2, embedding=True, head=True)[2].are_tied
    assert not take_ends(build(), None, None, 2, embedding=True, head=True)[2].are_tied
    with pytest.raises(
        PlacementError, match=r"'[04]' shares its weight with '[04]', but only '[04]' is spread over the ranks: spread both"
    ):
        take_ends(tie(0, 4), None, None, 2, embedding=embedding, head=not embedding)


class PlanOfSizes:
    """The part of a plan that says how many layers each stage has, ends included."""

    def __init__(self, *partition: int) -> None:
        self.partition = partition


@pytest.mark.parametrize(
    ("split", "plan", "wanted"),
    [
        ([1, 2], None, [["1"], ["2", "3"]]),
        (None, PlanOfSizes(3, 2), [["1", "2"], ["3"]]),
        ([1, 2], PlanOfSizes(3, 2), [["1"], ["2", "3"]]),
    ],
)
def test_stages_are_cut_from_the_layers_between(split: list[int] | None, plan: PlanOfSizes | None, wanted: list[list[str]]) -> None:
    """The layers keep the names that they have in the whole model."""
    model, sizes, ends = take_ends(build(), split, plan, 2, embedding=True, head=True)
    cut = partition(model, 2, sizes, without=ends.names)
    assert [list(part.layers) for part in cut.parts if part is not None] == wanted
    assert ends.names == ["0", "4"]


def test_a_plan_with_a_stage_of_one_end_alone_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"the plan's stages have \[4, 1\] layers, embedding and head included"):
        take_ends(build(), None, PlanOfSizes(4, 1), 2, embedding=True, head=True)


def test_a_list_has_one_layer_per_stage() -> None:
    model, sizes, _ = take_ends(
        [nn.Embedding(8, 4), nn.Linear(4, 400), nn.Linear(400, 4), nn.Linear(4, 8)], None, None, 2, embedding=True, head=True
    )
    assert isinstance(model, nn.Sequential)
    assert sizes == [1, 1]
