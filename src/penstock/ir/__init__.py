"""The language that every other part reads and writes: actions, placements, schedules and programs.

`Table` is the common part of `Schedule` and `Program`: packed `Rows`, one per rank, which the rest of the package works on as arrays.
`dependencies` says what must come before what, `memory_ledger` what is held from when to when, `costs` how much an action takes, and
`formats` reads and writes files.
"""
