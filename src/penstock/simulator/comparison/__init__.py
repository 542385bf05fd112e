"""Compares a measured timeline with its prediction.

`matching` finds the same actions and messages in both, `scaling` brings them to one unit of time, and `differences` compares every
figure. `lateness` explains by how much each action is late and what caused it, and `totals` sums the delays by their cause.
"""
