"""Proves schedules and programs, or refuses them with every reason.

`verify` builds a `Context` (the table, the costs, the limits, and arrays that several rules read), runs the rules of `rules/` on it, and
returns a `Proof`. Each broken rule gives a `Finding` with the place, the reason, the way out and an excerpt of the grid.
"""
