"""Turn a schedule into a program: one pass per file, each a small value that prints and parses as `name{option=value}`.

`lower` runs the usual list: backwards are split or merged, stages sharded, gradients reduced, messages added and buffers counted.
Every pass takes a valid `Program` and returns a valid one. `deepspeed` and its reader translate to and from DeepSpeed's instructions.
"""
