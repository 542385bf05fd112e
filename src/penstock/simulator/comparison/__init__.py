"""Compares a measured timeline with its prediction.

`matching` finds the same actions and messages in both, and `differences` compares every figure in one
unit of time. `lateness` explains by how much each action is late and what caused it, and sums the delays by their cause.
"""
