"""Torch's own function that puts the modules of a traced graph back into their tree."""

from torch.distributed.pipelining._unflatten import _outline_submodules

__all__ = ["_outline_submodules"]
