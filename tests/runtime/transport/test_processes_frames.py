"""Values as bytes: whatever a stage passes on comes out of its frame as it went in."""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.transport.all_gather import dumps
from penstock.runtime.transport.message_format import (
    NUMBER,
    OVERFLOW,
    PROGRAM,
    SENT,
    TRAILER,
    Form,
    SendFrame,
    is_dense,
    pack_new,
    trailer,
    unpack_new,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
PLAIN = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=32) | st.text(max_size=3) | st.sampled_from([torch.int8, b"x"])


class Pair(NamedTuple):
    one: Any
    other: Any


def laid(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of the same kind with another memory layout."""
    match layout:
        case "reversed":
            return tensor.permute(tuple(reversed(range(tensor.dim()))))
        case "spread" if tensor.dim():
            return torch.cat([tensor, tensor], -1)[..., ::2]
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *tensor.shape)
        case "conjugate" if tensor.is_complex():
            return tensor.conj()
        case "inside":
            return torch.stack([tensor, tensor])[1]
    return tensor


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3
    tensor = laid(values.to(dtype), draw(st.sampled_from(["plain", "reversed", "spread", "expanded", "conjugate", "inside"]))).detach()
    return tensor.requires_grad_(draw(st.booleans())) if dtype.is_floating_point or dtype.is_complex else tensor


TREES = st.recursive(
    tensors() | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def through(form: Form, value: Any) -> Any:
    """A value of a form that stands, from the frame it is sent from into the one it is received in."""
    slot = SendFrame(form.size)
    form.pack(value, slot.address)
    slot.words[NUMBER] = 7
    frame = form.frame()
    assert frame.numel() * frame.element_size() == form.size == slot.buffers[0].numel()
    ctypes.memmove(frame.data_ptr(), slot.address, form.size)
    assert trailer(frame)[NUMBER] == 7
    return form.unpack(frame)


def assert_alike(found: Any, sent: Any) -> None:
    """The same tree, the same plain values, and tensors that are equal in everything except their memory."""
    leaves, spec = pytree.tree_flatten(sent)
    got, other = pytree.tree_flatten(found)
    assert other == spec
    for one, wanted in zip(got, leaves, strict=True):
        if not isinstance(wanted, Tensor):
            assert type(one) is type(wanted)
            assert repr(one) == repr(wanted)
            continue
        assert (one.dtype, one.shape, one.requires_grad) == (wanted.dtype, wanted.shape, wanted.requires_grad)
        assert one.is_leaf
        assert one.stride() == wanted.stride() if fills_one_stretch(wanted) else one.is_contiguous()
        assert same_bits(one, wanted)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also for NaN, and for zeros that differ in sign."""
    found, wanted = (torch.empty(each.numel(), dtype=each.dtype).copy_(each.detach().flatten()).view(torch.uint8) for each in (one, other))
    return torch.equal(found, wanted)


def fills_one_stretch(tensor: Tensor) -> bool:
    """By every element's place, one by one."""
    places = [sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in itertools.product(*map(range, tensor.shape))]
    return sorted(places) == list(range(tensor.numel())) and tensor.numel() > 0


@settings(max_examples=150)
@given(TREES)
def test_a_new_value_arrives_unchanged(value: Any) -> None:
    form, frame = pack_new(value)
    learnt, found = unpack_new(frame)
    assert_alike(found, value)
    assert str(learnt) == str(form)
    assert learnt.size == form.size
    assert_alike(through(learnt, value), value)


@settings(max_examples=150)
@given(st.data())
def test_form_fits_the_values_it_can_carry(data: st.DataObject) -> None:
    """A value fits its own form; another fits only if it comes out right, with whatever numbers are in it."""
    value = data.draw(TREES)
    form = Form.of(value)
    assert form.fits(value)
    other = data.draw(st.one_of(TREES, st.just(pytree.tree_map(_renewed, value))))
    if form.fits(other):
        assert_alike(through(form, other), other)
    else:
        assert not _same_looks(other, value)


def _renewed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    fresh = (
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        if fills_one_stretch(leaf)
        else torch.empty(leaf.shape, dtype=leaf.dtype)
    )
    return fresh.copy_(torch.ones(leaf.shape)).requires_grad_(leaf.requires_grad)


def _same_looks(one: Any, other: Any) -> bool:
    (ones, spec), (others, spec_too) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return spec == spec_too and all(map(_alike, ones, others))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.shape, one.stride(), one.dtype, one.requires_grad) == (other.shape, other.stride(), other.dtype, other.requires_grad)
    return type(one) is type(other) and repr(one) == repr(other)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=3))
def test_dense_tensors_fill_contiguous_memory(dimensions: list[tuple[int, int]]) -> None:
    shape, stride = [size for size, _ in dimensions], [step for _, step in dimensions]
    tensor = torch.as_strided(torch.arange(64), shape, stride)
    if tensor.numel():
        assert is_dense(tensor) == fills_one_stretch(tensor)


def test_received_tensors_have_their_own_memory() -> None:
    """Changing one in place changes no other, not what was sent, and not what comes next."""
    sent = (torch.ones(3), torch.ones(2, 2), torch.ones(()))
    form = Form.of(sent)
    first, second = through(form, sent), through(form, sent)
    for part in first:
        part.mul_(5)
    for part in (*sent, *second):
        assert torch.equal(part, torch.ones_like(part))
    for part in first:
        assert torch.equal(part, torch.full_like(part, 5))


def test_received_tensor_can_be_trained_through() -> None:
    """It is a leaf that gets a gradient, whether it is alone or one of several."""
    for value in (
        torch.randn(3, requires_grad=True),
        [torch.randn(3, requires_grad=True)],
        {"x": torch.randn(3, requires_grad=True), "n": 1},
    ):
        leaf = next(each for each in pytree.tree_leaves(through(Form.of(value), value)) if isinstance(each, Tensor))
        leaf.square().sum().backward()
        assert torch.equal(leaf.grad, 2 * leaf.detach())


def test_changed_plain_value_is_sent_again() -> None:
    """What stands is compared with what it was, not with itself."""
    seen = Counter(a=1)
    form = Form.of((seen, torch.ones(1)))
    seen["a"] += 1
    assert not form.fits((seen, torch.ones(1)))
    assert unpack_new(pack_new((seen, torch.ones(1)))[1])[1][0] == Counter(a=2)


@pytest.mark.parametrize(("value", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ("1", b"1"), (None, 0), (2, 3), ([], ()), ({}, [])])
def test_values_that_are_similar_but_not_equal(value: Any, other: Any) -> None:
    assert Form.of(value).fits(value)
    assert not Form.of(value).fits(other)


def test_value_that_cannot_be_compared_is_sent_again() -> None:
    array = np.arange(3)
    assert not Form.of(array).fits(array)
    assert np.array_equal(unpack_new(pack_new(array)[1])[1], array)


def test_parameter_becomes_a_tensor() -> None:
    found = unpack_new(pack_new([nn.Parameter(torch.ones(2))])[1])[1]
    assert type(found[0]) is Tensor
    assert found[0].requires_grad


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("sort", ["sparse", "nested", "quantized"])
def test_tensors_that_are_not_dense_are_refused(sort: str) -> None:
    value = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    }[sort]()
    with pytest.raises(ScheduleError, match=rf"returns a .*{sort}.*, which cannot be sent as it is: return"):
        pack_new((value, 1))


def test_form_in_words() -> None:
    value = {"x": torch.ones(2, 3), "n": 4, "mask": torch.ones(1, dtype=torch.bool), "no": None}
    assert str(Form.of(value)) == "float32[2, 3], 4, bool[1], None"
    assert str(Form.of(())) == "nothing"


def test_words_of_a_frame_do_not_touch_its_tensors() -> None:
    value = torch.full((17,), 3, dtype=torch.uint8)
    form = Form.of(value)
    assert form.size % TRAILER == 0
    slot = SendFrame(form.size)
    form.pack(value, slot.address)
    for word, number in ((PROGRAM, 2**32 - 1), (NUMBER, 5), (SENT, 2**62), (OVERFLOW, -1)):
        slot.words[word] = number
        assert trailer(slot.buffers[0])[word] == number
    assert torch.equal(slot.buffers[0][:17], value)


# Between ranks outside of a program -------------------------------------------------------------------------------------


@given(TREES)
def test_a_gathered_value_arrives_unchanged(value: Any) -> None:
    found = pickle.loads(dumps(value))
    leaves, spec = pytree.tree_flatten(value)
    got, other = pytree.tree_flatten(found)
    assert other == spec
    for one, wanted in zip(got, leaves, strict=True):
        if isinstance(wanted, Tensor):
            assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape)
            assert same_bits(one, wanted)
        else:
            assert repr(one) == repr(wanted)


def test_class_defined_in_a_function_can_be_gathered() -> None:
    """Like classes of a script or notebook in a worker: known, but not under a module's name."""

    class Local(NamedTuple):
        x: Tensor

    found = pickle.loads(dumps([Local(torch.ones(2))]))[0]
    assert type(found) is Local
    assert torch.equal(found.x, torch.ones(2))
    sent = unpack_new(pack_new(Local(torch.ones(2)))[1])[1]
    assert type(sent) is Local
