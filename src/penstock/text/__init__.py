"""Text for people: how numbers, times, sizes and tables are written, and how they and options ("40GiB", "5us", "chunks=4") are read.

The lowest room: it imports nothing of ours but the errors, so every other room can use it.
A value comes in as a number, passes through `numbers` or `units` and becomes a cell; `table` puts cells into columns. `units` also checks
numbers that users give, and `checks` the flags and functions.
"""
