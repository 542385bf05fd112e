"""Torch's schedule classes: each runs its rank's order on the stages that this rank holds.

`base` splits the batch, weighs and keeps the losses and merges the outputs; `single` and `multi` add one or several stages per rank,
`runtime` adds orders with their messages written out, and `named` the schedules that torch has classes for. In every step `runner`
runs the order as a list of calls on the stages, and `p2p` starts their messages.
"""
