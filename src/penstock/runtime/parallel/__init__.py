"""The other dimensions of a device mesh, and the gradients of all stages of a pipeline.

`mesh` finds the ranks that form the pipeline and those that hold the same stages. `data_parallel` runs what data ranks do together in
each step, for stages that are copies or that `fully_shard` keeps in shards (`fsdp`). After a step `gradients` clips and unscales the
gradients, the same on all ranks. `vocabulary` has a rank's share of an embedding and a head that are spread over the pipeline,
whose collectives run on a lane (`collective_lane`).
"""
