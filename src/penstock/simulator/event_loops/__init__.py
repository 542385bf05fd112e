"""The event loops that time a program.

`flat` lays a schedule or program out as arrays of actions, waits and messages. `loops` has the loops themselves, written so that plain
Python and numba run the same code, and `run`, which returns when every action starts and ends.
"""
