"""The rules of the proof, one invariant per file.

`table` lists them in the order in which they are tried. Each rule gets a `Context` with the program and returns its findings; a later rule
may rely on the invariants that earlier rules have proved.
"""
