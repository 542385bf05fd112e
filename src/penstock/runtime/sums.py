"""Sums of gradients: dense and sparse ones, rounded to the precision and laid out in memory as autograd would."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.runtime.layout import match_layout


def add(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, sparse only if both are: torch adds a sparse tensor to a dense one, but not the other way round."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def round_to(total: Tensor, parameter: Tensor) -> Tensor:
    """A new tensor with the parameter's precision and the layout that autograd gives its gradient.

    That is the parameter's own layout if its memory has no gaps, and rows one after the other otherwise.
    """
    if total.is_sparse:
        return total.coalesce().to(parameter.dtype, copy=True)
    if type(total) is not Tensor or type(parameter) not in (Tensor, nn.Parameter):
        return total.to(parameter.dtype, copy=True)
    return match_layout(total.to(parameter.dtype, copy=True), parameter)
