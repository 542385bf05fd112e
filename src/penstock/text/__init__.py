"""Text for people: how numbers, times, sizes and tables are written, and how a size such as "40GiB" is read.

The lowest room: it imports nothing of ours but the errors, so every other room can use it.
A value comes in as a number, passes through `numbers` or `units` and becomes a cell; `table` puts cells into columns.
"""
