"""Plans for one batch, whose microbatches differ in length.

`lengths` says what a microbatch costs by its samples' lengths. `packing` divides samples into microbatches of equal cost.
`batch_planner` then orders the microbatches and chooses the schedule, for the times that these lengths take: a `BatchOrder`, which
`Pipeline.step_list` runs. All of it is a pure function of lengths and costs, so every rank finds the same without asking the others.
"""
