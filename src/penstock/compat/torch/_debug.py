"""Values in error messages: torch's own."""

from torch.distributed.pipelining._debug import friendly_debug_info, map_debug_info

__all__ = ["friendly_debug_info", "map_debug_info"]
