"""Deferred operators give bitwise the numbers of autograd's backward; other uses of a weight are left to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.runtime.split_backward import operators
from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral
from runtime.splitting import Applied, Using, assert_bitwise, check, in_one, in_two, names, twice, wants


def with_gaps() -> Tensor:
    return torch.randn(3, 8, 5)[:, ::2].requires_grad_()


# Linear maps ----------------------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: wants(7, 5),
    "matrix on its side": lambda: torch.randn(5, 7).t().requires_grad_(),
    "three dimensions": lambda: wants(3, 4, 5),
    "three, on its side": lambda: torch.randn(4, 3, 5).transpose(0, 1).requires_grad_(),
    "three, with gaps": with_gaps,
    "four dimensions": lambda: wants(2, 3, 2, 5),
    "four, on its side": lambda: torch.randn(2, 2, 3, 5).transpose(1, 2).requires_grad_(),
    "one row": lambda: wants(1, 5),
    "no rows": lambda: wants(0, 5),
    "three, no rows": lambda: wants(2, 0, 5),
    "four, on its side, no rows": lambda: torch.randn(2, 0, 3, 5).transpose(1, 2).requires_grad_(),
    "no gradient": lambda: torch.randn(7, 5),
    "three, no gradient": lambda: torch.randn(3, 4, 5),
    "four, no gradient": lambda: torch.randn(2, 3, 2, 5),
}


VECTORS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: wants(5),
    "with gaps": lambda: torch.randn(5, 2).select(1, 0).requires_grad_(True),
    "no gradient": lambda: torch.randn(5),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", INPUTS)
def test_linear(shape: str, bias: bool) -> None:
    model = nn.Linear(5, 6, bias=bias)
    assert check(model, *twice(INPUTS[shape])) == names(model) - waits_not(INPUTS[shape](), "bias")


def waits_not(value: Tensor, *biases: str) -> set[str]:
    """A bias that torch adds separately from the product, as for an input with gaps, is not deferred."""
    return set(biases) if value.dim() > 2 and not value.is_contiguous() else set()


class OnItsSide(nn.Module):
    """A linear map along the sequence, as in mixers: neither its input nor its output's gradient is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x.transpose(1, 2)).transpose(1, 2))


def test_linear_along_the_sequence() -> None:
    """The bias's gradient is summed in memory order, which rounds differently from other orders."""
    assert check(OnItsSide(), *twice(lambda: wants(2, 16, 32))) == {"map.weight"}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", INPUTS)
def test_linear_between_others(shape: str, bias: bool) -> None:
    """A linear map between other operators, whose output is changed in place."""
    model = nn.Sequential(nn.Linear(5, 5, bias=bias), nn.ReLU(inplace=True), nn.Linear(5, 5, bias=bias), nn.ReLU(inplace=True), nn.Tanh())
    assert check(model, *twice(INPUTS[shape])) == names(model) - waits_not(INPUTS[shape](), "0.bias")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", VECTORS)
def test_linear_on_a_vector(name: str, bias: bool) -> None:
    vector = VECTORS[name]
    model = nn.Sequential(nn.Linear(5, 6, bias=bias), nn.ReLU(inplace=True), nn.Linear(6, 3, bias=bias))
    assert check(model, *twice(vector)) == names(model) - (set() if vector().is_contiguous() else {"0.bias"})


def test_linear_with_a_bias_that_is_not_a_parameter() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.map.weight, self.map.bias * 2)

    for shape in ((5, 4), (2, 3, 4), (2, 2, 3, 4)):
        assert check(Odd(), *twice(lambda: wants(*shape))) == {"map.weight"}  # noqa: B023 - called at once


def test_linear_in_double_precision() -> None:
    model = nn.Linear(5, 6).double()
    assert check(model, *twice(lambda: wants(4, 5, dtype=torch.float64))) == names(model)


def test_a_complex_weight_is_left_to_autograd() -> None:
    model = nn.Linear(3, 2, dtype=torch.complex64)
    assert check(model, *twice(lambda: torch.randn(4, 3, dtype=torch.complex64, requires_grad=True))) == set()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.booleans())
def test_linear_of_any_shape(rows: list[int], wide: int, out: int, bias: bool, flip: bool) -> None:
    def make() -> Tensor:
        x = torch.randn(*rows, wide)
        return (x.transpose(0, -2) if flip else x).requires_grad_()

    model = nn.Linear(wide, out, bias=bias)
    assert check(model, *twice(make)) == names(model) - waits_not(make(), "bias")


# Embeddings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -2}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, **options), nn.Linear(4, 3))
    assert check(model, *twice(lambda: torch.randint(0, 9, (5, 6)))) == names(model)


def test_a_negative_padding_index_of_the_function() -> None:
    model = Using(lambda x, table: functional.embedding(x, table, padding_idx=-3), (9, 4))
    assert check(model, *twice(lambda: torch.randint(0, 9, (5, 6)))) == names(model)


def test_an_embedding_with_max_norm_is_left_to_autograd() -> None:
    assert check(nn.Embedding(9, 4, max_norm=0.5), *twice(lambda: torch.randint(0, 9, (5, 6)))) == set()


def test_a_sparse_embedding_is_left_to_autograd() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    microbatches = twice(lambda: torch.randint(0, 9, (5,)))
    one, two = in_one(model, *microbatches), in_two(model, *microbatches)
    assert two.waited == set()
    assert two.grads["weight"].is_sparse
    assert_bitwise(one.grads["weight"].to_dense(), two.grads["weight"].to_dense())


def test_a_sparse_and_a_deferred_gradient_are_added() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.table(x), self.table.weight)

    model, microbatches = Tied(), twice(lambda: torch.randint(0, 9, (5,)))
    one, two = in_one(model, *microbatches), in_two(model, *microbatches)
    torch.testing.assert_close(_dense(one.grads["table.weight"]), _dense(two.grads["table.weight"]))


def _dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


# Convolutions ---------------------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "all": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "replicate": {"padding": 1, "padding_mode": "replicate"},
}


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution(dims: int, options: str) -> None:
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, **CONVOLUTIONS[options])
    model = nn.Sequential(first, nn.ReLU(inplace=True))
    assert check(model, *twice(lambda: wants(2, 4, *[7] * dims))) == names(model)


def test_a_convolution_with_sizes_that_differ() -> None:
    model = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
    assert check(model, *twice(lambda: wants(2, 2, 9, 8))) == names(model)
    assert check(Using(lambda x, w: functional.conv2d(x, w, stride=[2], padding=[1]), (3, 2, 3, 3)), *twice(lambda: wants(2, 2, 7, 7)))


def test_a_first_convolution_and_memory_in_another_order() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    data = twice(lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert check(model, *data) == names(model)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_a_convolution_with_padding_by_name_is_left_to_autograd(padding: str) -> None:
    assert check(nn.Conv2d(2, 3, 3, padding=padding), *twice(lambda: wants(2, 2, 6, 6))) == set()


def test_a_convolution_of_one_sample_is_left_to_autograd() -> None:
    assert check(nn.Conv1d(2, 3, 3), *twice(lambda: wants(2, 6))) == set()


TRANSPOSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "stride": {"stride": 2},
    "output padding": {"stride": 2, "output_padding": 1},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "all": {"stride": 3, "output_padding": 1, "padding": 2, "dilation": 2, "groups": 2},
}


@pytest.mark.parametrize("options", TRANSPOSED)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution(dims: int, options: str) -> None:
    first = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](4, 6, 3, **TRANSPOSED[options])
    model = nn.Sequential(first, nn.ReLU(inplace=True))
    assert check(model, *twice(lambda: wants(2, 4, *[5] * dims))) == names(model)


def test_transposed_convolutions_with_sizes_that_differ_and_an_output_size() -> None:
    model = nn.ConvTranspose2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2))
    assert check(model, *twice(lambda: wants(2, 2, 6, 5))) == names(model)
    sized = nn.ConvTranspose2d(2, 3, 3, stride=2)
    assert check(sized, *twice(lambda: wants(2, 2, 4, 4)), forward=lambda m, x: m(x, output_size=(10, 10))) == names(sized)
    last = nn.ConvTranspose2d(4, 6, 3).to(memory_format=torch.channels_last)
    assert check(last, *twice(lambda: torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last))) == names(last)


def test_a_transposed_convolution_of_one_sample_is_left_to_autograd() -> None:
    assert check(nn.ConvTranspose1d(2, 3, 3), *twice(lambda: wants(2, 6))) == set()


# Bilinear maps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), (6,), (2, 3)], ids=str)
@pytest.mark.parametrize("wanting", [True, False], ids=["input gradient", "no input gradient"])
def test_bilinear(rows: tuple[int, ...], wanting: bool) -> None:
    """The bias is added after the product, and left to autograd."""
    model = Applied(nn.Bilinear(3, 4, 5), lambda inner, x, y: torch.relu_(inner(x, y)))

    def inputs() -> tuple[Tensor, ...]:
        return torch.randn(*rows, 3, requires_grad=wanting), torch.randn(*rows, 4, requires_grad=wanting)

    assert check(model, inputs(), inputs()) == {"inner.weight"}
    free = Applied(nn.Bilinear(3, 4, 5, bias=False), lambda inner, x, y: torch.relu_(inner(x, y)))
    assert check(free, inputs(), inputs()) == {"inner.weight"}


def test_bilinear_on_its_side() -> None:
    model = nn.Bilinear(3, 4, 5)
    assert check(model, *((torch.randn(3, 6).t().requires_grad_(), torch.randn(4, 6).t().requires_grad_()) for _ in range(2))) == {"weight"}


@pytest.mark.parametrize("which", [0, 1])
def test_an_input_of_a_bilinear_map_that_is_changed_in_place_is_refused(which: int) -> None:
    def change(inner: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        both = x * 2, y * 2
        made: Tensor = inner(*both)
        both[which].add_(1)
        return made

    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        in_two(Applied(nn.Bilinear(3, 4, 5), change), (torch.randn(2, 3), torch.randn(2, 4)))


# Bags of embeddings ---------------------------------------------------------------------------------------------------

BAGS: list[dict[str, Any]] = [
    {},
    {"mode": "sum"},
    {"mode": "max"},
    {"padding_idx": 3},
    {"mode": "sum", "padding_idx": -2},
    {"mode": "max", "padding_idx": 1},
    {"scale_grad_by_freq": True},
]


@pytest.mark.parametrize("options", BAGS, ids=str)
def test_a_bag_of_embeddings(options: dict[str, Any]) -> None:
    model = nn.EmbeddingBag(9, 4, **options)
    assert check(model, *twice(lambda: torch.randint(0, 9, (5, 3)))) == names(model)
    offsets = torch.tensor([0, 4, 4, 9])
    assert check(model, *((torch.randint(0, 9, (15,)), offsets) for _ in range(2))) == names(model)
    last = nn.EmbeddingBag(9, 4, include_last_offset=True, **options)
    assert check(last, *((torch.randint(0, 9, (15,)), torch.tensor([0, 4, 9, 15])) for _ in range(2))) == names(last)


def test_bags_that_are_left_to_autograd() -> None:
    weighted = Applied(nn.EmbeddingBag(9, 4, mode="sum"), lambda inner, x, w: inner(x, per_sample_weights=w))
    assert check(weighted, (torch.randint(0, 9, (5, 3)), wants(5, 3))) == set()
    assert check(nn.EmbeddingBag(9, 4, max_norm=0.5), *twice(lambda: torch.randint(0, 9, (5, 3)))) == set()


# Normalisations -------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer the gradients of small normalisations too."""
    monkeypatch.setattr(operators, "SMALLEST_NORM", 0)


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "layer": (lambda: nn.LayerNorm(6), lambda: wants(4, 6)),
    "layer, three dimensions": (lambda: nn.LayerNorm(6), lambda: wants(2, 3, 6)),
    "layer, two dimensions at once": (lambda: nn.LayerNorm((3, 6)), lambda: wants(4, 3, 6)),
    "layer, no bias": (lambda: nn.LayerNorm(6, bias=False), lambda: wants(4, 6)),
    "layer, no gradient": (lambda: nn.LayerNorm(6), lambda: torch.randn(4, 6)),
    "layer, no rows": (lambda: nn.LayerNorm(6), lambda: wants(0, 6)),
    "layer, on its side": (lambda: nn.LayerNorm(6), lambda: torch.randn(2, 6, 3).transpose(1, 2).requires_grad_()),
    "layer, many rows": (lambda: nn.LayerNorm(130), lambda: wants(70, 33, 130)),
    "layer, half precision": (lambda: nn.LayerNorm(6).bfloat16(), lambda: wants(4, 6, dtype=torch.bfloat16)),
    "layer, half precision with float32 weights": (lambda: nn.LayerNorm(6), lambda: wants(4, 6, dtype=torch.bfloat16)),
    "group": (lambda: nn.GroupNorm(2, 6), lambda: wants(4, 6)),
    "group, three dimensions": (lambda: nn.GroupNorm(2, 6), lambda: wants(4, 6, 5)),
    "group, images": (lambda: nn.GroupNorm(3, 6), lambda: wants(2, 6, 5, 4)),
    "group, no gradient": (lambda: nn.GroupNorm(3, 6), lambda: torch.randn(2, 6, 5, 4)),
    "group, many": (lambda: nn.GroupNorm(4, 32), lambda: wants(16, 32, 17, 16)),
    "group, half precision": (lambda: nn.GroupNorm(2, 6).bfloat16(), lambda: wants(4, 6, 5, dtype=torch.bfloat16)),
    "root mean square": (lambda: nn.RMSNorm(6), lambda: wants(4, 6)),
    "root mean square, three dimensions": (lambda: nn.RMSNorm(6), lambda: wants(2, 3, 6)),
    "root mean square, two at once": (lambda: nn.RMSNorm((3, 6), eps=1e-3), lambda: wants(4, 3, 6)),
    "root mean square, no gradient": (lambda: nn.RMSNorm(6), lambda: torch.randn(4, 6)),
    "root mean square, many rows": (lambda: nn.RMSNorm(130), lambda: wants(70, 33, 130)),
    "root mean square, double": (lambda: nn.RMSNorm(6).double(), lambda: wants(4, 6, dtype=torch.float64)),
}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name: str) -> None:
    make, data = NORMS[name]
    torch.manual_seed(3)
    model = nn.Sequential(make(), nn.ReLU(inplace=True))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    assert check(model, *twice(data)) == names(model)


@pytest.mark.usefixtures("any_size")
def test_normalisations_between_others_and_used_twice() -> None:
    model = nn.Sequential(nn.Linear(6, 6), norm := nn.LayerNorm(6), nn.Linear(6, 6), norm, nn.RMSNorm(6))
    assert check(model, *twice(lambda: wants(2, 3, 6))) == names(model)


@pytest.mark.usefixtures("any_size")
def test_a_normalisation_with_a_weight_or_bias_that_is_not_a_parameter() -> None:
    def scaled(inner: nn.LayerNorm, x: Tensor) -> Tensor:
        first = functional.layer_norm(x, (6,), inner.weight, inner.bias * 2)
        return functional.layer_norm(first, (6,), inner.weight * 2, inner.bias)

    assert check(Applied(nn.LayerNorm(6), scaled), *twice(lambda: wants(4, 6)), exact=False) == set()
    bias = Applied(nn.LayerNorm(6), lambda inner, x: functional.layer_norm(x, (6,), inner.weight, inner.bias * 2))
    assert check(bias, *twice(lambda: wants(4, 6))) == {"inner.weight"}


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", ["layer", "group", "root mean square"])
def test_a_normalisation_in_a_checkpoint(name: str) -> None:
    make, data = NORMS[name]
    model = Applied(nn.Sequential(make(), nn.Tanh(), make()), lambda inner, x: checkpoint(inner, x, use_reentrant=False))
    assert check(model, *twice(data)) == names(model)


def test_a_small_normalisation_is_left_to_autograd() -> None:
    model = nn.LayerNorm(64)
    assert check(model, *twice(lambda: wants(64, 64))) == set()
    assert check(model, *twice(lambda: wants(operators.SMALLEST_NORM // 64, 64))) == names(model)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: nn.GroupNorm(2, 6), lambda: wants(2, 6, 5, 4).detach().to(memory_format=torch.channels_last).requires_grad_()),
        (lambda: nn.GroupNorm(2, 6), lambda: torch.randn(2, 5, 6).transpose(1, 2).requires_grad_()),
        (lambda: nn.RMSNorm(6).bfloat16(), lambda: wants(4, 6, dtype=torch.bfloat16)),
        (lambda: nn.BatchNorm1d(6), lambda: wants(4, 6)),
        (lambda: nn.InstanceNorm1d(6, affine=True), lambda: wants(4, 6, 5)),
    ],
    ids=["group, channels last", "group, on its side", "root mean square, half precision", "batch", "instance"],
)
def test_normalisations_that_are_left_to_autograd(make: Callable[[], nn.Module], data: Callable[[], Tensor]) -> None:
    assert check(make(), *twice(data)) == set()


# Matrix products with parameters --------------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "x @ w": (lambda x, w: x @ w, (4, 5), (5, 3)),
    "matmul": (torch.matmul, (4, 5), (5, 3)),
    "method": (lambda x, w: x.matmul(w), (4, 5), (5, 3)),
    "mm": (torch.mm, (4, 5), (5, 3)),
    "mm, method": (lambda x, w: x.mm(w), (4, 5), (5, 3)),
    "three by two": (lambda x, w: x @ w, (2, 4, 5), (5, 3)),
    "four by two": (torch.matmul, (2, 2, 4, 5), (5, 3)),
    "bmm": (torch.bmm, (3, 4, 5), (3, 5, 2)),
    "bmm, method": (lambda x, w: x.bmm(w), (3, 4, 5), (3, 5, 2)),
    "batch by batch": (lambda x, w: x @ w, (3, 4, 5), (3, 5, 2)),
    "linear": (functional.linear, (4, 5), (3, 5)),
    "in place after": (lambda x, w: (x @ w).relu_() * 2, (2, 4, 5), (5, 3)),
}


@pytest.mark.parametrize("wanting", [True, False], ids=["input gradient", "no input gradient"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_with_a_parameter(name: str, wanting: bool) -> None:
    function, shape, weight = PRODUCTS[name]
    model = Using(function, weight)
    assert check(model, *twice(lambda: torch.randn(shape, requires_grad=wanting))) == names(model)


@pytest.mark.parametrize("function", [lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: b.addmm(x, w)], ids=["function", "method"])
def test_sum_and_product(function: Callable[..., Tensor]) -> None:
    model = Using(function, (5, 3), (3,))
    assert check(model, *twice(lambda: wants(4, 5))) == names(model)


LEFT: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "w @ x": (lambda x, w: w @ x, (5, 4), ((3, 5),)),
    "x @ w.t()": (lambda x, w: x @ w.t(), (4, 5), ((3, 5),)),
    "w @ w": (lambda x, w: x @ (w @ w), (4, 5), ((5, 5),)),
    "vector @ w": (lambda x, w: x @ w, (5,), ((5, 3),)),
    "batch broadcast": (lambda x, w: x @ w, (1, 4, 5), ((3, 5, 2),)),
    "by name": (lambda x, w: torch.matmul(input=x, other=w), (4, 5), ((5, 3),)),
    "scaled sum": (lambda x, w, b: torch.addmm(b, x, w, beta=2), (4, 5), ((5, 3), (3,))),
    "sum with a matrix": (lambda x, w, b: torch.addmm(b, x, w), (4, 5), ((5, 3), (4, 3))),
    "einsum": (lambda x, w: torch.einsum("bi,io->bo", x, w), (4, 5), ((5, 3),)),
    "sum": (lambda x, w: x + w, (4, 5), ((4, 5),)),
    "indexed": (lambda x, w: x @ w[0], (4, 5), ((2, 5, 3),)),
    "in place": (lambda x, w: (x * 1).addmm_(x, w), (4, 5), ((5, 5),)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_uses_of_a_parameter_are_left_to_autograd(name: str) -> None:
    function, shape, weights = LEFT[name]
    assert check(Using(function, *weights), *twice(lambda: wants(*shape))) == set()


# Modules --------------------------------------------------------------------------------------------------------------


class Own(nn.Linear):
    """A subclass of `nn.Linear` that computes its product itself."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input @ self.weight.t() + self.bias


@pytest.mark.parametrize(
    ("make", "shape", "waits"),
    [
        (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (3, 4, 8), "every matrix"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, norm_first=True), (3, 4, 8), "every matrix"),
        (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, bias=False), (3, 4, 8), "every matrix"),
        (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.PReLU(4)), (6, 5), "every matrix"),
        (lambda: nn.LSTM(5, 3, batch_first=True), (2, 4, 5), "none"),
        (lambda: nn.GRU(5, 3, 2, batch_first=True), (2, 4, 5), "none"),
        (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 2, 5, 5), "every matrix"),
        (lambda: Own(5, 3), (4, 5), "none"),
        (lambda: parametrizations.weight_norm(nn.Linear(5, 3, bias=False)), (4, 5), "none"),
        (lambda: parametrizations.orthogonal(nn.Linear(5, 5, bias=False)), (4, 5), "none"),
        (lambda: parametrizations.spectral_norm(nn.Linear(5, 3, bias=False)).eval(), (4, 5), "none"),
        (lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3, bias=False)).eval(), (2, 2, 5, 5), "none"),
    ],
)
def test_modules(make: Callable[[], nn.Module], shape: tuple[int, ...], waits: str) -> None:
    model = make()
    waited = check(model, *twice(lambda: wants(*shape)))
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert {name for name in waited if name in matrices} == (matrices if waits == "every matrix" else set())


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 5}, {"bias": False}, {"add_bias_kv": True}, {"batch_first": True}], ids=str)
def test_attention(options: dict[str, Any]) -> None:
    model = nn.MultiheadAttention(8, 2, **options)
    same = "kdim" not in options

    def inputs() -> tuple[Tensor, ...]:
        return (wants(4, 3, 8), wants(4, 3, 8 if same else 6), wants(4, 3, 8 if same else 5))

    waited = check(model, inputs(), inputs())
    assert {"out_proj.weight", *(() if same else ("q_proj_weight", "k_proj_weight", "v_proj_weight"))} <= waited


def test_a_lazy_module() -> None:
    """Its parameters are left to autograd in the forward that creates them, and deferred after the next refresh."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2))
    deferrable = Deferrable(model)
    x = torch.randn(3, 5)
    for step in range(2):
        deferral = Deferral()
        with deferrable.forward(deferral):
            out = model(x)
        deferrable.backward_input(deferral, [out], [torch.ones_like(out)])
        early = {name for name, p in model.named_parameters() if p.grad is not None}
        assert early == ({"0.weight", "0.bias"} if step == 0 else set())
        deferral.run()
        grads = [p.grad for p in model.parameters()]
        for grad, wanted in zip(grads, torch.autograd.grad(model(x).sum(), list(model.parameters())), strict=True):
            assert_bitwise(grad, wanted)
        model.zero_grad()
        deferrable.refresh(model)
