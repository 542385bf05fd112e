"""How ranks reach each other: groups of ranks, channels between two of them, gathered values, and failures that all ranks report.

A `Group` is made by `launch` or found by `current_group`: virtual ranks on threads (`threads`), processes connected by gloo or NCCL
(`processes`), or some of those processes (`subgroup`). An executor asks its group for outboxes and inboxes once, then puts values
into the former and pulls them from the latter in every step: values are packed into frames (`message_format`, `framed_channels`) or
sent from device to device (`direct_channels`). Whenever a rank fails or waits too long, `failures` collects what every rank was doing,
and all of them raise the same report.
"""
