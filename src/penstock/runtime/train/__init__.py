"""`penstock train` on each rank: the contract of a training file, the training loop, and the processes that run it.

The command opens the processes with `ranks.py` and has each of them load the user's file as a `TrainingFile`. `trainer.py` then measures
the file's model for the planner, or trains it with a plan and reports progress to the command.
`data_order.py` decides which samples each step reads; it is public, because training scripts of one's own use it too.
"""
