"""Schedules: one algorithm per file, and the registry that finds them by name.

A generator yields the packed compute actions of one rank, with chunks in place of stages. `registry` checks the shape, calls the
generator for each rank that is read, and makes a `Schedule`. Files with an underscore hold parts that several algorithms share.
"""
