"""Modules of a traced graph put back into their tree: torch's own."""

from torch.distributed.pipelining._unflatten import _outline_submodules

__all__ = ["_outline_submodules"]
