"""torch's stores: where processes leave word for each other."""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["PrefixStore", "TCPStore"]
