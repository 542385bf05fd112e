"""The event loops that time a program.

`flat` lays a schedule or program out as arrays of actions, waits and messages. `loops` has the loops themselves, written so that plain
Python and numba run the same code. `engine` runs them, compiled if numba is installed, and returns when every action starts and ends.
"""
