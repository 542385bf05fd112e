"""Values in error messages, and the loggers: torch's own, so that `TORCH_LOGS=+pp` shows the same lines as with torch."""

import logging

from torch.distributed.pipelining._debug import friendly_debug_info, map_debug_info

__all__ = ["friendly_debug_info", "map_debug_info", "schedule_log", "stage_log"]

schedule_log = logging.getLogger("torch.distributed.pipelining.schedules")
stage_log = logging.getLogger("torch.distributed.pipelining.stage")
