"""Some rows of a tensor whose other rows other ranks hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorRows:
    """A rank's rows of a tensor that is split along its first dimension, as the weights of a spread vocabulary are."""

    rows: Tensor
    first: int
    """The first of them in the whole tensor."""
    total: int
    """How many rows the whole tensor has."""

    @property
    def shape(self) -> torch.Size:
        """That of the whole tensor."""
        return torch.Size((self.total, *self.rows.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    @property
    def is_meta(self) -> bool:
        return self.rows.is_meta

    def take_from(self, whole: Tensor) -> Tensor:
        """These rows of another tensor of the same shape, which has them all."""
        return whole[self.first : self.first + len(self.rows)]

    def with_rows(self, rows: Tensor) -> TensorRows:
        """The same rows of another tensor, with as many rows."""
        return replace(self, rows=rows)
