"""Adapters that put a pipeline into training stacks that people already use, one file per package.

Each adapter is a thin layer over the public names of `penstock.runtime`, and imports its package when it is imported itself. What a package
offers that has no meaning on a pipeline is refused before the first step, in one sentence that names the way out.
"""
