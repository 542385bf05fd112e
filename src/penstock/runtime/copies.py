"""Values that every data rank holds in full and that must be the same: those of the first data rank are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.runtime.parts import local


class Copies:
    """The modules of a rank with parameters or buffers that are not kept in shards; `managed` are the parameters that are."""

    def __init__(self, modules: Mapping[int, nn.Module], managed: Mapping[int, set[int]]) -> None:
        self._modules, self._managed = modules, managed
        self._versions: dict[int, int] = {}
        """Of each buffer, when the data ranks had the same values."""

    def everything(self) -> list[Tensor]:
        """All parameters and buffers."""
        found = [buffer for part in self._buffered() for buffer in part.buffers(recurse=False)]
        for index, module in self._modules.items():
            known = self._managed.get(index, set())
            found += [parameter.detach() for parameter in module.parameters() if id(parameter) not in known]
        return found

    def _buffered(self) -> Iterator[nn.Module]:
        """Modules with buffers, those of stages in shards among them: torch leaves these as they are on each rank."""
        for module in self._modules.values():
            yield from (part for part in module.modules() if part._buffers)

    def changed(self) -> list[bool]:
        """For each module with buffers, whether they may have changed. Normalisations change theirs without a trace."""
        return [
            isinstance(part, _NormBase) or any(buffer._version != self._versions.get(id(buffer)) for buffer in part.buffers(recurse=False))
            for part in self._buffered()
        ]

    def buffers_of(self, wanted: Sequence[bool]) -> list[Tensor]:
        """The buffers of those modules."""
        return [buffer for part, want in zip(self._buffered(), wanted, strict=True) if want for buffer in part.buffers(recurse=False)]

    @torch.no_grad()
    def copy(self, connection: Any, tensors: Sequence[Tensor]) -> None:
        """Give the tensors the values that the first data rank has."""
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in map(local, tensors):
            if tensor.device.type != "meta":
                buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for held in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            connection.broadcast([flat]).wait()
            for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self._versions |= {id(tensor): tensor._version for tensor in tensors}
