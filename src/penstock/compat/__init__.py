"""The names of other libraries over the parts of Penstock: change an import, keep the program.

`torch` has those of `torch.distributed.pipelining`, `deepspeed` those of DeepSpeed's pipeline module, engine and schedules. Orders and
instruction streams become programs, which are proved and run like any other.
"""
