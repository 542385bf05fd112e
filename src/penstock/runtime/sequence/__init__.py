"""Slices of a sequence on a stage: what a layer keeps of the slices before, and which modules can run on slices at all.

A layer that mixes tokens asks for its `Prefix` (`prefix`): the keys and values of earlier slices, whose gradients are summed by the
backwards of later slices and taken by the slice that computed them. `Prefixes` holds those of one rank's stages during a step, and is what
the executor talks to. `token_wise` refuses modules that would mix tokens in another way.
"""
