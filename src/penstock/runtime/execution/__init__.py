"""Runs a program on one rank.

`programs` makes the proved program of a step out of the pipeline's schedule. `executor` builds one operation per action from two
collaborators (`links` connect stages through registers and channels, `operations` compute forwards and backwards) and runs them in a
loop. `overlap` and `cuda_graphs` replace single operations by overlapped or recorded ones.
"""
