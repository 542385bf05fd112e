"""What a pipeline does over the other dimensions of a device mesh, and with the gradients of all its stages.

`mesh` finds the ranks that form the pipeline and those that hold the same stages. `data_parallel` runs what data ranks do together in
each step, for stages that are copies or that `fully_shard` keeps in shards (`fsdp`). After a step `gradients` clips and unscales the
gradients, the same on all ranks.
"""
