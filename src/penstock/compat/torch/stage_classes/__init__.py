"""Torch's stages: one part of the model on its rank.

`base` runs forwards and backwards, the latter whole or split by `split_backward`; `data_parallel` adds what DDP, FSDP and
gradients of earlier steps need around them. `manual` is the stage around a module of the user's, which on the CPU exchanges values
with its neighbours through `messages` that describe their own shapes.
"""
