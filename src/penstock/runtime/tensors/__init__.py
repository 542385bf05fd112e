"""Tensors as they are between stages, on one rank or over several. Imports no other room.

`boundary` checks a stage's output, turns it into the message for the next stage, and watches whether that stage changes it in place.
`dtensor` does the same for `DTensor`, of which each process holds and sends its own part.
`layout` gives gradients the strides and precision that autograd would give them.
`tensor_rows` says which rows of a whole tensor a rank holds, if it is split over the ranks of a pipeline.
"""
